"""decayed_products: computes `decayed_product` by ordinary products. All targets run it.

P[i, j] = sum over c of a[i, c] b[j, c] exp(G[i, c] - G[j, c]), for j <= i. The product of a * exp(G) and b * exp(-G) would
overflow: G falls by up to 50 for each token. So the entries below the diagonal are divided into levels. Level h = C/2, ..., 2, 1
has the lower left h x h block of each diagonal block of 2h rows (`pairs`). In such a block j is in the first half of the 2h
rows, i is in the second half, and m is the last row of the first half:

    exp(G[i] - G[j]) = exp(G[i] - G[m]) * exp(G[m] - G[j])

Neither exponent is positive if no gate is. `to_middle` is the first in rows of second halves, and the second in rows of
first halves. So one tile x = exp(to_middle(G, h)) scales both operands: level h of P is pairs((a * x) @ (b * x).T, h).
Where a token reads what is left before it decays, a is scaled by decays of sums without the token, and nothing is on the
diagonal. Otherwise the decay is 1 there. All levels are products for tensor cores. Products of different operands with one G
share x.

The way by which FLA and FlashKDA avoid overflow divides a chunk into blocks of 16 rows, and computes blocks on the diagonal entry
by entry (arXiv:2312.06635, section 4.3). Levels need no loop over entries, and hold for gates of any size.
"""
from __future__ import annotations

from ...ir.builder import Body
from ...ir.core import Op, Program, uses
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def decayed_products(p: Program) -> Program:
    """`p` without `decayed_product`. Products that decay by the same sums are computed together, level by level, so that the
    scaled operands and the products of one level are live at a time."""
    ops = [o for o in p.walk.body if isinstance(o, Op)]
    if not any(o.kind == "decayed_product" for o in ops):
        return p
    strict = _strict(ops, uses(p.walk.body))
    b, done = walk_body(p), set[str]()
    for o in ops:
        if o.kind == "decayed_product" and o.out not in done:
            ready = {c.name for c in p.walk.carried} | set(b.types)
            group = [x for x in ops if x.kind == o.kind and x.args[2] == o.args[2] and x.out not in done and set(x.args) <= ready]
            _levels(group, b, p.sizes["C"], strict)
            done |= {x.out for x in group}
        elif o.out not in done or not o.out:
            b.copy(o)
    return with_walk_body(p, b.finish())


def _strict(ops: list[Op], count: dict[str, int]) -> set[str]:
    """The values whose diagonal nobody reads: operands of `strictly_lower`, and factors of such operands."""
    out: set[str] = set()
    for o in reversed(ops):
        if (o.kind == "strictly_lower" and not o.attr("fill")) or (o.kind == "mul" and o.out in out):
            out |= {a for a in o.args if count[a] == 1}
    return out


def _levels(group: list[Op], b: Body, size: int, strict: set[str]) -> None:
    """Append the ops that compute `group` for chunks of `size` tokens. strict: the values whose diagonal is not needed."""
    total: dict[str, str] = {}
    half = size // 2

    def add(o: Op, term: str, last: bool) -> None:
        """Add a term to what `o` computes. last: whether it is the last one."""
        if o.out in total:
            total[o.out] = b.op("add", total[o.out], term, name=o.out if last else "", line=o.line)
        else:
            total[o.out] = b.op("mul", term, b.op("const", value=1.0), name=o.out, line=o.line) if last else term

    while half:
        for o in group:
            x, y, *sums = o.args
            x, y = (b.op("mul", a, b.op("exp", b.op("to_middle", *s, size=half, line=o.line), line=o.line), line=o.line)
                    for a, s in ((x, sums), (y, sums[:1])))
            term = b.op("pairs", b.op("matmul", x, y, tb=True, line=o.line), size=half, line=o.line)
            add(o, term, half == 1 and not _diagonal(o, strict))
        half //= 2
    for o in group:
        if _diagonal(o, strict):
            eye = b.op("eye", dims=("C", "C"), line=o.line)
            add(o, b.op("mul", b.op("matmul", *o.args[:2], tb=True, line=o.line), eye, line=o.line), True)
        elif size == 1:
            add(o, b.op("full", dims=("C", "C"), value=0.0, line=o.line), True)


def _diagonal(o: Op, strict: set[str]) -> bool:
    """Whether `o` needs a diagonal: if somebody reads it, and it is not zero."""
    return o.out not in strict and not o.args[3:]
