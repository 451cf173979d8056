"""accumulate: replaces x + a @ b by one product that accumulates onto x.

All targets run it, after `decompose`. It applies if the product has no other reader and x has the product's type, so no work is
done twice.
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Kernel, Op, Program, uses
from ..common import Rule, rebuild_kernels
from ..match import matches
from ..stage import takes


@takes("decomposed")
def accumulate(p: Program) -> Program:
    """`p` with such sums replaced by `matmul(a, b, x)`."""
    return rebuild_kernels(p, _rule)


def _rule(k: Kernel) -> Rule:
    """The rule for the ops of one kernel."""
    count = uses(k.body)
    products = {o.out: o for o in k.ops if o.kind == "matmul" and len(o.args) == 2 and count.get(o.out) == 1}

    def rule(o: Op, b: Body) -> str | None:
        for found in matches("x + y", o, {}):
            x, product = found["x"], products.get(found["y"])
            if product is not None and b.types[x] == b.types[product.out]:
                return b.op("matmul", *product.args, x, name=o.out, line=o.line, **dict(product.attrs))
        return None

    return rule
