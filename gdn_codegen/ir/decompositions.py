"""Decompositions of ops into other ops. The table in ir/ops.py refers to them.

A decomposition is a function (op, body to append to) -> name of the result.

row_norm is x * rsqrt(row_sum(x * x) + eps). softplus(x) is max(x, 0) + log(1 + y) with y = exp(-|x|). log(1 + y) is 2 artanh(z)
with z = y / (2 + y). It is computed as z times a polynomial in z^2 with an error of 4e-9. Adding 1 + y in float32 would lose
the digits of a small y.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .body import Body
    from .core import Op

#: Coefficients of 2 artanh(z) / z in powers of z^2, for z in [0, 1/3], from interpolation at Chebyshev points.
ARTANH = (2.0, 0.66666322, 0.40024596, 0.27965158, 0.28157782)


def row_norm(o: Op, b: Body) -> str:
    """x / sqrt(row_sum(x * x) + eps). eps is the op's attribute, 1e-6 by default. Returns the name of the result."""
    x = o.args[0]
    total = b.op("row_sum", b.op("mul", x, x, line=o.line), line=o.line)
    eps = b.op("const", value=float(o.attr("eps", 1e-6)), line=o.line)
    inv = b.op("rsqrt", b.op("add", total, eps, line=o.line), line=o.line)
    return b.op("mul", x, b.op("col", inv, line=o.line), name=o.out, line=o.line)


def softplus(o: Op, b: Body) -> str:
    """log(1 + exp(x)) = max(x, 0) + 2 artanh(z), z = y / (y + 2), y = exp(-|x|), as a polynomial in z * z.

    It does not compute 1 + y. Therefore a gate near 0 keeps the precision of float32. Returns the name of the result.
    """
    def op(kind: str, *args: str | float, name: str = "") -> str:
        return b.op(kind, *(b.op("const", value=a) if isinstance(a, float) else a for a in args), name=name, line=o.line)

    x = o.args[0]
    y = op("exp", op("minimum", x, op("neg", x)))
    z = op("div", y, op("add", y, 2.0))
    w = op("mul", z, z)
    total = op("mul", w, ARTANH[-1])
    for c in ARTANH[-2:0:-1]:
        total = op("mul", op("add", total, c), w)
    return op("add", op("maximum", x, 0.0), op("mul", z, op("add", total, ARTANH[0])), name=o.out)
