"""decayed_matmuls: the levels of `decayed_matmul`, the derivative of `decayed_product`. A part of the pass `decayed_products`.

Row i is the sum over j < i of p[i, j] b[j, c] exp(G[i, c] - G[j, c]). Level h has the entries of p in the lower left h x h block
of each diagonal block of 2h rows. With x = exp(to_middle(G, h)) it is x * (pairs(p, h) @ (b * x)): rows of first halves scale
the operand, rows of second halves scale the product, and no exponent is positive.

Where gates have a lower bound, one product serves all levels within diagonal blocks, as for `decayed_product`.
"""
from __future__ import annotations

from typing import Any

from ...ir.body import Body
from ...ir.core import Op


def decayed_matmul(o: Op, b: Body, chunk: int, block: int) -> None:
    """Append the ops that compute `o` for chunks of so many tokens. block: the rows of the diagonal blocks that one product
    computes, 1 for none."""
    p, x, *sums = o.args
    transposed = bool(o.attr("transposed"))

    def op(kind: str, *args: str, name: str = "", **attrs: Any) -> str:
        return b.op(kind, *args, name=name, line=o.line, **attrs)

    def between(entries: str, later: str, earlier: str) -> str:
        """The product of entries of p and the tile, scaled by the decays of rows of second and of first halves."""
        of, by = (later, earlier) if transposed else (earlier, later)
        return op("mul", op("matmul", entries, op("mul", x, of), ta=transposed), by)

    terms, half = [], chunk // 2
    while half >= block:
        later, earlier = (op("exp", op("to_middle", *s, size=half)) for s in (sums, sums[:1]))
        terms.append(between(op("pairs", p, size=half), later, earlier))
        half //= 2
    if block > 1:
        later = op("exp", op("from_middle", *sums, size=block // 2))
        earlier = op("exp", op("neg", op("from_middle", sums[0], size=block // 2)))
        near = p if block == chunk else op("diagonal_blocks", p, size=block)
        terms.append(between(op("strictly_lower", near), later, earlier))
    if chunk == 1:
        terms.append(op("mul", x, b.op("const", value=0.0, line=o.line)))
    total = terms[0]
    for n, term in enumerate(terms[1:], 2):
        total = op("add", total, term, name=o.out if n == len(terms) else "")
    if total != o.out:
        op("mul", total, b.op("const", value=1.0), name=o.out)
