"""by_columns: lets warps that run iterations in turn compute some columns of their tiles at a time. For Hopper's warp groups.

All tiles of a chunk do not fit the registers of one warp, and the text for all columns at once is long. So ops that work on each
column of K by itself, and products that sum over K, run together for PIECE columns, then for the next ones. They follow one
another in the agent's order, and have the attribute `by_columns`. What needs all columns of their results comes after them. A
value that a later run needs again, such as a tile of which a norm is computed first, is computed again there.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping

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
    readers: dict[str, list[Op]] = {o.out: [] for o in mine if o.out}
    for o in mine:
        for a in o.args:
            readers.get(a, []).append(o)
    apart = _apart(mine, {o.out: o.type for o in ops if o.type is not None}, readers, rows)
    return [*(o for o in ops if o.agent not in in_turn), *_in_runs(mine, apart, _stages(mine, apart, readers))]


def _apart(ops: list[Op], type_of: Mapping[str, Tile], readers: Mapping[str, list[Op]], rows: str) -> set[Op]:
    """The ops that compute pieces. A tile of which something needs all columns is computed with that."""
    dims = {o: d for o in ops if (d := _columns(o, type_of, rows))}
    of = next((d for o, d in dims.items() if o.kind == "matmul"), next(iter(dims.values()), ""))
    defs, apart = {o.out: o for o in ops if o.out}, {o for o, d in dims.items() if d == of}
    while True:
        whole = {o for o in apart if (o.kind == "matmul" and not {defs[a] for a in o.args if a in defs} <= apart) or
                 (o.kind != "matmul" and o.attr("space") != "shared" and not apart.issuperset(readers[o.out]))}
        if not whole:
            return apart
        apart -= whole


def _columns(o: Op, type_of: Mapping[str, Tile], rows: str) -> str:
    """The dim of columns that `o` computes each by itself, or sums over. "" if it is no such op, or the dim is that of tokens."""
    if o.kind == "matmul":
        fits, t = len(o.args) == 2 and bool(o.attr("tb")) and not o.attr("ta"), type_of[o.args[0]]
    else:
        t = o.type if o.type is not None else Tile((), "float32")
        fits = t.rank == 2 and t.dims[0] == rows and (OPS[o.kind].elementwise or bool(OPS[o.kind].view) or o.kind == "move")
    return str(t.dims[1]) if fits and t.dims[1] not in (rows, 1) else ""


def _stages(ops: list[Op], apart: set[Op], readers: Mapping[str, list[Op]]) -> dict[Op, int]:
    """A number for each op, in whose order they run: as late as its readers allow. Odd numbers are those of runs of pieces. Sums
    over pieces are read after their run."""
    defs, stage = {o.out: o for o in ops if o.out}, dict[Op, int]()
    for o in ops:  # as early as possible
        first = max((stage[x] + (x.kind == "matmul" and x in apart) for x in (defs[a] for a in o.args if a in defs)), default=0)
        stage[o] = first + (first + (o in apart)) % 2
    for o in reversed(ops):
        last = min((stage[r] - (o.kind == "matmul" and o in apart) for r in readers.get(o.out, [])), default=stage[o])
        stage[o] = last - (last + (o in apart)) % 2
    return stage


def _in_runs(ops: list[Op], apart: set[Op], stage: Mapping[Op, int]) -> list[Op]:
    """The ops in the order of their stages, those of runs with the attribute. Registers hold one piece, so that a run computes
    again what an earlier one computed."""
    defs, out, made = {o.out: o for o in ops if o.out}, list[Op](), dict[tuple[str, int], str]()

    def piece(a: str, run: int) -> str:
        """The name under which a run reads `a`."""
        o = defs.get(a)
        if o is None or o not in apart or o.kind == "matmul" or stage[o] == run:
            return a
        if (a, run) not in made:
            made[a, run] = f"{a}_again{sum(x == a for x, _ in made) or ''}"
            out.append(o.changed(out=made[a, run], args=tuple(piece(x, run) for x in o.args)).with_attrs(**{BY_COLUMNS: PIECE}))
        return made[a, run]

    for o in sorted(ops, key=stage.__getitem__):
        if o in apart:
            args = tuple(piece(a, stage[o]) for a in o.args)
            o = o.changed(args=args).with_attrs(**{BY_COLUMNS: PIECE})
        out.append(o)
    return out
