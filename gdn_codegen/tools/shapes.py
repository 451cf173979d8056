"""Shapes that `bench` and `tune` work on: those of a file, and those by default."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Packed sequences of these lengths, H query and key heads, HV value heads."""

    name: str
    lens: tuple[int, ...]
    H: int
    HV: int


def shapes(path: Path) -> list[Shape]:
    """The shapes of a JSON file: a list of {"name", "lens", "H", "HV"}."""
    def fail(got: Any) -> ValueError:
        return ValueError(f'shapes: got {got} in {path}; accepted: a list of {{"name": text, "lens": [1 or more, ...], "H": 1 or '
                          'more, "HV": a multiple of H}, each name once')
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"shapes: got {path}: {e}; accepted: a JSON file") from None
    if not isinstance(rows, list) or not rows:
        raise fail(type(rows).__name__ if rows else "nothing")
    out = []
    for r in rows:
        if not isinstance(r, dict) or set(r) != {"name", "lens", "H", "HV"} or not isinstance(r["name"], str):
            raise fail(r)
        numbers = [r["H"], r["HV"], *(r["lens"] if isinstance(r["lens"], list) and r["lens"] else [0])]
        if not all(type(n) is int and n >= 1 for n in numbers) or r["HV"] % r["H"]:
            raise fail(r)
        out.append(Shape(r["name"], tuple(r["lens"]), r["H"], r["HV"]))
    if len({s.name for s in out}) != len(out):
        raise fail("a name twice")
    return out


#: The shapes for which `tune` measures by default: prompts of 2 to 128 thousand tokens.
SHAPES = (*(Shape(f"{n} x {t}, {h}/{hv}", (t,) * n, h, hv) for n, t, h, hv in (
    (1, 2048, 16, 32), (1, 8192, 4, 16), (1, 32768, 4, 16), (8, 4096, 4, 16), (1, 32768, 16, 16), (4, 8192, 16, 64),
    (1, 131072, 16, 16), (1, 8192, 16, 32), (8, 1024, 16, 32), (1, 131072, 32, 32), (1, 65536, 16, 16))),
    Shape("4096 + 28672, 4/16", (4096, 28672), 4, 16))
