"""accumulate: replaces x + a @ b by one product that accumulates onto x.

All targets run it, after `decompose`. It applies if the product has no other reader and x has the product's type, so no work is
done twice.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.builder import Body
from ...ir.core import Op, Program, uses, walk
from ..common import rebuild_kernel
from ..stage import takes


@takes("decomposed")
def accumulate(p: Program) -> Program:
    """`p` with such sums replaced by `matmul(a, b, x)`."""
    kernels = []
    for k in p.kernels:
        count = uses(k.body)
        products = {o.out: o for o in walk(k.body) if o.kind == "matmul" and len(o.args) == 2 and count.get(o.out) == 1}

        def rule(o: Op, b: Body, products: dict[str, Op] = products) -> str | None:
            if o.kind == "add":
                for x, y in (o.args, o.args[::-1]):
                    m = products.get(y)
                    if m is not None and b.types[x] == b.types[y]:
                        return b.op("matmul", *m.args, x, name=o.out, line=o.line, **dict(m.attrs))
            return None

        kernels.append(rebuild_kernel(p, k, rule))
    return replace(p, kernels=tuple(kernels))
