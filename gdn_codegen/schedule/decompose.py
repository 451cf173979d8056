"""decompose: expand ops that no target has. Requires stage "typed"; produces stage "decomposed".

unit_lower_inverse, by `inverse`:
- "substitution": T = diag_inverse of the blocks that the device solves, b rows each; then T <- T - [T A]_b T doubles b, where
  [X]_b is, of each 2b x 2b diagonal block of X, the lower left b x b block. [T A]_b = T [A]_b, but A is one operand for all b.
  T is rounded after each step. Where the device solves no blocks, "doubling"; where it solves whole tiles, nothing is merged.
- "doubling": T = I; for b = 1, 2, 4... T <- T - T A_b T, where A_b holds, of each 2b x 2b diagonal block of A, the lower
  left b x b block. T is then the inverse of I + (A's diagonal 2b-blocks): block forward substitution, all blocks at once.
- "blocked16": 16-row blocks by (I - X)(I + X^2)(I + X^4)(I + X^8), X the diagonal 16-blocks, then merged as above.
The plain product (I - A)(I + A^2)(I + A^4)... over the whole chunk is not offered: with equal keys the entries of A^32
reach binomial(62, 31) = 5e17 and every digit is lost.

With `block`, diagonal blocks of that size are inverted apart, T0 and T1, by products of that size, and a chunk of two is
the tile of T0, 0, -T1 A10 T0, T1. Entries are the same: the other blocks of the products above are zero.

row_norm becomes x * rsqrt(row_sum(x * x) + eps). softplus(x) is max(x, 0) + log(1 + y) with y = exp(-|x|), and log(1 + y) is
2 artanh(z) with z = y / (2 + y): z times a polynomial in z^2 that is right to 4e-9, where log(1 + y) itself would lose y.
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..ir.builder import Body
from ..ir.core import Op, Program, uses
from .pack import WIDTH
from .schedule import Schedule
from .tools import rebuild_kernel

#: 2 artanh(z) / z in powers of z^2, for z in [0, 1/3]: interpolated at Chebyshev's points.
ARTANH = (2.0, 0.66666322, 0.40024596, 0.27965158, 0.28157782)


def decompose(p: Program, s: Schedule, dtype: str, solves: int = 0, whole: int = 0, block: int = 0) -> Program:
    """Expand the ops named above; products of the inverse take operands in `s.inverse_dtype`. solves, whole: the device's."""
    operand = dtype if s.inverse_dtype == "input" else "float32"
    size = p.sizes["C"]
    how = "doubling" if s.inverse == "substitution" and not solves else s.inverse

    def rule(o: Op, b: Body, count: dict[str, int]) -> str | None:
        if o.kind == "unit_lower_inverse":
            if how == "substitution":
                alone = size == whole and WIDTH[operand] == 2 and count[o.args[0]] == 1  # it overwrites its operand
                return _inverse_by_substitution(o, b, whole if alone else solves, size, operand)
            if block and size == 2 * block and how == "doubling":
                return _inverse_by_blocks(o, b, block, operand)
            return _inverse(o, b, how, size, operand)
        if o.kind == "row_norm":
            x = o.args[0]
            total = b.op("row_sum", b.op("mul", x, x, line=o.line), line=o.line)
            eps = b.op("const", value=float(o.attr("eps", 1e-6)), line=o.line)
            inv = b.op("rsqrt", b.op("add", total, eps, line=o.line), line=o.line)
            return b.op("mul", x, b.op("col", inv, line=o.line), name=o.out, line=o.line)
        if o.kind == "softplus":
            return _softplus(o, b)
        return None

    return replace(p, stage="decomposed", kernels=tuple(rebuild_kernel(p, k, partial(rule, count=uses(k.body)))
                                                          for k in p.kernels))


def _inverse(o: Op, b: Body, how: str, size: int, operand: str) -> str:
    a, line, dims = o.args[0], o.line, b.types[o.args[0]].dims

    def cast(x: str) -> str:
        return x if b.types[x].dtype == operand else b.op("cast", x, to=operand, line=line)

    def product(x: str, y: str, plus: str = "") -> str:
        xy = b.op("matmul", cast(x), cast(y), line=line, name=b.fresh(f"{o.out}_p"))
        return b.op("add", plus, xy, line=line, name=b.fresh(f"{o.out}_s")) if plus else xy

    eye = b.op("eye", dims=dims, line=line)
    minus = b.op("neg", a, line=line)
    if how == "doubling" or size <= 16:
        done = 2
        t = b.op("add", eye, b.op("pairs", minus, size=1, line=line), line=line, name=b.fresh(f"{o.out}_1"))
    else:
        done = 16
        x = b.op("diag_blocks", minus, size=16, line=line)
        t = b.op("add", eye, x, line=line, name=b.fresh(f"{o.out}_d"))
        for _ in range(3):  # (I + X)(I + X^2)(I + X^4)(I + X^8) with X = -A
            x = product(x, x)
            t = product(t, x, plus=t)
    while done < size:
        below = b.op("pairs", minus, size=done, line=line)
        t = product(t, product(below, t), plus=t)
        done *= 2
    last = b.stmts[-1]
    assert isinstance(last, Op) and last.out == t
    b.stmts[-1] = replace(last, out=o.out)
    b.types[o.out] = b.types.pop(t)
    for key, value in list(b._seen.items()):
        if value == t:
            b._seen[key] = o.out
    return o.out


def _softplus(o: Op, b: Body) -> str:
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


def _inverse_by_substitution(o: Op, b: Body, solves: int, size: int, operand: str) -> str:
    line = o.line

    def cast(x: str, to: str, name: str = "") -> str:
        return x if b.types[x].dtype == to else b.op("cast", x, to=to, line=line, name=name)

    def product(x: str, y: str) -> str:
        return b.op("matmul", x, y, line=line, name=b.fresh(f"{o.out}_p"))

    done = min(solves, size)
    a = cast(o.args[0], operand)
    t = b.op("diag_inverse", a, size=done, line=line, name=b.fresh(f"{o.out}_d"))
    while done < size:
        corner = b.op("neg", b.op("pairs", product(t, a), size=done, line=line), line=line)
        merged = product(cast(corner, operand), t)
        done *= 2
        name = o.out if done == size else b.fresh(f"{o.out}_s")
        t = b.op("add", cast(t, "float32"), merged, line=line, name=name)
        t = t if done == size else cast(t, operand)
    return cast(t, "float32", o.out)


def _inverse_by_blocks(o: Op, b: Body, size: int, operand: str) -> str:
    a, line, dims = o.args[0], o.line, b.types[o.args[0]].dims

    def cast(x: str, to: str = operand) -> str:
        return x if b.types[x].dtype == to else b.op("cast", x, to=to, line=line)

    def block(x: str, row: int, col: int) -> str:
        return b.op("block", cast(x), row=row, col=col, size=size, line=line)

    def product(x: str, y: str) -> str:
        return b.op("matmul", cast(x), cast(y), line=line, name=b.fresh(f"{o.out}_p"))

    minus = b.op("neg", a, line=line)
    start = b.op("add", b.op("eye", dims=dims, line=line), b.op("pairs", minus, size=1, line=line), line=line,
                 name=b.fresh(f"{o.out}_1"))
    done, corners = 2, (0, size)
    ts = [block(start, i, i) for i in corners]
    while done < size:
        below = b.op("pairs", minus, size=done, line=line)
        halves = [product(block(below, i, i), t) for i, t in zip(corners, ts, strict=True)]
        ts = [b.op("add", cast(t, "float32"), product(t, x), line=line, name=b.fresh(f"{o.out}_s"))
              for t, x in zip(ts, halves, strict=True)]
        done *= 2
    below = b.op("pairs", minus, size=size, line=line)
    corner = product(ts[1], product(block(below, size, 0), ts[0]))
    zero = product(block(below, 0, size), ts[1])
    return b.op("quad", cast(ts[0], "float32"), zero, corner, cast(ts[1], "float32"), dims=dims, name=o.out, line=line)
