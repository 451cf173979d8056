"""Whether two emitted kernels are the same up to names: a consistent, one-to-one renaming of identifiers, comments left out."""
from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from keyword import kwlist

#: Words that no renaming touches: of the languages, and names of dtypes.
FIXED = {*kwlist, "auto", "bool", "char", "const", "constexpr", "do", "double", "float", "half", "inline", "int", "range",
         "sizeof", "static", "struct", "switch", "template", "typename", "unsigned", "using", "void", "float16", "bfloat16",
         "float32", "float64", "int32", "int64", "int32_t", "uint32_t", "int64_t", "uint64_t", "bfloat16_t", "true", "false"}
TOKEN = re.compile(r"\n[ ]*|[A-Za-z_]\w*|\d[\w.]*|\S")
DEFINES = ("def", "void", "class", "struct")


def tokens(text: str, python: bool) -> list[str]:
    """The tokens of Python or C++ without comments. Where a line breaks for its length is none, nor is the comma that Python's
    formatter then puts after the last argument; indentation of a statement of Python is one."""
    text = re.sub(r"#[^\n]*", "", text) if python else re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    found = TOKEN.findall("".join(f"\n{x.rstrip()}" for x in text.splitlines() if x.strip()))
    out: list[str] = []
    depth, broken = 0, False  # inside of brackets; after a line's end
    for t in found:
        depth += (t in "([{") - (t in ")]}")
        if t[0] != "\n":
            if broken and t in ")]}" and out[-1] == ",":
                out.pop()
            out.append(t)
        elif python and not depth:
            out.append(t)
        broken = t[0] == "\n"
    return out


def _words(found: list[str]) -> Iterator[tuple[str, bool]]:
    """Each token, and whether a renaming may change it: identifiers, but no attributes, and no functions that are not defined
    here, as in `def f(`, `void f(` and `Tile<float> t(`."""
    own = {n for before, n in pairwise(found) if before in (*DEFINES, ">") or (before.isidentifier() and before not in FIXED)}
    for before, t, after in zip(["", *found], found, [*found[1:], ""], strict=False):
        free = (t[0].isalpha() or t[0] == "_") and t not in FIXED and before not in (".", "::") and (after != "(" or t in own)
        yield t, free


def difference(a: str, b: str, python: bool = True) -> str:
    """"" where `b` is `a` with identifiers renamed one to one, else the first difference, with what stands before it. python: the
    language of both; else C++."""
    left, right = tokens(a, python), tokens(b, python)
    to: dict[str, str] = {}
    back: dict[str, str] = {}
    for n, ((x, free), (y, also)) in enumerate(zip(_words(left), _words(right), strict=False)):
        same = to.setdefault(x, y) == y and back.setdefault(y, x) == x if free and also else x == y
        if not same:
            return f"{' '.join(left[max(0, n - 30):n + 8])}\n  is not\n{' '.join(right[max(0, n - 30):n + 8])}"
    return "" if len(left) == len(right) else f"{len(left)} tokens, and {len(right)}"
