"""norms_from_products: reads sums of squares from the diagonal of a product.

row_sum(x * x) is the diagonal of x @ x.T. A kernel that computes this product then needs no second pass over x. Warps that run
iterations of a walk in turn compute the product for this, because they have no sums of rows. The pass applies to 16-bit dtypes
only. There both values are exact up to the summation, while matrix units may round float32 operands. All targets run it.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program
from ...schedule.schedule import Schedule
from ..common import rebuild_kernels, walks
from ..match import matched
from ..stage import takes


@takes("cut")
def norms_from_products(p: Program, s: Schedule, dtype: str) -> Program:
    """`p` with row_sum(x * x) replaced by diagonal(x @ x.T) where the kernel computes that product, or is to. `p` itself for
    float32."""
    if dtype == "float32":
        return p
    return rebuild_kernels(p, lambda k: _Squares(k, s.in_turns and walks(k)))


class _Squares:
    """The rule for one kernel. It moves the product before the sum if the sum comes first."""
    def __init__(self, k: Kernel, always: bool) -> None:
        """always: whether the kernel computes the product for the sum alone, too."""
        defs = {o.out: o for o in k.ops}
        #: x -> x @ x.T, and the values that are row_sum(x * x) with their x.
        self.products = {o.args[0]: o for o in reversed(defs.values()) if matched("x @ x.T", o, defs)}
        self.sums = {o.out: found["x"] for o in defs.values() if (found := matched("row_sum(x * x)", o, defs))
                     and (always or found["x"] in self.products)}

    def __call__(self, o: Op, b: Body) -> str | None:
        """The name of a sum's value, or of a product that is there already. None if the op stays."""
        if o.out in b.types:  # a product that the rule has moved before a sum
            return o.out
        x = self.sums.get(o.out)
        if x is None:
            return None
        product = self.products.get(x)
        if product is None:
            return b.op("diagonal", b.op("matmul", x, x, tb=True, line=o.line), line=o.line)
        if product.out not in b.types:
            b.copy(product)
        return b.op("diagonal", product.out, line=o.line)
