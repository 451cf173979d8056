"""The rule table: op -> the lines that it writes, or the expression of one of its elements."""
from __future__ import annotations

import math
from collections.abc import Callable

from ...ir.core import loops
from ..base import ATOM, PRODUCT, SUM, SUMMED, UNARY, EmitError, Op, Text, walk
from .kernel import WHOLE, KernelWriter, Value, element, rule

__all__ = ["rule"]


# --- rules of ops that write lines -----------------------------------------------------------------------------------
def _storage(w: KernelWriter, o: Op, x: Value) -> str:
    if not x.buffer:
        raise EmitError(f"tilelang: {o.kind} ({o.out}, line {o.line}) reads a value without storage; pass place should have "
                        f"given it a buffer")
    return w.name(x.buffer)


@rule("matmul")
def matmul(w: KernelWriter, o: Op, a: Value, b: Value, acc: Value | None = None) -> None:
    assert o.type is not None
    if acc is not None and acc.buffer != o.buffer:
        w.fill(w.stored(o.type.dims, o.buffer), acc)
    options = [f"{name}=True" for name, key in (("transpose_A", "ta"), ("transpose_B", "tb")) if o.attr(key)]
    options += ["clear_accum=False"] if acc is not None else []
    w.line(f"t.gemm({', '.join([_storage(w, o, a), _storage(w, o, b), w.name(o.buffer), *options])})")


@rule("row_sum")
def row_sum(w: KernelWriter, o: Op, x: Value) -> None:
    w.line(f"t.row_sum({_storage(w, o, x)}, {w.name(o.buffer)})")


def _in_a_row(w: KernelWriter, o: Op) -> list[Op]:
    """The ops of its kind among which `o` stands, with nothing between."""
    bodies = (w.k.body, *(lp.body for lp in loops(w.k.body)))
    body = next([x for x in b if isinstance(x, Op)] for b in bodies if any(x is o for x in b))
    first = last = next(n for n, x in enumerate(body) if x is o)
    while first and body[first - 1].kind == o.kind:
        first -= 1
    while last + 1 < len(body) and body[last + 1].kind == o.kind:
        last += 1
    return body[first:last + 1]


def _side_by_side(w: KernelWriter, o: Op) -> list[Op]:
    """For the last of ops in a row that each take a warp: all of these; for the others none. `o` alone where warps are too few,
    where there is no text for so many, or where they differ in more than their operands."""
    row = _in_a_row(w, o)
    if len(row) > w.threads() // 32 or len(row) not in (1, 2, 4) or len({x.attrs for x in row}) > 1:
        return [o]
    home = {x.out: x.buffer for x in walk(w.k.body)}
    for x in row:
        if any(home[a] == x.buffer for y in row if y is not x for a in y.args):
            raise EmitError(f"tilelang: {x.out} (line {x.line}) overwrites what is read side by side with it")
    return row if row[-1] is o else []


def least(o: Op) -> list[str]:
    """The word for a sum whose terms are bounded."""
    return [f"least={o.attr('least')!r}"] if o.attr("least") is not None else []


@rule("cumsum")
def cumsum(w: KernelWriter, o: Op, x: Value) -> None:
    row = [o] if w.sizes["C"] % 32 else _side_by_side(w, o)
    if len(row) == 1:
        w.line(f"t.cumsum({', '.join([_storage(w, o, x), w.name(o.buffer), *least(o)])})")
    elif row:
        sources = ", ".join(w.name(w.env[y.args[0]].buffer) for y in row)
        sums = ", ".join(w.name(y.buffer) for y in row)
        w.line(f"t.cumsums({', '.join([f'({sources})', f'({sums})', *least(o)])})")


@rule("diagonal")
def diagonal(w: KernelWriter, o: Op, x: Value) -> None:
    i, j = w.loop(x.dims)
    w.line(f"if {i} == {j}:")
    w.line(f"    {w.name(o.buffer)}[{i}] = {x.at(i, j)}")
    w.end(x.dims)


def strict(o: Op) -> list[str]:
    """The word for an inverse without its diagonal."""
    return ["strict=True"] if o.attr("strict") else []


@rule("diag_inverse")
def diag_inverse(w: KernelWriter, o: Op, x: Value, scale: Value | None = None) -> None:
    row = _side_by_side(w, o) if o.attr("size") == WHOLE else [o]
    for y in row if o.attr("size") == WHOLE else []:
        w.line(f"t.expect_swizzled({w.name(y.buffer)})")
    if len(row) == 1:
        columns = [f"scale={_storage(w, o, scale)}"] if scale else []
        w.line(f"t.diag_inverse({', '.join([_storage(w, o, x), w.name(o.buffer), str(o.attr('size')), *columns, *strict(o)])})")
    elif row:
        tiles = ", ".join(w.name(y.buffer) for y in row)
        scales = ", ".join(w.name(w.env[y.args[1]].buffer) if scale else "None" for y in row)
        w.line(f"t.diag_inverses({', '.join([f'({tiles})', f'({scales})', *strict(o)])})")


@rule("load")
def load(w: KernelWriter, o: Op, *operands: Value) -> None:
    if not o.attr("channel"):
        fill(w, o, *operands)
        return
    row = [x for x in _in_a_row(w, o) if x.attr("channel") and w.p.tensor(x.attr("tensor")).index == "token"]
    if o not in row:
        _copy(w, o)
    elif o is row[-1]:  # one question for all of them
        w.line(f"if {w.use('rows')} >= {w.dim('C')}:")
        w.w.indent += 1
        for x in row:
            _copy(w, x)
        w.w.indent -= 1
        w.line("else:")
        w.w.indent += 1
        for x in row:
            fill(w, x)
        w.w.indent -= 1


def _copy(w: KernelWriter, o: Op) -> None:
    w.turn_to(o)
    w.line(f"t.start_copy({w.tile(w.p.tensor(o.attr('tensor')))}, {w.name(o.buffer)})")


def fill(w: KernelWriter, o: Op, *operands: Value) -> None:
    """A load, element by element."""
    assert o.type is not None
    w.turn_to(o)
    t, to = w.p.tensor(o.attr("tensor")), w.stored(o.type.dims, o.buffer)
    when = w.when(t, o) + [f"{x.at()} < 0" for x in operands[:1]]
    if operands[1:]:  # which lies there already, if need be
        if operands[1].buffer != o.buffer:
            w.fill(to, operands[1])
        w.line(f"if {' and '.join(when)}:")
        w.w.indent += 1
    index = w.loop(to.dims)
    there = index[::-1] if o.attr("transposed") else index
    text = w.address(t, there, o.attr("parts_ahead", 0))
    for x in [*([] if operands[1:] else when), *w.inside(t, there)][::-1]:
        text = f"T.if_then_else({x}, {text}, 0)"
    w.line(f"{to.at(*index)} = {text}")
    w.end(to.dims)
    w.w.indent -= bool(operands[1:])


@rule("wait")
def wait(w: KernelWriter, o: Op) -> None:
    w.line("t.wait_copies()")


@rule("move")
def move(w: KernelWriter, o: Op, x: Value) -> None:
    w.line(f"t.copy({_storage(w, o, x)}, {w.name(o.buffer)})")


@rule("store")
def store(w: KernelWriter, o: Op, x: Value) -> None:
    t = w.p.tensor(o.attr("tensor"))
    when = w.when(t, o)
    for condition in when:
        w.line(f"if {condition}:")
        w.w.indent += 1
    index = w.loop(x.dims)
    there = index[::-1] if o.attr("transposed") else index
    inside = w.inside(t, there)
    if inside:
        w.line(f"if {' and '.join(inside)}:")
        w.w.indent += 1
    w.line(f"{w.address(t, there, o.attr('parts_ahead', 0))} = {element(x, x.dims, index)}")
    w.w.indent -= bool(inside) + len(when)
    w.end(x.dims)


@rule("warm_up_length")
def warm_up_length(w: KernelWriter, o: Op) -> None:
    ahead, name, later = o.attr("parts_ahead", 0), o.attr("tensor"), "(first + span) * C < length"
    if name is None:
        inside = "" if ahead else "earlier > part - T.truncdiv(first, span)"
        here = (later if ahead else "first > 0") if w.part == "part" else inside
        text = f"T.Select({here}, -1.0, 0.0)" if here else "-1.0"
    else:
        chunks = f"T.if_then_else({later}, first + span, 0)" if ahead else "first"
        text = (f"t.warm_up_length({w.params[name]}, start // C + n, hv, {chunks}, {o.attr('most')} * span, {o.attr('bound')})")
    if o.attr("kept"):
        w.line(f"if {SUMMED} != 0 and first > 0:")
        w.line(f"    {w.name(o.buffer)} = {w.address(w.p.tensor(o.attr('kept')), ())}")
        w.line("else:")
    w.w.indent += bool(o.attr("kept"))
    w.line(f"{w.name(o.buffer)} = {text}")
    w.w.indent -= bool(o.attr("kept"))


@rule("return_unless_negative")
def return_unless_negative(w: KernelWriter, o: Op, x: Value) -> None:
    w.line(f"if {x.at()} < 0:")
    w.w.indent += 1  # to the kernel's end


# --- rules of expressions: (kernel, op, operands) -> the element at some indices ------------------------------------
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
    # The right operand keeps its parentheses at equal level: sums are not reassociated.
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
    assert o.type is not None
    dims, (x, y), consts = o.type.dims, (a, b), {c.out for c in walk(w.k.body) if c.kind == "const"}
    if consts & set(o.args):  # a bound, which keeps NaN
        x, y = (b, a) if o.args[0] in consts else (a, b)
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


@rule("col")
def col(w: KernelWriter, o: Op, x: Value) -> At:
    return lambda i, j: x.at(i)


@rule("row")
def row(w: KernelWriter, o: Op, x: Value) -> At:
    return lambda i, j: x.at(j)


@rule("last")
def last(w: KernelWriter, o: Op, x: Value) -> At:
    end = f"{w.dim(x.dims[0])} - 1"
    return lambda *index: x.at(end, *index[1:])


def _keep(kind: str, size: int, i: str, j: str) -> str:
    if kind in ("lower", "strictly_lower", "eye"):
        return f"{i} { {'lower': '>=', 'strictly_lower': '>', 'eye': '=='}[kind]} {j}"
    below = f"{i} // {size} > {j} // {size}" if size > 1 else f"{i} > {j}"
    return f"T.And({i} // {2 * size} == {j} // {2 * size}, {below})"


@rule("lower", "strictly_lower", "pairs")
def masked(w: KernelWriter, o: Op, x: Value) -> At:
    fill = _number(o.attr("fill", 0.0))
    return lambda i, j: Text(f"T.if_then_else({_keep(o.kind, o.attr('size', 0), i, j)}, {x.at(i, j)}, {fill})")


@rule("eye")
def eye(w: KernelWriter, o: Op) -> At:
    def at(i: str, j: str) -> Text:
        here = _keep("eye", 0, i, j)
        return Text(f"T.if_then_else({f'T.And({here}, {i} < {within})' if within else here}, 1.0, 0.0)")
    within = o.attr("within")
    return at


@rule("valid")
def valid(w: KernelWriter, o: Op, x: Value) -> At:
    rows = w.use("rows")
    return lambda i, *rest: Text(f"T.if_then_else({i} < {rows}, {x.at(i, *rest)}, 0.0)")
