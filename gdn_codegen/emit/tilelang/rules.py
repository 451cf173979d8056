"""Rules for ops that are statements. They print lines."""
from __future__ import annotations

from collections.abc import Sequence

from ...ir.ops import AHEAD
from ...ir.types import COLUMNS_OF_A_THREAD
from ..base import SUMMED, EmitError, Op
from . import expressions  # noqa: F401  which has the rest of the table
from .addresses import FIRST
from .kernel import KernelWriter, rule
from .tiles import Value, element

__all__ = ["rule"]


def _storage(w: KernelWriter, o: Op, x: Value) -> str:
    if not x.buffer:
        raise EmitError(f"tilelang: {o.kind} ({o.out}, {o.line}) reads a value without storage; pass place should "
                        f"have given it a buffer")
    return w.name(x.buffer)


@rule("matmul", statement=True)
def matmul(w: KernelWriter, o: Op, a: Value, b: Value, acc: Value | None = None) -> None:
    assert o.type is not None
    if acc is not None and acc.buffer != o.buffer:
        w.fill(w.stored(o.type.dims, o.buffer), acc)
    options = [f"{name}=True" for name, key in (("transpose_A", "ta"), ("transpose_B", "tb")) if o.attr(key)]
    options += ["clear_accum=False"] if acc is not None else []
    w.line(f"t.gemm({', '.join([_storage(w, o, a), _storage(w, o, b), w.name(o.buffer), *options])})")


@rule("row_sum", statement=True)
def row_sum(w: KernelWriter, o: Op, x: Value) -> None:
    w.line(f"t.{'row' if x.dims[1:] else 'vector'}_sum({_storage(w, o, x)}, {w.name(o.buffer)})")


@rule("row_max", statement=True)
def row_max(w: KernelWriter, o: Op, x: Value) -> None:
    within = o.attr("within") or w.dim(x.dims[-1])
    threads = f", {w.k.threads}" if x.dims[1:] and not w.k.agents else ""
    w.line(f"t.{'row' if x.dims[1:] else 'vector'}_max({_storage(w, o, x)}, {w.name(o.buffer)}, {within}{threads})")


@rule("column_sum", statement=True)
def column_sum(w: KernelWriter, o: Op, x: Value) -> None:
    batch = f", batch={COLUMNS_OF_A_THREAD}" if x.buffer and w.buffers[x.buffer].layout == "columns" else ""
    w.line(f"t.column_sum({_storage(w, o, x)}, {w.name(o.buffer)}{batch})")


def grouped(names: Sequence[str]) -> str:
    """A tuple, as text."""
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def least(o: Op) -> list[str]:
    """The keyword argument for a sum whose terms have a lower bound, if it has one."""
    return [f"least={o.attr('least')!r}"] if o.attr("least") is not None else []


@rule("cumsum", statement=True)
def cumsum(w: KernelWriter, o: Op, x: Value) -> None:
    """Running sums of a vector, of vectors side by side, or of each column of a tile."""
    row = w.gather(o)
    if len(x.dims) == 2:
        exclusive = ["exclusive=True"] if o.attr("exclusive") else []
        tiles = [_storage(w, o, x), w.name(o.buffer), w.dim(x.dims[1])]
        w.line(f"t.column_cumsum({', '.join([*tiles, *least(o), *exclusive])})")
    elif len(row) == 1:
        w.line(f"t.cumsum({', '.join([_storage(w, o, x), w.name(o.buffer), *least(o)])})")
    elif row:
        sources = [w.name(w.env[y.args[0]].buffer) for y in row]
        sums = [w.name(y.buffer) for y in row]
        w.line(f"t.cumsums({', '.join([grouped(sources), grouped(sums), *least(o)])})")


@rule("diagonal", statement=True)
def diagonal(w: KernelWriter, o: Op, x: Value) -> None:
    i, j = w.loop(x.dims)
    w.line(f"if {i} == {j}:")
    w.line(f"    {w.name(o.buffer)}[{i}] = {x.at(i, j)}")
    w.end(x.dims)


def strict(o: Op) -> list[str]:
    """The keyword argument for an inverse without its diagonal, if the op has the attribute."""
    return ["strict=True"] if o.attr("strict") else []


def in_place(o: Op, x: Value) -> bool:
    """Whether `o` is the inverse of the whole tile `x`, in place. Others have no scale and are not strict: else EmitError."""
    if o.buffer != x.buffer and (o.attr("strict") or o.args[1:]):
        raise EmitError(f"tilelang: {o.kind} ({o.out}, {o.line}) is strict or has a scale, but is not in place; "
                        f"pass place should have given it the buffer of {o.args[0]}")
    return o.buffer == x.buffer


@rule("diag_inverse", statement=True)
def diag_inverse(w: KernelWriter, o: Op, x: Value, scale: Value | None = None) -> None:
    """Inverses of diagonal blocks of one tile, or in place of one or several whole tiles in parallel, one for each warp."""
    if not in_place(o, x):
        w.line(f"t.diag_inverse({_storage(w, o, x)}, {w.name(o.buffer)}, {o.attr('size')})")
    elif row := w.gather(o):
        for y in row:
            w.line(f"t.expect_swizzled({w.name(y.buffer)})")
        tiles = [w.name(y.buffer) for y in row]
        scales = [_storage(w, y, w.env[y.args[1]]) if scale else "None" for y in row]
        w.line(f"t.whole_inverses({', '.join([grouped(tiles), grouped(scales), *strict(o)])})")


@rule("load", statement=True)
def load(w: KernelWriter, o: Op, *operands: Value) -> None:
    """A load: asynchronous copies, each of them of tokens with a condition for its row, or a loop over the elements."""
    if not o.attr("channel"):
        fill(w, o, *operands)
    elif (t := w.p.tensor(o.attr("tensor"))).index == "token":
        fill(w, o, order="async_parallel")
        w.line("t.commit_copy()")
    else:
        w.about(o)
        w.line(f"t.start_copy({w.tile(t, o.attr('piece', ()))}, {w.whole(o.buffer)})")


def in_memory(o: Op, index: tuple[str, ...]) -> tuple[str, ...]:
    """The indices in its tensor of what a load or store moves, for indices of the value."""
    if piece := o.attr("piece"):
        return *index[:-1], f"{piece[0]} + {index[-1]}"
    return (FIRST, *index) if o.attr("one_token") and not o.attr("tokens") else index[::-1] if o.attr("transposed") else index


def fill(w: KernelWriter, o: Op, *operands: Value, branch: bool = False, order: str = "") -> None:
    """A load by a loop over the elements. branch: a tile whose condition does not hold becomes zero in a loop of its own. That is
    shorter code than a condition for each element. order: the device function for the loop, if not that of other loops."""
    assert o.type is not None
    w.about(o)
    w.order = order or w.order
    t, to = w.p.tensor(o.attr("tensor")), w.stored(o.type.dims, o.buffer)
    when = w.when(t, o) + [f"{x.at()} < 0" for x in operands[:1]]
    if operands[1:] and operands[1].buffer != o.buffer:  # the value if the condition does not hold
        w.fill(to, operands[1])
    branch = bool(operands[1:] or (branch and when and len(to.dims) == 2))
    if branch:
        w.line(f"if {' and '.join(when)}:")
        w.w.indent += 1
    index = w.loop(to.dims)
    there = in_memory(o, index)
    text = w.address(t, there, o.attr("parts_ahead", 0))
    for x in [*([] if branch else when), *w.inside(t, there)][::-1]:
        text = f"T.if_then_else({x}, {text}, 0)"
    w.line(f"{to.at(*index)} = {text}")
    w.end(to.dims)
    w.w.indent -= branch
    if branch and not operands[1:]:
        w.line("else:")
        w.w.indent += 1
        w.line(f"{to.at(*w.loop(to.dims))} = 0")
        w.end(to.dims)
        w.w.indent -= 1


@rule("resume", statement=True)
def resume(w: KernelWriter, o: Op, before: Value, initial: Value) -> None:
    """The carried state, unless the chunk's parent is another chunk than the one before."""
    assert o.type is not None
    t, to, parents = w.p.tensor(o.attr("tensor")), w.stored(o.type.dims, o.buffer), w.use(f"{o.attr('parents')}_t")
    if before.buffer != o.buffer:
        w.fill(to, before)
    w.line(f"if chunk > 0 and {parents} < 0:")
    w.w.indent += 1
    w.fill(to, initial)
    w.w.indent -= 1
    kept, slot = w.kept_at(t), ""
    w.line(f"if chunk > 0 and {parents} >= 0 and {parents} != chunk - 1:")
    w.w.indent += 1
    if w.p.tensor(t.at).index == "numbers":
        kept = slot = f"{t.at}_parent"
        w.line(f"{slot} = {w.number(t.at, parents)}")
    w.line(f"if {kept} >= 0:")
    w.w.indent += 1
    index = w.loop(to.dims)
    there = in_memory(o, index)
    text = w.address(t, there, chunk=parents, slot=slot)
    for x in w.inside(t, there)[::-1]:
        text = f"T.if_then_else({x}, {text}, 0)"
    w.line(f"{to.at(*index)} = {text}")
    w.end(to.dims)
    w.w.indent -= 2


@rule("barrier", statement=True)
def barrier(w: KernelWriter, o: Op) -> None:
    w.line("t.barrier()")


@rule("wait", statement=True)
def wait(w: KernelWriter, o: Op) -> None:
    w.line(f"t.wait_copies({o.attr('pending') or ''})")


@rule("move", statement=True)
def move(w: KernelWriter, o: Op, x: Value) -> None:
    """A copy, which the compiler vectorises. Of a group of tokens, a loop over the elements."""
    assert o.type is not None
    if o.attr(AHEAD):
        w.fill(w.stored(o.type.dims, o.buffer), x)
        return
    _storage(w, o, x)  # it has one
    w.line(f"t.copy({w.whole(x.buffer)}, {w.whole(o.buffer)})")


@rule("store", statement=True)
def store(w: KernelWriter, o: Op, x: Value) -> None:
    """A store by a loop over the elements. It leaves out rows past the sequence's end, and padding."""
    t = w.p.tensor(o.attr("tensor"))
    when = w.when(t, o)
    for condition in when:
        w.line(f"if {condition}:")
        w.w.indent += 1
    index = w.loop(x.dims)
    there = in_memory(o, index)
    inside = w.inside(t, there)
    if inside:
        w.line(f"if {' and '.join(inside)}:")
        w.w.indent += 1
    w.line(f"{w.address(t, there, o.attr('parts_ahead', 0))} = {element(x, x.dims, index)}")
    w.w.indent -= bool(inside) + len(when)
    w.end(x.dims)


@rule("warm_up_length", statement=True)
def warm_up_length(w: KernelWriter, o: Op) -> None:
    """The number of chunks before its part at which a walk begins. -1 if the part starts from the state that the fold computes.

    Where a call has no summaries, no kernel computes that state, so that no limit holds. With `kept`, the text loads the length
    that an earlier kernel stored, if that kernel ran.
    """
    ahead, name, has_next = o.attr("parts_ahead", 0), o.attr("tensor"), "(first + span) * C < length"
    if name is None:
        inside = "" if ahead else "earlier > part - T.truncdiv(first, span)"
        here = (has_next if ahead else "first > 0") if w.part == "part" else inside
        text = f"T.Select({here}, -1.0, 0.0)" if here else "-1.0"
    else:
        chunks = f"T.if_then_else({has_next}, first + span, 0)" if ahead else "first"
        # a walk back begins at the last chunk
        last, back = ("", "") if o.attr("step", 1) > 0 else (" + T.ceildiv(length, C) - 1", ", -1")
        longest = o.attr("longest")
        most = longest or f"T.if_then_else({SUMMED} != 0, T.min({o.attr('most')} * span, span + {o.attr('limit')}), {chunks})"
        text = (f"t.warm_up_length({w.params[name]}, start // C + n{last}, hv, {chunks}, {most}, {o.attr('bound')}, "
                f"{0 if longest else SUMMED}{back})")
    if o.attr("kept"):
        w.line(f"if {SUMMED} != 0 and first > 0:")
        w.line(f"    {w.name(o.buffer)} = {w.address(w.p.tensor(o.attr('kept')), ())}")
        w.line("else:")
    w.w.indent += bool(o.attr("kept"))
    w.line(f"{w.name(o.buffer)} = {text}")
    w.w.indent -= bool(o.attr("kept"))


@rule("choose_parts", statement=True)
@rule("return_unless_split", statement=True)
@rule("clear_counter", statement=True)
@rule("return_if_zero", statement=True)
@rule("return_if_set", statement=True)
def by_head(w: KernelWriter, o: Op) -> None:
    """Nothing: the kernel's head clears counters, chooses parts and ends instances, also in blocks that have no chunk."""


@rule("await_kernels", statement=True)
def await_kernels(w: KernelWriter, o: Op, number: Value | None = None) -> None:
    if number:
        w.line(f"if {number.at()} < 0:")
    w.line(f"{'    ' if number else ''}t.wait_for_earlier_kernels()")


@rule("return_unless_negative", statement=True)
def return_unless_negative(w: KernelWriter, o: Op, x: Value) -> None:
    w.line(f"if {x.at()} < 0:")
    w.w.indent += 1  # until the end of the kernel


@rule("set_if_negative", statement=True)
def set_if_negative(w: KernelWriter, o: Op, x: Value) -> None:
    """All threads of all instances that do so store the same number."""
    w.line(f"if {x.at()} < 0:")
    w.line(f"    {w.params[o.attr('tensor')]}[0] = 1")
