"""Repeated lines of a section as a loop.

Passes write a repeated step out, such as a doubling of the blocks of an inverse, and derive the waits of each value. In the text
such steps often differ in nothing but the names of tiles and pointers of one type, and in numbers. So a run of lines that comes
again becomes a loop. The names become one array, or one tile if all have one address. What the loop runs is what was written out:
the same instructions in the same order.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import eq

#: The arguments of a template are one token, since a loop's variable may not be among them.
TOKEN = re.compile(r"<(?:[^<>()]|<[^<>()]*>)*>(?=\()|EVENT_ID\d|[A-Za-z_]\w*|0x[0-9a-f]+\b|\d[\w.]*|\W")
NUMBER = re.compile(r"(EVENT_ID)?(0x[0-9a-f]+|\d+)")
#: Declarations that may become one of an array: of a tile at a fixed address, and of a pointer. Groups: type, name, place.
TILE = re.compile(r"\s*auto (?P<name>\w+) = tile_at<(?P<type>.*)>\((?P<at>0x[0-9a-f]+)\);$")
POINTER = re.compile(r"\s*(?P<type>__gm__ \w+ \*)(?P<name>\w+) = (?P<at>reinterpret_cast<.*);$")
LOCAL = re.compile(r"\s*(auto|const|constexpr|int64_t|float|//|\+\+|for|#)")
EVENTS = 8
#: A loop must leave out so many lines at least, and one in so many of a section.
LEAST, WORTH = 40, 8


def rolled(lines: list[str]) -> list[str]:
    """The lines of a section, with the run of lines that repeats most as a loop if that makes the section clearly shorter."""
    least = max(LEAST, len(lines) // WORTH)
    found = {m["name"]: m for x in lines if _depth(x) == _depth(lines[0]) and (m := TILE.match(x) or POINTER.match(x))}
    kinds = {name: m["type"] for name, m in found.items()}
    for first, length, times in _runs(lines, kinds, least):
        if (new := _Loop(lines, found, first, length, times).text()) and len(new) <= len(lines) - least:
            return new
    return lines


def _runs(lines: list[str], kinds: dict[str, str], least: int) -> Iterator[tuple[int, int, int]]:
    """(first line, lines, times) of runs that repeat, those that leave out most lines first, and all at least so many."""
    keys: dict[object, int] = {}
    ids = [keys.setdefault(n if LOCAL.match(x) else (_depth(x), *_key(x, kinds)), len(keys)) for n, x in enumerate(lines)]
    found = []
    for length in range(4, len(ids) // 2 + 1):
        for m in re.finditer(rb"\x01{%d,}" % max(length, least), bytes(map(eq, ids, ids[length:]))):
            again, spare = divmod(len(m[0]), length)
            if again * length >= least:
                found.append((again * length, m.start(), length, again + 1, spare))
    for _, first, length, times, spare in sorted(found, reverse=True):
        for n in range(first, first + spare + 1):
            if _depth(lines[n]) == min(_depth(x) for x in lines[n: n + length]) and lines[n].strip()[0] != "}":
                yield n, length, times


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _parts(line: str) -> tuple[list[str], list[str]]:
    """The tokens of a line's code, and of its comment."""
    code, _, comment = line.partition("  //")
    return TOKEN.findall(code), TOKEN.findall(comment)


def _key(line: str, kinds: dict[str, str]) -> list[str]:
    """A line's code without what may differ from one iteration to the next."""
    return [kinds.get(x) or ("#" if NUMBER.fullmatch(x) else x) for x in _parts(line)[0]]


class _Loop:
    """A run of lines as a loop. found: the declarations of tiles and pointers, by name."""

    def __init__(self, lines: list[str], found: dict[str, re.Match[str]], first: int, length: int, times: int) -> None:
        self.lines, self.found, self.first, self.length, self.times = lines, found, first, length, times
        self.taken = set(re.findall(r"\w+", "\n".join(lines)))
        self.place: dict[str, tuple[str, int]] = {}  # name -> its array, and its number there: -1 for a tile that all are

    def text(self) -> list[str] | None:
        """All lines. None if the names or numbers do not go from one iteration to the next in the same way."""
        body = [[_parts(self.lines[self.first + r * self.length + j]) for r in range(self.times)] for j in range(self.length)]
        chains = self.chains([c for row in body for c in zip(*(code for code, _ in row), strict=True)])
        if chains is None:
            return None
        declared: dict[str, list[str]] = {}
        for chain in chains:
            if not (made := self.array(chain)):
                return None
            declared |= {chain[0]: made} | {x: [] for x in chain[1:]}
        inner = [*filter(None, map(self.line, body))]
        if len(inner) < self.length:
            return None
        space, end = " " * _depth(self.lines[self.first]), self.first + self.length * self.times
        loop = [f"{space}for (int64_t i = 0; i < {self.times}; ++i) {{", *(f"    {x}" for x in inner), f"{space}}}"]
        before, after = (self.outside(part, declared) for part in (self.lines[: self.first], self.lines[end:]))
        return [*before, *loop, *after]

    def chains(self, columns: Sequence[Sequence[str]]) -> list[list[str]] | None:
        """Names in the order in which iterations use them. None if two uses have different orders."""
        after: dict[str, str] = {}
        before: dict[str, str] = {}
        for column in columns:
            if column[0] in self.found and len({*column}) > 1:
                for a, b in pairwise(column):
                    if after.setdefault(a, b) != b or before.setdefault(b, a) != a:
                        return None
        out = [[x] for x in after if x not in before]
        for chain in out:
            while chain[-1] in after:
                chain.append(after[chain[-1]])
        return out if sum(map(len, out)) == len({*after, *before}) else None

    def array(self, chain: list[str]) -> list[str]:
        """The declaration of an array in place of those of its elements, or of one tile if all are the same. [] for pointers that
        are not evenly apart."""
        name = next(filter(None, map(common, (chain, chain[1:], chain[:-1]))), "_to_".join((chain[0], chain[-1])))
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        of, at = self.found[chain[0]], [self.found[x]["at"] for x in chain]
        space, tiles = " " * _depth(of[0]), of.re is TILE
        one = tiles and len({*at}) == 1
        self.place |= {x: (name, -1 if one else n) for n, x in enumerate(chain)}
        if one:
            return [f"{space}auto {name} = tile_at<{of['type']}>({at[0]});"]
        if tiles:
            return [f"{space}{of['type']} {name}[{len(chain)}];", f"{space}place({name}, {{{', '.join(at)}}});"]
        each = self.line([(TOKEN.findall(x), []) for x in at])
        return [] if each is None else [f"{space}{of['type']}{name}[{len(chain)}];",
                                        f"{space}for (int64_t i = 0; i < {len(chain)}; ++i) {name}[i] = {each};"]

    def line(self, row: Sequence[tuple[list[str], list[str]]]) -> str | None:
        """One line for all iterations, with `i` where they differ. None if numbers do not grow evenly."""
        if len({len(code) for code, _ in row}) > 1:
            return None
        columns, out = [*zip(*(code for code, _ in row), strict=True)], list[str]()
        for n, column in enumerate(columns):
            if len({*column}) > 1 and column[0] not in self.place:
                before, after = ("".join(c[0] for c in some).strip() for some in (columns[:n], columns[n + 1:]))
                if not (number := _evenly(column, before[-1:] not in {*"([,"} or after[:1] not in {*")],"})):
                    return None
                out.append(number)
            else:
                out.append(self.name(column[0], len({*column}) > 1))
        comments = [*zip(*(comment for _, comment in row), strict=False)]
        said = "".join(self.name(c[0], len({*c}) > 1) if c[0] in self.place else common(c) or c[0]
                       for c in comments)
        return "".join(out) + (f"  //{said}" if said else "")

    def name(self, word: str, moves: bool = False) -> str:
        """What stands for a word. moves: its number in the array grows with `i`."""
        if word not in self.place:
            return word
        name, n = self.place[word]
        return name if n < 0 else f"{name}[{'i' + (f' + {n}' if n else '') if moves else n}]"

    def outside(self, lines: list[str], declared: dict[str, list[str]]) -> Iterator[str]:
        """Lines before or after the loop, with the new declarations."""
        for x in lines:
            m = TILE.match(x) or POINTER.match(x)
            if m and m["name"] in declared:
                yield from declared[m["name"]]
            else:
                yield "".join(map(self.name, TOKEN.findall(x)))


def common(names: Sequence[str]) -> str:
    """One name for several that differ in one part: with an n in its place. "" if they differ in more."""
    parts = [*zip(*(x.split("_") for x in names), strict=False)]
    differ = [n for n, part in enumerate(parts) if len({*part}) > 1]
    if len({x.count("_") for x in names}) == 1 and len(differ) < 2:
        return "_".join("n" if n in differ else part[0] for n, part in enumerate(parts))
    return ""


def _evenly(column: Sequence[str], brackets: bool) -> str:
    """An expression in `i` for numbers that grow evenly, those of events modulo 8. "" if they do not. brackets: around it."""
    found = [NUMBER.fullmatch(x) for x in column]
    numbers = [int(m[2], 0) for m in found if m]
    event = bool(found[0] and found[0][1])
    steps = {(b - a) % EVENTS if event else b - a for a, b in pairwise(numbers)}
    if len(numbers) < len(column) or len(steps) > 1:
        return ""
    first, step = hex(numbers[0]) if column[0][1:2] == "x" else str(numbers[0]), min(steps)
    text = (f"{first} + " if numbers[0] else "") + ("i" if step == 1 else f"i * {step}")
    return f"event_id({text})" if event else f"({text})" if brackets else text
