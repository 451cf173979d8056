"""unfilled: marks loads whose rows past the sequence's end may hold anything. For walks on Hopper under TileLang (sm_90a).

A copy unit copies whole tiles. If a sequence ends inside a chunk, the last rows are another sequence's. Threads wait for the copy
and set these rows to zero. That takes longer than the copy itself, and the next loads wait for it. It is not needed if the rows
reach only rows past the end of tiles that are stored, because a store leaves them out. The pass follows them from op to op: an
elementwise op keeps them apart, and so does a product unless it sums over them.

Example: o = q @ S. Row i of o depends only on row i of q, so that the load of q is marked. In k.T @ U all rows are summed.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Program, loops, map_ops
from ...ir.ops import OF_ROWS, OPS
from ...ir.types import Tile
from ..stage import takes


@takes("placed")
def unfilled(p: Program) -> Program:
    """`p` with the mark `unfilled` on such loads in kernels with several agents."""
    def each(k: Kernel) -> Kernel:
        (loop,) = loops(k.body)
        found = {o for o in loop.ops if _moves_tokens(p, o) and o.kind == "load" and _stays_apart(p, loop, o)}
        return replace(k, body=map_ops(k.body, lambda o: [o.with_attrs(unfilled=True) if o in found else o]))

    return p.map_kernels(lambda k: each(k) if k.agents else k)


def _moves_tokens(p: Program, o: Op) -> bool:
    """Whether `o` moves a tile with one row for each token."""
    t = p.tensor(o.attr("tensor")) if o.kind in ("load", "store") else None
    return t is not None and t.index == "token" and len(t.dims) == 2


def _stays_apart(p: Program, loop: Loop, load: Op) -> bool:
    """Whether rows of the tile that `load` gives reach only the same rows of stored tiles, and no later iteration."""
    axis = {load.out: int(bool(load.attr("transposed")))}  # value -> the axis of its tile along which tokens lie
    type_of: dict[str, Tile | None] = {o.out: o.type for o in loop.ops}
    for o in loop.ops:
        reached = [(n, axis[a]) for n, a in enumerate(o.args) if a in axis]
        if not reached:
            continue
        if o.kind == "store":
            if not _moves_tokens(p, o) or reached != [(0, int(bool(o.attr("transposed"))))]:
                return False
            continue
        to = {_after(o, n, x, type_of.get(o.args[n])) for n, x in reached}
        if len(to) > 1 or None in to:
            return False
        axis[o.out] = next(x for x in to if x is not None)
    return not any(c.next in axis for c in loop.carried)


def _after(o: Op, n: int, axis: int, operand: Tile | None) -> int | None:
    """The axis of the result along which the tokens of operand `n` lie. axis: that of the operand. None if its rows reach
    other rows."""
    if o.kind == "matmul":
        kept = (int(bool(o.attr("ta"))), int(not o.attr("tb")), axis)[n]  # of an accumulator any axis
        return min(n, 1) if n < 2 and axis == kept else axis if n == 2 else None
    if o.kind in ("transpose", "row", "move"):
        return 1 - axis if o.kind in ("transpose", "row") or o.attr("transposed") else axis
    if o.kind in OF_ROWS:
        return 0 if axis == 0 and operand is not None and operand.rank == 2 else None
    return axis if OPS[o.kind].elementwise else None
