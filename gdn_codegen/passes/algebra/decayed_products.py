"""decayed_products: computes `decayed_product`, and its derivative `decayed_matmul`, by ordinary products, or by an op of the
device (`decayed_ops`). All targets run it.

P[i, j] = sum over c of a[i, c] b[j, c] exp(G[i, c] - G[j, c]), for j <= i. The product of a * exp(G) and b * exp(-G) would
overflow: G falls by up to 50 for each token. So the entries below the diagonal are divided into levels. Level h = C/2, ..., 2, 1
has the lower left h x h block of each diagonal block of 2h rows (`pairs`). In such a block j is in the first half of the 2h
rows, i is in the second half, and m is the last row of the first half:

    exp(G[i] - G[j]) = exp(G[i] - G[m]) * exp(G[m] - G[j])

Neither exponent is positive if no gate is. `to_middle` is the first in rows of second halves, and the second in rows of
first halves. So one tile x = exp(to_middle(G, h)) scales both operands: level h of P is pairs((a * x) @ (b * x).T, h).
Where a token reads what is left before it decays, a is scaled by decays of sums without the token, and nothing is on the
diagonal. Otherwise the decay is 1 there. Products of different operands with one G share x.

If gates have a lower bound, one product serves all levels within diagonal blocks of B rows. m is the middle row of the block,
whatever i and j are. The exponents then have either sign. They are at most B/2 times the bound, which has to be at most LIMITS of
the products' dtype. So 64 rows with gates of -5 or more need levels 32 and 16 and one more product. The diagonal stays a product
of its own, which is not rounded after scaling: where gates are strong, it is most of P. `ranges` finds the bound.

Where two values decay by the same sums, one product of a level serves both on warp groups (`joint_levels`). FLA has blocks of 16
rows, and computes those on the diagonal entry by entry (arXiv:2312.06635, section 4.3).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir.core import Op, Program
from ...ir.ranges import ANY, steps
from ..common import walk_body, with_walk_body
from ..stage import takes
from ..uses import needed_before, readers
from .decayed_matmuls import decayed_matmuls
from .decayed_ops import by_op
from .joint_levels import LEAST, JointLevels, partners

#: By dtype: the largest exponent that scales an operand. Above the diagonal two factors of exp(40) meet: that is 2e-4 of
#: float32's range. float16 keeps no digits of small numbers, such as 1e-4 exp(-10), which exp(10) would make visible.
LIMITS = {"float16": 0.0, "bfloat16": 40.0, "float32": 40.0}
DECAYED = ("decayed_product", "decayed_matmul")


@takes("traced")
def decayed_products(p: Program, dtype: str, groups: bool, rows: int = 0) -> Program:
    """`p` without `decayed_product` and `decayed_matmul`. Products that decay by the same sums are computed together, level by
    level: one level's operands and products are live at a time. dtype: of operands of products. groups: whether the device has
    warp groups, whose threads wait for products, so that one may serve two (`joint_levels`). rows: as for `by_op`."""
    ops = [o for o in p.walk.body if isinstance(o, Op)]
    if not any(o.kind in DECAYED for o in ops):
        return p
    strict, defs = _strict(ops), {o.out: o for o in ops}
    stored = {t.name for t in p.role("output") if t.index == "slot" and not t.wide}  # for the products of a gradient
    b, done = walk_body(p), set[str]()
    for o in ops:
        if o.kind in DECAYED and o.out not in done:
            alike = [x for x in ops if x.kind == o.kind and x.args[2] == o.args[2] and x.out not in done]
            for needed in (needed_before(x, defs, b.types) for x in alike):
                if all(x.kind not in (*DECAYED, "matmul") for x in needed):  # so that one product may serve two of the group
                    done |= {b.copy(x) for x in needed}
            group = [x for x in alike if set(x.args) <= set(b.types)]
            block = block_rows(group, p, p.sizes["C"], LIMITS[dtype])
            size, limit = by_op(group, p, dtype, LIMITS[dtype], rows, block, groups)
            block = max(block, size)
            sizes = [1 << n for n in reversed(range(p.sizes["C"].bit_length() - 1)) if 1 << n >= block]
            levels = JointLevels(b, partners(group, ops, stored) if groups and len(sizes) >= LEAST else [], sizes)
            if o.kind == "decayed_product":
                _levels(group, levels, p.sizes["C"], block, strict, limit)
            else:
                decayed_matmuls(group, levels, p.sizes["C"], block, limit)
            done |= {x.out for x in group}
        elif o.out not in done or not o.out:
            b.copy(o)
    return with_walk_body(p, b.finish())


def _strict(ops: list[Op]) -> set[str]:
    """The values whose diagonal nobody reads: operands of `strictly_lower`, and factors, with any sign, of such alone."""
    out: set[str] = set()
    read = readers(tuple(ops))

    def below(o: Op) -> bool:
        """Whether `o` reads only what is below the diagonal of its operands."""
        return (o.kind == "strictly_lower" and not o.attr("fill")) or (o.kind in ("mul", "neg") and o.out in out)

    for o in reversed(ops):
        if o.out in read and all(below(x) for x, _ in read[o.out]):
            out.add(o.out)
    return out


def block_rows(group: list[Op], p: Program, chunk: int, limit: float) -> int:
    """The rows of the diagonal blocks that one product computes: a power of two. 1 if there are none, as gates have no bound, or
    none of more than one level. group: decayed products of `p` by the same sums. limit: the largest exponent."""
    total = group[0].args[2]
    defs, least, size = {o.out: o for o in p.walk.body if isinstance(o, Op)}, steps(p).get(total, ANY)[0], 1
    if not all(x in defs and _is_before(defs[x], defs[total]) for o in group for x in o.args[3:]):
        return 1
    while 2 * size <= chunk and size * -least <= limit:
        size *= 2
    return size if size > 2 else 1


def _is_before(x: Op, total: Op) -> bool:
    """Whether x has the running sums `total` without the token itself."""
    return bool(x.attr("exclusive")) and replace(x.with_attrs(exclusive=None), out=total.out, line=total.line) == total


def _levels(group: list[Op], levels: JointLevels, chunk: int, block: int, strict: set[str], limit: float | None) -> None:
    """Append the ops that compute `group`. levels: those of pairs of ops. block: the rows of the diagonal blocks that one product
    computes. strict: the values whose diagonal is not needed. limit: that of a `decayed_pairs` that computes all of a block."""
    b, total = levels.b, levels.products(lambda o: block == 1 and not _diagonal(o, strict))
    alone = [o for o in group if o.out not in total]

    def op(o: Op, kind: str, *args: str, name: str = "", **attrs: Any) -> str:
        return b.op(kind, *args, name=name, line=o.line, **attrs)

    def add(o: Op, term: str, last: bool) -> None:
        """Add a term to what `o` computes. last: whether it is the last one."""
        if o.out in total:
            total[o.out] = op(o, "add", total[o.out], term, name=o.out if last else "")
        else:
            total[o.out] = op(o, "mul", term, b.op("const", value=1.0), name=o.out) if last else term

    for half in levels.halves:
        for o in alone:
            x, y, *sums = o.args
            x, y = (op(o, "mul", a, op(o, "exp", op(o, "to_middle", *s, size=half))) for a, s in ((x, sums), (y, sums[:1])))
            term = op(o, "pairs", op(o, "matmul", x, y, tb=True), size=half)
            add(o, term, half == 1 and not _diagonal(o, strict))
    for o in group:
        if limit is not None:
            total[o.out] = op(o, "decayed_pairs", *o.args, name="" if _diagonal(o, strict) else o.out, limit=limit)
        elif block > 1:
            x, y, *sums = o.args
            x = op(o, "mul", x, op(o, "exp", op(o, "from_middle", *sums, size=block // 2)))
            y = op(o, "mul", y, op(o, "exp", op(o, "neg", op(o, "from_middle", sums[0], size=block // 2))))
            near = op(o, "matmul", x, y, tb=True)
            near = near if block == chunk else op(o, "diagonal_blocks", near, size=block)
            add(o, op(o, "strictly_lower", near), not _diagonal(o, strict))
        if _diagonal(o, strict):
            eye = b.op("eye", dims=("C", "C"), line=o.line)
            add(o, op(o, "mul", op(o, "matmul", *o.args[:2], tb=True), eye), True)
        elif chunk == 1:
            add(o, b.op("full", dims=("C", "C"), value=0.0, line=o.line), True)


def _diagonal(o: Op, strict: set[str]) -> bool:
    """Whether `o` needs a diagonal: if somebody reads it, and it is not zero."""
    return o.out not in strict and not o.args[3:]
