"""Derivatives of ops, for `OpDef.vjp`: one vector-Jacobian product for each op that a page may use.

A rule is a function (r, op, ct) -> None. ct is the cotangent of the op's value: the derivative of a scalar loss by it. r is
the body of the gradient (`ir.reverse.Reverse`): its method `give` adds a part to the cotangent of an operand.

Three rules look at the op that made their operand, because the composition is cheaper than its steps:
- last(cumsum(x)) is the sum of x over the tokens.
- x rsqrt(sum(x^2) + eps) is a row divided by its norm, whose derivative reads the result instead of x.
- (I + A)^-1 @ R is a triangular solve, whose derivative needs no product of three tiles.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from .dataflow import unit_rows

if TYPE_CHECKING:
    from .core import Op
    from .reverse import Reverse


def add(r: Reverse, o: Op, ct: str) -> None:
    """d(a + b) = da + db."""
    for a in o.args:
        r.give(a, ct)


def sub(r: Reverse, o: Op, ct: str) -> None:
    """d(a - b) = da - db. On the diagonal x - x is 0, whatever x is."""
    a, b = map(r.made, o.args)
    below = r.defs.get(ct)
    if a is not None and b is not None and below is not None and (a.kind, b.kind, below.kind) == ("col", "row", "lower") \
            and a.args == b.args:
        ct = r.op("strictly_lower", *below.args)
    r.give(o.args[0], ct)
    if r.active(o.args[1]):
        r.give(o.args[1], r.op("neg", ct))


def mul(r: Reverse, o: Op, ct: str) -> None:
    """d(a b) = da b + a db. Rows divided by their norms as `row_norm`."""
    if found := unit_rows(o, r.ops):
        _unit_rows(r, *found, o.out, ct)
        return
    for a, b in zip(o.args, o.args[::-1], strict=True):
        if r.active(a):
            r.give(a, r.times(ct, b))


def div(r: Reverse, o: Op, ct: str) -> None:
    """d(a / b) = da / b - (a / b) db / b."""
    a, b = o.args
    each = r.op("div", ct, b)
    r.give(a, each)
    if r.active(b):
        r.give(b, r.op("neg", r.times(each, o.out)))


def maximum(r: Reverse, o: Op, ct: str) -> None:
    """The larger operand has the cotangent. Where operands are equal, the second has it."""
    a, b = o.args
    _chosen(r, o, ct, r.op("sub", a, b))


def minimum(r: Reverse, o: Op, ct: str) -> None:
    """The smaller operand has the cotangent. Where operands are equal, the second has it."""
    a, b = o.args
    _chosen(r, o, ct, r.op("sub", b, a))


#: A difference of two float32 numbers that is not 0 and not tiny times this is more than 1.
STEEP = 2.0 ** 100


def _chosen(r: Reverse, o: Op, ct: str, ahead: str) -> None:
    """Give `ct` to the first operand where `ahead` is positive, and to the second one elsewhere."""
    first = r.op("minimum", r.op("maximum", r.op("mul", ahead, STEEP), 0.0), 1.0)
    mine = r.times(ct, first)
    r.give(o.args[0], mine)
    if r.active(o.args[1]):
        r.give(o.args[1], r.op("sub", ct, mine))


def neg(r: Reverse, o: Op, ct: str) -> None:
    """d(-x) = -dx."""
    r.give(o.args[0], r.op("neg", ct))


def exp(r: Reverse, o: Op, ct: str) -> None:
    """d exp(x) = exp(x) dx."""
    r.give(o.args[0], r.times(ct, o.out))


def log(r: Reverse, o: Op, ct: str) -> None:
    """d log(x) = dx / x."""
    r.give(o.args[0], r.op("div", ct, o.args[0]))


def rsqrt(r: Reverse, o: Op, ct: str) -> None:
    """d x^(-1/2) = -1/2 x^(-3/2) dx."""
    r.give(o.args[0], r.op("mul", r.times(r.times(ct, o.out), r.op("mul", o.out, o.out)), -0.5))


def sigmoid(r: Reverse, o: Op, ct: str) -> None:
    """d sigmoid(x) = sigmoid(x) (1 - sigmoid(x)) dx."""
    r.give(o.args[0], r.times(ct, r.op("mul", o.out, r.op("sub", 1.0, o.out))))


def softplus(r: Reverse, o: Op, ct: str) -> None:
    """d log(1 + exp(x)) = sigmoid(x) dx."""
    r.give(o.args[0], r.times(ct, r.op("sigmoid", o.args[0])))


def cast(r: Reverse, o: Op, ct: str) -> None:
    """Rounding counts as the identity."""
    r.give(o.args[0], ct)


def col(r: Reverse, o: Op, ct: str) -> None:
    """The vector of a column."""
    r.give(o.args[0], r.vector(ct, "col"))


def row(r: Reverse, o: Op, ct: str) -> None:
    """The vector of a row."""
    r.give(o.args[0], r.vector(ct, "row"))


def expand(r: Reverse, o: Op, ct: str) -> None:
    """Every entry of the tile adds to the operand."""
    r.give(o.args[0], ct)


def matmul(r: Reverse, o: Op, ct: str) -> None:
    """dA = dC B^T and dB = A^T dC, in the order in which the operands are stored."""
    a, b = o.args
    ta, tb = bool(o.attr("ta")), bool(o.attr("tb"))
    made = r.made(a)
    if made is not None and made.kind == "unit_lower_inverse" and not ta:
        right = r.op("add", ct, r.op("matmul", r.below[a], ct, ta=True)) if a in r.below else r.op("matmul", a, ct, ta=True)
        r.give(b, right if not tb else r.op("matmul", ct, a, ta=True))
        r.give(made.args[0], r.op("strictly_lower", r.op("neg", r.op("matmul", right, o.out, tb=True))))
        return
    if r.active(a):
        r.give(a, r.op("matmul", b, ct, ta=tb, tb=True) if ta else r.op("matmul", ct, b, tb=not tb))
    if r.active(b):
        r.give(b, r.op("matmul", ct, a, ta=True, tb=ta) if tb else r.op("matmul", a, ct, ta=not ta))


def cumsum(r: Reverse, o: Op, ct: str) -> None:
    """A token's value is in the sums of all later tokens, and in its own unless the sums are exclusive. Sums of a tile's columns
    are computed once, as they need a tile."""
    if r.type(ct).dims[1:] and not o.attr("exclusive"):
        own = r.op("last", ct)
        before = r.op("cumsum", ct, exclusive=True)
        r.give(o.args[0], r.op("sub", r.rows(r.op("add", r.op("last", before), own), r.type(ct).dims), before))
        return
    sums = r.op("cumsum", ct)
    total = r.rows(r.op("last", sums), r.type(ct).dims)
    later = r.op("sub", total, sums)
    r.give(o.args[0], later if o.attr("exclusive") else r.op("add", later, ct))


def last(r: Reverse, o: Op, ct: str) -> None:
    """The last row has the cotangent, and other rows have none."""
    made, dims = r.made(o.args[0]), r.type(o.args[0]).dims
    if made is not None and made.kind == "cumsum" and not made.attr("exclusive"):
        r.give(made.args[0], r.rows(ct, dims))
        return
    at_last = r.op("last", r.op("eye", dims=dims[:1] * 2))
    r.give(o.args[0], r.times(r.op("col", at_last), r.op("row", ct)) if dims[1:] else r.times(at_last, ct))


def delay(r: Reverse, o: Op, ct: str) -> None:
    """A token's row has the cotangent of the row that it moved to, and each further operand that of the row that it is. A row
    that moved past the end of the chunk has none here: the next chunk gives it through the state that carries it."""
    before = o.args[1:]
    if r.active(o.args[0]):
        r.give(o.args[0], r.op("advance", ct, by=len(before)))
    for n, row in enumerate(before):
        if r.active(row):
            number = r.op("cumsum", r.op("full", dims=r.type(ct).dims[:1], value=1.0), exclusive=True)
            far = r.op("sub", number, float(n))
            where = r.op("sub", 1.0, r.op("minimum", r.op("maximum", far, r.op("neg", far)), 1.0))
            r.give(row, r.op("column_sum", r.times(ct, r.op("col", where))))


def latest(r: Reverse, o: Op, ct: str) -> None:
    """The row of the last token has the cotangent, and other rows have none."""
    one = r.op("valid", r.op("full", dims=r.type(o.args[0]).dims[:1], value=1.0))
    later = r.op("sub", r.op("row_sum", one), r.op("cumsum", one))  # of each token: the tokens of the chunk that are after it
    where = r.times(one, r.op("sub", 1.0, r.op("minimum", later, 1.0)))
    r.give(o.args[0], r.op("mul", r.op("col", where), r.op("row", ct)))


def row_sum(r: Reverse, o: Op, ct: str) -> None:
    """Every entry of a row adds to its sum."""
    dims = r.type(o.args[0]).dims
    r.give(o.args[0], r.op("expand", r.op("col", ct) if dims[1:] else ct, dims=dims))


def column_sum(r: Reverse, o: Op, ct: str) -> None:
    """Every entry of a column adds to its sum."""
    r.give(o.args[0], r.rows(ct, r.type(o.args[0]).dims))


def diagonal(r: Reverse, o: Op, ct: str) -> None:
    """The entries on the diagonal have the cotangent."""
    r.give(o.args[0], r.times(r.op("eye", dims=r.type(o.args[0]).dims), r.op("col", ct)))


def masked(r: Reverse, o: Op, ct: str) -> None:
    """Entries that the mask keeps have the cotangent; what fills the others does not depend on the operand."""
    r.give(o.args[0], r.op(o.kind, ct, size=o.attr("size")))


def unit_lower_inverse(r: Reverse, o: Op, ct: str) -> None:
    """d(I + A)^-1 = -T dA T, with T the inverse."""
    inner = r.op("matmul", r.op("matmul", o.out, ct, ta=True), o.out, tb=True)
    r.give(o.args[0], r.op("strictly_lower", r.op("neg", inner)))


def row_norm(r: Reverse, o: Op, ct: str) -> None:
    """With s = 1 / sqrt(sum(x^2) + eps), y = s x: dx = s (dy - y sum(y dy))."""
    x = o.args[0]
    total = r.op("add", r.op("row_sum", r.op("mul", x, x)), float(o.attr("eps", 1e-6)))
    _unit_rows(r, r.op("rsqrt", total), x, o.out, ct)


def _unit_rows(r: Reverse, scale: str, x: str, y: str, ct: str) -> None:
    """The cotangent of x, of which y is the rows times `scale`, one divided by their norms. The sum meets y, not x: kernels that
    need y anyway do not load x."""
    y = r.loaded(y)
    along = r.times(r.op("col", r.op("row_sum", r.op("mul", y, ct))), y)
    r.give(x, r.times(r.op("col", scale), r.op("sub", ct, along)))


def valid(r: Reverse, o: Op, ct: str) -> None:
    """Rows past the sequence's end are zero whatever the operand is."""
    r.give(o.args[0], r.op("valid", ct))


def boundary(r: Reverse, o: Op, ct: str) -> None:
    """The cotangent has a boundary, too. The kernels after the value's boundary store it, and another kernel computes the
    derivative of what is before."""
    r.give(o.args[0], r.op("boundary", ct, wide=o.attr("wide"), back=True))


def decayed_product(r: Reverse, o: Op, ct: str) -> None:
    """P[i, j] = sum over c of a[i, c] b[j, c] exp(x[i, c] - y[j, c]), with x the sums before the token where there are such.

    da[i, c] = sum over j of dP[i, j] b[j, c] exp(x[i, c] - y[j, c]), and db alike. An entry's derivative by x is itself, so that
    dx = a da and dy = -b db. Entries on the diagonal do not depend on x where x is y, so they are left out of dx and dy: they
    would cancel there, but for rounding.
    """
    a, b, y, *before = o.args
    x = before[0] if before else y
    below = r.op("strictly_lower", ct)
    da = r.op("decayed_matmul", below, b, y, *before)
    db = r.op("decayed_matmul", below, a, y, *before, transposed=True)
    r.give(a, da)
    r.give(b, db)
    if not before and not _below(r, ct):
        own = r.op("col", r.op("diagonal", ct))
        r.give(a, r.op("mul", own, b))
        r.give(b, r.op("mul", own, a))
    if r.active(x):
        r.give(x, r.op("mul", a, da))
        r.give(y, r.op("neg", r.op("mul", b, db)))


def _below(r: Reverse, x: str) -> bool:
    """Whether a cotangent is zero on the diagonal, as a mask or a product with a masked tile."""
    o = r.defs.get(x)
    if o is None:
        return False
    return (o.kind == "strictly_lower" and not o.attr("fill")) or (o.kind in ("mul", "neg") and any(_below(r, a) for a in o.args))
