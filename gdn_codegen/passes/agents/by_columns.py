"""by_columns: lets warps that run iterations in turn compute some columns of their tiles at a time. For Hopper's warp groups.

All tiles of a chunk do not fit the registers of one warp, and the text for all columns at once is long. So ops that work on each
column of K by itself, and products that sum over K, run together for PIECE columns, then for the next ones. They follow one
another in the agent's order, and have the attribute `by_columns`. What needs all columns of their results comes after them.
"""
from __future__ import annotations

from collections.abc import Collection

from ...ir.core import Op
from ...ir.ops import BY_COLUMNS, OPS
from ...ir.types import Tile

#: Columns at a time: the depth of an mma of 16 bits.
PIECE = 16


def by_columns(ops: list[Op], in_turn: Collection[str], rows: str = "C") -> list[Op]:
    """The ops of a walk, each with its agent, with those of the agents `in_turn` in this order. rows: the dim of tokens."""
    if not in_turn:
        return ops
    mine = [o for o in ops if o.agent in in_turn]
    type_of = {o.out: o.type for o in ops if o.type is not None}
    readers: dict[str, list[Op]] = {o.out: [] for o in mine if o.out}
    for o in mine:
        for a in o.args:
            readers.get(a, []).append(o)
    apart = set[Op]()
    for o in reversed(mine):  # a tile whose columns something needs together is computed with that
        together = o.kind == "matmul" or (o.kind == "move" and o.attr("space") == "shared")
        if _works_on_columns(o, type_of, rows) and (together or apart.issuperset(readers[o.out])):
            apart.add(o)
    stage = _stages(mine, apart, readers)
    mine = [o.with_attrs(**{BY_COLUMNS: PIECE}) if o in apart else o for o in sorted(mine, key=stage.__getitem__)]
    return [*(o for o in ops if o.agent not in in_turn), *mine]


def _stages(ops: list[Op], apart: set[Op], readers: dict[str, list[Op]]) -> dict[Op, int]:
    """A number for each op, in whose order they run. Odd numbers are those of runs of pieces. What an op in a run computes is
    read in the same run, because registers have one piece; sums over pieces are read after it."""
    defs = {o.out: o for o in ops if o.out}
    stage, before = dict.fromkeys(ops, 0), dict[Op, int]()
    while stage != before:
        before = dict(stage)
        for o in ops:
            for x in (defs[a] for a in o.args if a in defs):
                stage[o] = max(stage[o], stage[x] + (x.kind == "matmul" and x in apart))
            stage[o] += (stage[o] + (o in apart)) % 2
        for o in (x for x in reversed(ops) if x in apart and x.kind != "matmul"):
            stage[o] = max([stage[o], *(stage[r] for r in readers[o.out])])
    return stage


def _works_on_columns(o: Op, type_of: dict[str, Tile], rows: str) -> bool:
    """Whether `o` computes a tile with another dim than tokens along its rows, each column by itself, or sums over that dim."""
    if o.kind == "matmul":
        return bool(o.attr("tb")) and not o.attr("ta") and type_of[o.args[0]].dims[1] != rows and len(o.args) == 2
    t = o.type
    apart = OPS[o.kind].elementwise or OPS[o.kind].view or o.kind == "move"
    return bool(apart) and t is not None and t.rank == 2 and t.dims[0] == rows and t.dims[1] not in (rows, 1)
