"""norms_from_products: sums of squares that a product has already.

row_sum(x * x) is the diagonal of x @ x.T, so a kernel that computes that product need not read x again for it. Only in 16 bit:
there both are exact up to the sum, while matrix units may round float32 operands.
"""
from __future__ import annotations

from ...ir.builder import Body
from ...ir.core import Kernel, Op, Program, walk
from ..common import rebuild_kernels
from ..match import matched
from ..stage import takes


@takes("cut")
def norms_from_products(p: Program, dtype: str) -> Program:
    """`p` without sums of squares that stand on the diagonal of a product."""
    if dtype == "float32":
        return p
    return rebuild_kernels(p, _Squares)


class _Squares:
    def __init__(self, k: Kernel) -> None:
        defs = {o.out: o for o in walk(k.body)}
        #: x -> x @ x.T, and the values that are row_sum(x * x) with their x.
        self.products = {o.args[0]: o for o in reversed(defs.values()) if matched("x @ x.T", o, defs)}
        self.sums = {o.out: found["x"] for o in defs.values() if (found := matched("row_sum(x * x)", o, defs))
                     and found["x"] in self.products}

    def __call__(self, o: Op, b: Body) -> str | None:
        if o.out in b.types:  # a product that a sum needed before
            return o.out
        x = self.sums.get(o.out)
        if x is None:
            return None
        product = self.products[x]
        if product.out not in b.types:
            b.copy(product)
        return b.op("diagonal", product.out, line=o.line)
