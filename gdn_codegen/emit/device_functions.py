"""Device functions: functions that kernels call. They are plain Python beside an emitter, and generated modules have copies.

Emitters read the files as text, since the files import the target's package.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Definition:
    """A function, or an assignment, of the top level of a file. text: its source, with decorators. names: the names that it
    uses."""

    text: str
    names: frozenset[str]
    is_function: bool


@cache
def definitions(*files: Path) -> Mapping[str, Definition]:
    """The top-level functions and assignments of Python files, by name, in order."""
    return {name: x for file in files for name, x in _definitions(file.read_text(encoding="utf-8"))}


def _definitions(text: str) -> Iterator[tuple[str, Definition]]:
    """The definitions of a file's text, with their names."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            name, first = node.name, min([node.lineno, *(x.lineno for x in node.decorator_list)])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno
        else:
            continue
        used = frozenset(x.id for x in ast.walk(node) if isinstance(x, ast.Name))
        yield name, Definition("\n".join(lines[first - 1:node.end_lineno]), used, isinstance(node, ast.FunctionDef))


#: Comments and strings, then names (not those of attributes and of keyword arguments), with the first attribute of each.
_NAMES = re.compile(r'''#.*|"""(?s:.*?)"""|"[^"\n]*"|'[^'\n]*'|(?<![\w.])(([^\W\d]\w*)(?:\.\w+)?)(?!\w|=[^=])''', re.ASCII)


def used(function: str) -> set[str]:
    """The names, and the attributes of names, such as "t.gemm", that the text of a function uses. Keywords are among them. It
    reads the text as words, which takes a tenth of the time of parsing it."""
    found = _NAMES.findall(function)
    return {x for pair in found for x in pair if x}


def needed(known: Mapping[str, Definition], names: Iterable[str]) -> list[str]:
    """Those of `names` that are known, and all that they use directly or indirectly, in the order of `known`."""
    found: set[str] = set()
    todo = [*names]
    while todo:
        name = todo.pop()
        if name in known and name not in found:
            found.add(name)
            todo += known[name].names
    return [name for name in known if name in found]


def texts(known: Mapping[str, Definition], names: Iterable[str]) -> list[str]:
    """The source of what `names` need: all assignments as one text, then a text for each function."""
    found = [known[name] for name in needed(known, names)]
    assignments = "\n".join(x.text for x in found if not x.is_function)
    return [*([assignments] if assignments else []), *(x.text for x in found if x.is_function)]
