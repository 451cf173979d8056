"""Rules for ops that are expressions: (writer, op, operands) -> a function that gives the element at some indices."""
from __future__ import annotations

import math
from collections.abc import Callable

from ..base import ATOM, PRODUCT, SUM, UNARY, Op, Text
from .kernel import KernelWriter, rule
from .tiles import Value, element

At = Callable[..., Text]


def _number(x: float) -> Text:
    if math.isinf(x):
        return Text("T.infinity(T.float32)" if x > 0 else "-T.infinity(T.float32)", ATOM if x > 0 else UNARY)
    return Text(repr(float(x)), ATOM if x >= 0 else UNARY)


@rule("const")
def const(w: KernelWriter, o: Op) -> At:
    return lambda: _number(o.attr("value"))


@rule("scalar")
def scalar(w: KernelWriter, o: Op) -> At:
    if o.attr("tensor"):
        text = f"{w.params[o.attr('tensor')]}[{w.hv}]"
        return lambda: Text(text)
    return lambda: Text(w.name(o.attr("param")))


@rule("full")
def full(w: KernelWriter, o: Op) -> At:
    return lambda *index: _number(o.attr("value"))


@rule("expand")
def expand(w: KernelWriter, o: Op, x: Value) -> At:
    assert o.type is not None
    dims = o.type.dims
    return lambda *index: element(x, dims, index)


def _binary(kind: str, sign: str, level: int) -> None:
    # The right operand keeps its parentheses at the same level, so that sums are not reassociated.
    @rule(kind)
    def write(w: KernelWriter, o: Op, a: Value, b: Value) -> At:
        assert o.type is not None
        dims = o.type.dims

        def at(*index: str) -> Text:
            return Text(f"{element(a, dims, index).at(level)} {sign} {element(b, dims, index).at(level + 1)}", level)
        return at


for _kind, _sign, _level in (("add", "+", SUM), ("sub", "-", SUM), ("mul", "*", PRODUCT), ("div", "/", PRODUCT)):
    _binary(_kind, _sign, _level)


@rule("maximum", "minimum")
def extreme(w: KernelWriter, o: Op, a: Value, b: Value) -> At:
    """The larger or the smaller of two values. If one is a bound, the text keeps a NaN of the other."""
    assert o.type is not None
    dims, bound_at = o.type.dims, o.attr("bound")
    if bound_at is not None:
        x, y = (a, b) if bound_at else (b, a)
        sign = "<" if o.kind == "maximum" else ">"

        def bounded(*index: str) -> Text:
            value, bound = element(x, dims, index), element(y, dims, index)
            return Text(f"T.if_then_else({value.at(SUM)} {sign} {bound}, {bound}, {value})")
        return bounded
    return lambda *index: Text(f"T.{o.kind[:3]}({element(a, dims, index)}, {element(b, dims, index)})")


@rule("neg")
def neg(w: KernelWriter, o: Op, x: Value) -> At:
    return lambda *index: Text(f"-{x.at(*index).at(UNARY + 1)}", UNARY)


@rule("exp", "log", "rsqrt", "sigmoid")
def function(w: KernelWriter, o: Op, x: Value) -> At:
    return lambda *index: Text(f"T.{o.kind}({x.at(*index)})")


@rule("cast")
def cast(w: KernelWriter, o: Op, x: Value) -> At:
    if o.buffer:
        return x.at  # storing into the buffer rounds
    return lambda *index: Text(f"T.cast({x.at(*index)}, {w.dtype(o.attr('to'))})")


@rule("if_negative")
def if_negative(w: KernelWriter, o: Op, number: Value, x: Value) -> At:
    return lambda *index: Text(f"T.if_then_else({number.at()} < 0, {x.at(*index)}, 0)")


@rule("col")
def col(w: KernelWriter, o: Op, x: Value) -> At:
    return lambda i, j: x.at(i)


@rule("row")
def row(w: KernelWriter, o: Op, x: Value) -> At:
    return lambda i, j: x.at(j)


@rule("last")
def last(w: KernelWriter, o: Op, x: Value) -> At:
    end = f"{w.dim(x.dims[0])} - {1 + o.attr('before', 0)}"
    return lambda *index: x.at(end, *index)


@rule("delay", "advance")
def moved_rows(w: KernelWriter, o: Op, x: Value, *before: Value) -> At:
    """The rows of a tile, moved down or up."""
    by, rows = o.attr("by", 0), w.dim(x.dims[0])

    def at(i: str, j: str) -> Text:
        if by:
            return Text(f"T.if_then_else({i} < {rows} - {by}, {x.at(f'T.min({i} + {by}, {rows} - 1)', j)}, 0.0)")
        moved = f"{x.at(f'T.max({i} - {len(before)}, 0)', j)}"
        for n, row in enumerate(before):
            moved = f"T.if_then_else({i} == {n}, {row.at(j)}, {moved})"
        return Text(moved)
    return at


@rule("latest")
def latest(w: KernelWriter, o: Op, x: Value) -> At:
    end = f"T.min({w.use('rows')}, {w.dim(x.dims[0])}) - 1"
    return lambda *index: x.at(end, *index)


@rule("to_middle", "from_middle")
def to_middle(w: KernelWriter, o: Op, x: Value, before: Value | None = None) -> At:
    """Differences to the middle row, or from it. Of one value the difference has a sign, because nvcc makes branches of two
    differences, and computes the addresses of each."""
    size = o.attr("size")

    def at(i: str, j: str) -> Text:
        here, i = x.at(i, j), i if i.isidentifier() else f"({i})"
        middle = x.at(f"{i} // {2 * size} * {2 * size} + {size - 1}", j)
        after, end = before.at(i, j) if before is not None else here, middle.at(SUM + 1)
        later = Text(f"{after.at(SUM)} - {end}", SUM)
        if o.kind == "from_middle":
            return later
        if before is None:
            return Text(f"({later}) * T.if_then_else({i} // {size} % 2 == 1, 1.0, -1.0)", PRODUCT)
        return Text(f"T.if_then_else({i} // {size} % 2 == 1, {later}, {middle.at(SUM)} - {here.at(SUM + 1)})")
    return at


@rule("halves")
def halves(w: KernelWriter, o: Op, a: Value, b: Value) -> At:
    return lambda i, j: Text(f"T.if_then_else({i} // {o.attr('size')} % 2 == 1, {b.at(i, j)}, {a.at(i, j)})")


def _keep(w: KernelWriter, o: Op, i: str, j: str) -> str:
    kind, size = o.kind, o.attr("size", 0)
    if kind in ("lower", "strictly_lower", "eye"):
        return w.compared(i, {"lower": ">=", "strictly_lower": ">", "eye": "=="}[kind], j)
    if kind == "diagonal_blocks":
        return f"{i} // {size} == {j} // {size}"
    sign = "!=" if o.attr("both") else ">"
    below = f"{i} // {size} {sign} {j} // {size}" if size > 1 else f"{i} {sign} {j}"
    return f"T.And({i} // {2 * size} == {j} // {2 * size}, {below})"


@rule("lower", "strictly_lower", "pairs", "diagonal_blocks")
def masked(w: KernelWriter, o: Op, x: Value) -> At:
    fill = _number(o.attr("fill", 0.0))
    return lambda i, j: Text(f"T.if_then_else({_keep(w, o, i, j)}, {x.at(i, j)}, {fill})")


@rule("eye")
def eye(w: KernelWriter, o: Op) -> At:
    def at(i: str, j: str) -> Text:
        here = _keep(w, o, i, j)
        return Text(f"T.if_then_else({f'T.And({here}, {i} < {within})' if within else here}, 1.0, 0.0)")
    within = o.attr("within")
    return at


@rule("of_token")
def of_token(w: KernelWriter, o: Op, x: Value) -> At:
    tokens = w.buffers[x.buffer].shape[0]
    return lambda *index: Text(str(x.at(f"T.truncmod(chunk, {tokens})", *index)))


@rule("valid")
def valid(w: KernelWriter, o: Op, x: Value) -> At:
    rows = w.use("rows")
    return lambda i, *rest: Text(f"T.if_then_else({i} < {rows}, {x.at(i, *rest)}, 0.0)")
