"""The rules of Triton: op -> an expression. The rules of loads, stores and ops that end an instance print lines."""
from __future__ import annotations

import math

from ..base import ATOM, PRODUCT, SUM, SUMMED, UNARY, Op, Text
from . import rows  # noqa: F401  which has the rules of ops across rows
from .kernel import KernelWriter, rule

__all__ = ["rule"]


def _number(x: float) -> str:
    return f'float("{x}")' if math.isinf(x) or math.isnan(x) else repr(float(x))


@rule("const")
def const(w: KernelWriter, o: Op) -> Text:
    x = o.attr("value")
    return Text(_number(x), ATOM if x >= 0 or math.isinf(x) else UNARY)


@rule("scalar")
def scalar(w: KernelWriter, o: Op) -> Text:
    if o.attr("tensor"):
        return Text(f"tl.load({o.attr('tensor')}_ptr + hv)")
    return Text(w.name(o.attr("param")))


@rule("full")
def full(w: KernelWriter, o: Op) -> Text:
    assert o.type is not None
    dtype = w.use("OPERAND") if o.type.dtype == "bfloat16" else f"tl.{o.type.dtype}"
    return Text(f"tl.full({w.shape(o.type)}, {_number(o.attr('value'))}, {dtype})")


@rule("expand")
def expand(w: KernelWriter, o: Op, x: Text) -> Text:
    assert o.type is not None
    return Text(f"tl.broadcast_to({x}, {w.shape(o.type)})")


def _binary(kind: str, sign: str, level: int) -> None:
    # The right operand keeps its parentheses at the same level, so that sums are not reassociated.
    @rule(kind)
    def write(w: KernelWriter, o: Op, a: Text, b: Text) -> Text:
        return Text(f"{a.at(level)} {sign} {b.at(level + 1)}", level)


for _kind, _sign, _level in (("add", "+", SUM), ("sub", "-", SUM), ("mul", "*", PRODUCT), ("div", "/", PRODUCT)):
    _binary(_kind, _sign, _level)


@rule("maximum", "minimum")
def extreme(w: KernelWriter, o: Op, a: Text, b: Text) -> Text:
    nan = "" if o.attr("bound") is None else ", propagate_nan=tl.PropagateNan.ALL"
    return Text(f"tl.{o.kind}({a}, {b}{nan})")


@rule("neg")
def neg(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"-{x.at(ATOM)}", UNARY)


@rule("exp")
def exp(w: KernelWriter, o: Op, x: Text) -> Text:
    """By exp2, which takes two instructions on NVIDIA GPUs and rounds results below 1e-38 to 0. Their exp takes five."""
    return Text(f"tl.exp2({x.at(PRODUCT)} * {math.log2(math.e)!r})")


@rule("log", "rsqrt", "sigmoid")
def function(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"tl.{o.kind}({x})")


@rule("cast")
def cast(w: KernelWriter, o: Op, x: Text) -> Text:
    if o.attr("to") == "bfloat16":
        return Text(f"rounded({x}, {w.use('OPERAND')})")
    return Text(f"{x.at(ATOM)}.to(tl.{o.attr('to')})")


@rule("if_negative")
def if_negative(w: KernelWriter, o: Op, number: Text, x: Text) -> Text:
    return Text(f"tl.where({number} < 0, {x}, 0.0)")


@rule("col")
def col(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"{x.at(ATOM)}[:, None]")


@rule("row")
def row(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"{x.at(ATOM)}[None, :]")


@rule("matmul")
def matmul(w: KernelWriter, o: Op, a: Text, b: Text, acc: Text | None = None) -> Text:
    sides = []
    for x, flip in ((a, o.attr("ta")), (b, o.attr("tb"))):
        sides.append(f"tl.trans({x})" if flip else x.code)
    if acc is not None:
        sides.append(f"acc={acc}")
    if w.type[o.args[0]].dtype == "float32":
        sides.append('input_precision="ieee"')
    return Text(f"tl.dot({', '.join(sides)})")


@rule("cumsum")
def cumsum(w: KernelWriter, o: Op, x: Text) -> Text:
    if o.attr("least") is not None:
        x = Text(f"tl.maximum({x}, {_number(o.attr('least'))}, propagate_nan=tl.PropagateNan.ALL)")
    sums = Text(f"tl.cumsum({x}, axis=0)")
    return Text(f"{sums} - {x.at(SUM + 1)}", SUM) if o.attr("exclusive") else sums


@rule("last")
def last(w: KernelWriter, o: Op, x: Text) -> Text:
    dims = w.type[o.args[0]].dims
    here = f"{w.index(dims[0], 0, len(dims))} == {w.dim(dims[0])} - {1 + o.attr('before', 0)}"
    return Text(f"tl.sum(tl.where({here}, {x}, 0.0), axis=0)")


@rule("row_sum")
def row_sum(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"tl.sum({x}, axis={w.type[o.args[0]].rank - 1})")


@rule("row_max")
def row_max(w: KernelWriter, o: Op, x: Text) -> Text:
    """The largest entry of each row, NaN if an entry is NaN: tl.max passes over NaN on a GPU, and the sum brings it back."""
    if o.attr("within"):
        dims, end = w.type[o.args[0]].dims, w.use(o.attr("within"))
        x = Text(f"tl.where({w.index(dims[-1], len(dims) - 1, len(dims))} < {end}, {x}, {_number(-math.inf)})")
    axis = w.type[o.args[0]].rank - 1
    return Text(f"tl.max({x}, axis={axis}) + tl.sum(tl.where({x} != {x}, {x}, 0.0), axis={axis})", SUM)


@rule("column_sum")
def column_sum(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"tl.sum({x}, axis=0)")


@rule("diagonal")
def diagonal(w: KernelWriter, o: Op, x: Text) -> Text:
    i, j = (w.index(d, axis, 2) for axis, d in enumerate(w.type[o.args[0]].dims))
    return Text(f"tl.sum(tl.where({i} == {j}, {x}, 0.0), axis=1)")


def _keep(w: KernelWriter, o: Op) -> str:
    """Where a mask keeps the operand, or where the identity has ones: a condition on the indices."""
    assert o.type is not None
    (i, j), size = (w.index(d, axis, 2) for axis, d in enumerate(o.type.dims)), o.attr("size", 0)
    if o.attr("within"):
        return f"({i} == {j}) & ({i} < {w.use(o.attr('within'))})"
    if o.kind in ("lower", "strictly_lower", "eye"):
        return f"{i} { {'lower': '>=', 'strictly_lower': '>', 'eye': '=='}[o.kind]} {j}"
    if o.kind == "diagonal_blocks":
        return f"{i} // {size} == {j} // {size}"
    below = f"{i} // {size} > {j} // {size}" if size > 1 else f"{i} > {j}"
    return f"({i} // {2 * size} == {j} // {2 * size}) & ({below})"


@rule("lower", "strictly_lower", "pairs", "diagonal_blocks")
def masked(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"tl.where({_keep(w, o)}, {x}, {_number(o.attr('fill', 0.0))})")


@rule("eye")
def eye(w: KernelWriter, o: Op) -> Text:
    return Text(f"tl.where({_keep(w, o)}, 1.0, 0.0)")


@rule("valid")
def valid(w: KernelWriter, o: Op, x: Text) -> Text:
    return Text(f"tl.where({w.use('valid')}{'[:, None]' if len(w.type[o.args[0]].dims) > 1 else ''}, {x}, 0.0)")


@rule("load")
def load(w: KernelWriter, o: Op) -> None:
    """A load by a descriptor, or by pointers with a mask for rows past the sequence's end and for padding."""
    t, name = w.p.tensor(o.attr("tensor")), w.name(o.buffer)
    w.piece, w.middle = (t.dims[-1], *o.attr("piece")) if o.attr("piece") else (), o.attr("middle", 0)
    transposed, one_token = o.attr("transposed", False), o.attr("one_token", False)
    w.delay = o.attr("delay", 0)
    if o.attr("described"):
        text = f"{name} = {w.rows(t)}.load([t, 0])"
    else:
        mask = w.mask(t, transposed, one_token)
        at = w.pointers(t, transposed, o.attr("parts_ahead", 0), o.attr("last", False), one_token)
        text = f"{name} = tl.load({at}{f', mask={mask}, other=0.0' if mask else ''})"
    w.piece, w.middle, w.delay = (), 0, 0
    dtype = f"tl.{t.dtype}"
    if t.dtype == "bfloat16" and len(t.dims) > 1 + one_token:  # ops convert a vector to float32 where they read it
        dtype = w.use("OPERAND")
        text += f".to({dtype})"
    when = w.when(t, o) + [f"{w.env[x]} < 0" for x in o.args[:1]]
    if o.args[1:]:
        w.line(f"{name} = {w.env[o.args[1]]}")
    elif when:
        shape = w.shape(t.moved(transposed=transposed, one_token=one_token, piece=o.attr("piece")))
        w.line(f"{name} = tl.zeros({shape}, dtype={dtype})")
    w.env[o.out] = Text(name)
    _nested(w, when, text)


@rule("store")
def store(w: KernelWriter, o: Op) -> None:
    t, transposed, one_token = w.p.tensor(o.attr("tensor")), o.attr("transposed", False), o.attr("one_token", False)
    w.piece = (t.dims[-1], *o.attr("piece")) if o.attr("piece") else ()
    mask = w.mask(t, transposed, one_token)
    at = w.pointers(t, transposed, o.attr("parts_ahead", 0), one_token=one_token)
    w.piece = ()
    _nested(w, w.when(t, o), f"tl.store({at}, {w.env[o.args[0]]}{f', mask={mask}' if mask else ''})")


@rule("resume")
def resume(w: KernelWriter, o: Op) -> None:
    """The carried state, unless the chunk's parent is another chunk than the one before."""
    t, name, parents = w.p.tensor(o.attr("tensor")), w.name(o.buffer), w.use(f"{o.attr('parents')}_t")
    before, initial = (w.env[a] for a in o.args)
    if before.code != name:
        w.line(f"{name} = {before}")
    w.line(f"if (t > 0) & ({parents} < 0):")
    w.line(f"    {name} = {initial.at(ATOM)}.to(tl.float32)")
    w.line(f"if (t > 0) & ({parents} >= 0) & ({parents} != t // C - 1):")
    w.w.indent += 1
    kept, slot = w.kept_at(t), ""
    if w.p.tensor(t.at).index == "numbers":
        kept = slot = f"{t.at}_parent"
        w.line(f"{slot} = {w.number(t.at, parents)}.to(tl.int64)")
    w.line(f"if {kept} >= 0:")
    transposed = o.attr("transposed", False)
    mask = w.mask(t, transposed)
    at = w.pointers(t, transposed, chunk=parents, slot=slot)
    w.w.indent += 1
    w.line(f"{name} = tl.load({at}{f', mask={mask}, other=0.0' if mask else ''}).to(tl.float32)")
    w.w.indent -= 2
    w.env[o.out] = Text(name)


@rule("barrier")
def barrier(w: KernelWriter, o: Op) -> None:
    w.line("tl.debug_barrier()")


def _nested(w: KernelWriter, when: list[str], text: str) -> None:
    for x in when:
        w.line(f"if {x}:")
        w.w.indent += 1
    w.line(text)
    w.w.indent -= len(when)


@rule("warm_up_length")
def warm_up_length(w: KernelWriter, o: Op) -> Text:
    """The number of chunks before its part at which a walk begins. -1 if the part starts from the state that the fold computes.

    Where a call has no summaries, no kernel computes that state, so that no limit holds. With `kept`, the text loads the length
    that an earlier kernel stored, if that kernel ran.
    """
    ahead, name = o.attr("parts_ahead", 0), o.attr("tensor")
    if name is None:
        if w.part != "part":
            return Text("-1.0" if ahead else "tl.where(earlier > part - first // size, -1.0, 0.0)")
        return Text(f"tl.where({'first + size < length' if ahead else 'first > 0'}, -1.0, 0.0)")
    chunks = "tl.where(first + size < length, (first + size) // C, 0)" if ahead else "first // C"
    last, stride = ("", "HV") if o.attr("step", 1) > 0 else (" + tl.cdiv(length, C) - 1", "-HV")  # of a walk back the first chunk
    at = f"{name}_ptr + ((start // {w.use('C')} + n{last}) * HV + hv)"
    most = f"tl.where({w.use(SUMMED)} != 0, tl.minimum({o.attr('most')} * span, span + {o.attr('limit')}), {chunks})"
    found = f"warm_up_length({at}, {stride}, {chunks}, {most}, {o.attr('bound')}, {w.use(SUMMED)})"
    if not o.attr("kept"):
        return Text(found)
    w.line(f"if ({w.use(SUMMED)} != 0) & (first > 0):")
    w.line(f"    {w.name(o.buffer)} = tl.load({w.pointers(w.p.tensor(o.attr('kept')), False)})")
    w.line("else:")
    w.w.indent += 1
    w.line(f"{w.name(o.buffer)} = {found}")
    w.w.indent -= 1
    return Text(w.name(o.buffer))


@rule("return_unless_negative")
def return_unless_negative(w: KernelWriter, o: Op) -> None:
    w.line(f"if {w.env[o.args[0]]} >= 0:")
    w.line("    return")


@rule("claim_part")
def claim_part(w: KernelWriter, o: Op) -> None:
    w.line(f"if (2 * {w.env[o.args[0]]} > {w.use('span')}) != (instance == 0):")
    w.line("    return")
