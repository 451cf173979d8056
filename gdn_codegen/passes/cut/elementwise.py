"""elementwise: which conversions of inputs, and which of their derivatives, are elementwise, or sum such over the tokens of a
chunk. `roles` uses it.

An elementwise conversion, such as a gate's, can be part of the kernel that reads its result. Its derivative can be part of the
kernel that computes the cotangent. So can sums over the tokens of a chunk, which are derivatives by what a head has. Other
conversions, such as a norm, read sums over a row.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...ir.core import Op
from ...ir.dataflow import after
from ...ir.ops import OPS
from ...ir.types import Tile


def keeps_entries(o: Op) -> bool:
    """Whether an entry of the result depends on the same entry of each operand only. Vectors may be rows or columns."""
    return OPS[o.kind].elementwise or o.kind in ("valid", "col", "row", "expand")


def sums_rows(n: str, defs: Mapping[str, Op]) -> bool:
    """Whether the value `n` depends on other than the same entries of inputs, such as a row that is divided by its norm."""
    todo, seen = [n], set[str]()
    while todo:
        o = defs.get(todo.pop())
        if o is not None and o.out not in seen:
            seen.add(o.out)
            if o.args and not keeps_entries(o):
                return True
            todo += o.args
    return False


def converted(ops: list[Op], outputs: Collection[str]) -> tuple[str, ...]:
    """Inputs after their forms, and the `outputs` of which these are computed."""
    made = {o.out for o in ops if o.kind == "boundary" and not o.attr("back")}
    before = set(made)
    for o in reversed(ops):
        before |= set(o.args) if o.out in before else set()
    return tuple(o.out for o in ops if o.out in made or (o.out in before and o.out in outputs))


def elementwise(ops: list[Op], core: Iterable[str], outputs: Collection[str], type_of: Mapping[str, Tile], rank: int = 2
                ) -> set[str]:
    """The `outputs` that are elementwise functions of one cotangent of `core`, a tile, or elementwise functions of sums of its
    columns, where all outputs that read this cotangent are, and read no other. rank: 1 for a cotangent that is a vector."""
    reached = {c: {c} | after(ops, {c}) for c in core if c not in outputs}
    found = set[str]()
    for c, values in reached.items():
        same = {c}
        for o in ops:
            if not o.out or o.out not in values or not values & set(o.args) <= same:
                continue
            dims, own = type_of[o.out].dims, {type_of[n].dims for n in values & set(o.args)}
            if o.kind == "column_sum" or (keeps_entries(o) and own == {dims} and dims in (type_of[c].dims, type_of[c].dims[1:])):
                same.add(o.out)
        others = set[str]().union(*(x for other, x in reached.items() if other != c))
        read = values & set(outputs)
        if type_of[c].rank == rank and read <= same - others:
            found |= read
    return found
