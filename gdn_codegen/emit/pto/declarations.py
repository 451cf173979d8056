"""Declarations of a section of a kernel: which of them its other lines use.

The writer declares the tile of each value, and all indices of an instance. Some ops address a part of a tile by a declaration of
their own, and an agent needs some indices only. So what no line uses is left out once the section's lines are known.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

WORD = re.compile(r"[A-Za-z_]\w*")
NUMBERS = re.compile(r"(\s*)((?:(?:const|constexpr) )?(?:int64_t|float)) (\w+ = .*);$")
TILE = re.compile(r"\s*(?:auto (\w+) = tile_at<.*|\w+<[^;]*> (\w+)(?:\(.*\))?);$")
#: Lines that give a tile its address, or count on, and so are no use of it.
OWN = re.compile(r"\s*(?:TASSIGN\((\w+), .*\)|\+\+(\w+));$")
NEXT = re.compile(r", (?=\w+ = )")


def used_of(declared: Mapping[str, str], lines: list[str]) -> list[str]:
    """Those of the declarations, by name, that lines of text use, or that such a declaration uses. A declaration may use earlier
    ones."""
    names, found = set(WORD.findall("\n".join(lines))), []
    for name, line in reversed([*declared.items()]):
        if name in names:
            found.append(line)
            names.update(WORD.findall(line))
    return found[::-1]


def pruned(lines: list[str]) -> list[str]:
    """The lines of a section without the numbers and tiles that nothing in it uses."""
    while True:
        known, uses = Counter[str](), Counter[str]()
        for line in lines:
            text = line.partition("//")[0].rstrip()
            names = _declared(text)
            known.update(names)
            uses.update(WORD.findall(text))
            uses.subtract(names + _own(text))
        idle = {n for n in known if not uses[n]}
        if not idle:
            return lines
        lines = [x for line in lines for x in _without(line, idle)]


def _own(text: str) -> list[str]:
    """The name of which a line is no use, if it is such a line."""
    found = OWN.match(text)
    return [found[1] or found[2]] if found else []


def _declared(text: str) -> list[str]:
    """The names that a line declares."""
    if numbers := NUMBERS.match(text):
        return [x.partition(" = ")[0] for x in NEXT.split(numbers[3])]
    return [tile[1] or tile[2]] if (tile := TILE.match(text)) else []


def _without(line: str, idle: set[str]) -> list[str]:
    """The line without the declarations of these names, in a list. An empty one if nothing of it is left."""
    text = line.partition("//")[0].rstrip()
    if numbers := NUMBERS.match(text):
        kept = [x for x in NEXT.split(numbers[3]) if x.partition(" = ")[0] not in idle]
        return [f"{numbers[1]}{numbers[2]} {', '.join(kept)};"] if kept else []
    return [] if idle.intersection(_declared(text) + _own(text)) else [line]
