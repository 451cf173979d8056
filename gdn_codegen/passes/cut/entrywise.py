"""entrywise: which conversions of inputs, and which of their derivatives, go entry by entry. `roles` uses it.

A conversion that goes entry by entry, as a gate's, can be part of the kernel that reads its result. So can its derivative be part
of the kernel that gives the cotangent. Others, as a norm, read sums over a row.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...ir.core import Op
from ...ir.dataflow import after
from ...ir.ops import OPS
from ...ir.types import Tile


def by_entry(o: Op) -> bool:
    """Whether an entry of the result depends on the same entry of each operand only. Vectors may be rows or columns."""
    return OPS[o.kind].elementwise or o.kind in ("valid", "col", "row", "expand")


def summed(n: str, defs: Mapping[str, Op]) -> bool:
    """Whether the value `n` depends on sums of entries of an input, as a row that is divided by its norm."""
    todo, seen = [n], set[str]()
    while todo:
        o = defs.get(todo.pop())
        if o is not None and o.out not in seen:
            seen.add(o.out)
            if o.args and not by_entry(o):
                return True
            todo += o.args
    return False


def entrywise(ops: list[Op], core: Iterable[str], outputs: Collection[str], type_of: Mapping[str, Tile]) -> set[str]:
    """The tiles of `outputs` that are computed entry by entry from one cotangent of `core`, where all outputs that read this one
    are, and no other cotangent is read."""
    found, others = set[str](), set[str]()
    for c in (c for c in core if c not in outputs):
        reached, same = {c} | after(ops, {c}), {c}
        for o in ops:
            if o.out in reached and by_entry(o) and reached & set(o.args) <= same and type_of[o.out].dims == type_of[c].dims:
                same.add(o.out)
        read = reached & set(outputs)
        alone = type_of[c].rank == 2 and read <= same
        others |= set() if alone else read
        others |= found & read
        found |= read if alone else set()
    return found - others
