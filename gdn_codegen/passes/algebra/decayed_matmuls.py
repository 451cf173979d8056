"""decayed_matmuls: the levels of `decayed_matmul`, the derivative of `decayed_product`. A part of the pass `decayed_products`.

Row i is the sum over j < i of p[i, j] b[j, c] exp(G[i, c] - G[j, c]). Level h has the entries of p in the lower left h x h block
of each diagonal block of 2h rows. With x = exp(to_middle(G, h)) it is x * (pairs(p, h) @ (b * x)): rows of first halves scale
the operand, rows of second halves scale the product, and no exponent is positive.

Where gates have a lower bound, one product serves all levels within diagonal blocks, as for `decayed_product`.

Where a device has the op `decayed_blocks` (`decayed_ops`), it computes the innermost levels, or all.
"""
from __future__ import annotations

from typing import Any

from ...ir.core import Op
from .joint_levels import JointLevels


def decayed_matmuls(group: list[Op], levels: JointLevels, chunk: int, block: int, limit: float | None = None) -> None:
    """Append the ops that compute `group`, ops with the same sums, for chunks of so many tokens. levels: those of pairs of ops.
    block: the rows of the diagonal blocks that one product computes, 1 for none. limit: that of a `decayed_blocks` that computes
    them instead."""
    b, total = levels.b, levels.derivatives(block == 1)
    alone = [o for o in group if o.out not in total]

    def op(o: Op, kind: str, *args: str, name: str = "", **attrs: Any) -> str:
        return b.op(kind, *args, name=name, line=o.line, **attrs)

    def add(o: Op, entries: str, later: str, earlier: str, last: bool) -> None:
        """Add a product of entries of p and the tile, scaled by the decays of rows of second and of first halves. last: whether
        it is the last one."""
        transposed = bool(o.attr("transposed"))
        of, by = (later, earlier) if transposed else (earlier, later)
        plus(o, op(o, "mul", op(o, "matmul", entries, op(o, "mul", o.args[1], of), ta=transposed), by), last)

    def plus(o: Op, term: str, last: bool) -> None:
        """Add a term."""
        if o.out in total:
            total[o.out] = op(o, "add", total[o.out], term, name=o.out if last else "")
        else:
            total[o.out] = op(o, "mul", term, b.op("const", value=1.0), name=o.out) if last else term

    for o in group if limit is not None else ():  # first, so that tiles of the levels may overwrite p in memory
        name = "" if levels.halves else o.out
        total[o.out] = op(o, "decayed_blocks", *o.args, name=name, size=block, limit=limit, **dict(o.attrs))
    for half in levels.halves:
        for o in alone:
            later, earlier = (op(o, "exp", op(o, "to_middle", *s, size=half)) for s in (o.args[2:], o.args[2:3]))
            add(o, op(o, "pairs", o.args[0], size=half), later, earlier, half == (1 if limit is None else block))
    for o in group if limit is None else ():
        p, x, *sums = o.args
        if block > 1:
            later = op(o, "exp", op(o, "from_middle", *sums, size=block // 2))
            earlier = op(o, "exp", op(o, "neg", op(o, "from_middle", sums[0], size=block // 2)))
            near = p if block == chunk else op(o, "diagonal_blocks", p, size=block)
            add(o, op(o, "strictly_lower", near), later, earlier, True)
        elif chunk == 1:
            op(o, "mul", x, b.op("const", value=0.0, line=o.line), name=o.out)
