"""places: checks where the tiles of a tensor lie in memory, and which columns of them an op moves, for `verify`."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .core import Op, Program
from .types import Tensor

#: Index of a tensor with `at` -> the indices of the tensors at whose integers its tiles may lie.
AT = {"sequence": ("number", "numbers"), "checkpoint": ("number", "numbers"), "numbers": ("number",)}


def misplaced(p: Program, t: Tensor) -> Iterator[str]:
    """An error text for each of the fields `at`, `over` and `cleared` of a tensor that is wrong."""
    by_name = {x.name: x for x in p.tensors}
    if t.at and (t.index not in AT or t.at not in by_name or by_name[t.at].index not in AT[t.index]):
        yield (f"tensor {t.name}, index {t.index}, lies at {t.at!r}; accepted: "
               + ", ".join(f"{index} at {' or '.join(places)}" for index, places in AT.items()))
    if t.over:
        under = by_name.get(t.over)
        if t.role != "output" or under is None or not _alike(t, under):
            yield f"output {t.name} lies over {t.over!r}, which is not an input like it"
    if t.cleared and (t.role != "output" or t.index != "token"):
        yield f"tensor {t.name} is cleared; only an output of tokens has rows that no sequence covers"


def has_columns(p: Program, t: Tensor, o: Op) -> bool:
    """Whether the rows of `t` have the columns that a load or store moves, and memory has them all."""
    first, size = o.attr("piece")
    whole = t.dims and not p.padded(t)[-1] and not o.attr("heads") and not o.attr("last")
    return bool(whole) and 0 <= first < first + size <= t.tile.shape(p.sizes)[-1]


def _alike(t: Tensor, under: Tensor) -> bool:
    """Whether the tiles of `t` are those of the tensor that it overwrites. Tiles after chunks are slots of a pool, too."""
    if t.index == "checkpoint" and t.at and under.index == "sequence":
        t = replace(t, index=under.index)
    return replace(t, name=under.name, role=under.role, over="") == under
