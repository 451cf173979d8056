"""Rules for kernels with warp groups: waits, products, copies by TMA, moves between registers and shared memory."""
from __future__ import annotations

import math

from ...ir.ops import ORDER
from ...ir.types import BYTES, WARP
from ..base import AT_A_TIME, Op
from .groups import GroupsWriter, rule
from .rules import fill, grouped, in_place, strict
from .rules import rule as base
from .tiles import Value

__all__ = ["rule"]

@rule("wait", statement=True)
def wait(w: GroupsWriter, o: Op) -> None:
    x = w.buffers[o.attr("channel")]
    iterations = f"{w.counted(x)} // {x.slots}" if x.slots > 1 else w.counted(x)
    w.line(f"T.barrier_wait({x.name}[{w.slot(x)}], {f'({iterations} + 1)' if o.attr('back') else iterations} % 2)")


@rule("signal", statement=True)
def signal(w: GroupsWriter, o: Op) -> None:
    x = w.buffers[o.attr("channel")]
    w.line(f"T.barrier_arrive({x.name}[{w.slot(x)}])")


@rule("drain", statement=True)
def drain(w: GroupsWriter, o: Op) -> None:
    under_way = {n: x for n, x in w.begun.items() if n in o.attr("but", ())}
    w.line(f"T.wait_wgmma({len(under_way)})")
    # so that nvcc does not move a read of it before the wait
    for x in dict.fromkeys(x for n, x in w.begun.items() if n not in under_way):
        w.line(f"T.warpgroup_fence_operand({w.name(x)}, num_regs={math.prod(w.buffers[x].shape) // w.agent.threads})")
    w.begun = under_way


@rule("diag_inverse", statement=True)
def diag_inverse(w: GroupsWriter, o: Op, x: Value, scale: Value | None = None) -> None:
    """Inverses of diagonal blocks, by all threads of an agent, or in place of a whole tile, by one of its warps."""
    if not in_place(o, x):
        w.line(f"t.diag_inverse({w.whole(x.buffer)}, {w.whole(o.buffer)}, {o.attr('size')}, thread={w.thread}, "
               f"threads={w.agent.threads})")
        return
    given = [grouped([w.whole(x.buffer)]), grouped([w.whole(scale.buffer) if scale else "None"]), *strict(o)]
    w.line(f"t.whole_inverses({', '.join(given)}, thread={w.thread}, warp={w.iteration} % {w.agent.threads // 32})")


@rule("claim_part", statement=True)
def claim_part(w: GroupsWriter, o: Op, warm_up: Value) -> None:
    w.line(f"if ({warm_up.at()} * 2 > span) == (half == 0):")
    w.w.indent += 1  # to the kernel's end


@rule("claim_item", statement=True)
def claim_item(w: GroupsWriter, o: Op) -> None:
    """One thread claims an item. As many as the blocks have own items come before those that are claimed."""
    w.line(f"if tx == {w.agent.first}:")
    counter = w.params[o.attr("tensor")]
    w.inner(f"{w.stored((), o.buffer).at()} = T.atomic_add({counter}[0], 1, return_prev=True) + {AT_A_TIME}")


@rule("next_item", statement=True)
def next_item(w: GroupsWriter, o: Op, claimed: Value) -> None:
    w.line(f"instance = {claimed.at()}")


@rule("fence", statement=True)
def fence(w: GroupsWriter, o: Op) -> None:
    w.line("T.fence_proxy_async()")


@rule("matmul", statement=True)
def matmul(w: GroupsWriter, o: Op, a: Value, b: Value, acc: Value | None = None) -> None:
    """A product of tiles. In a walk's first iteration it may be zero (`absent`). Then the warps skip it."""
    assert o.type is not None
    if acc is not None and acc.buffer != o.buffer:
        w.fill(w.stored(o.type.dims, o.buffer), acc)
    options = [f"{name}=True" for name, key in (("transpose_A", "ta"), ("transpose_B", "tb")) if o.attr(key)]
    options += (["clear_accum=True"] if acc is None else []) + ["policy=T.GemmWarpPolicy.FullRow"]
    if o.attr("asynchronous"):
        w.begun[o.out] = o.buffer
    run = "T.wgmma_gemm" if o.attr("asynchronous") else "T.gemm"
    product = f"{run}({', '.join([*(w.whole(x) for x in (a.buffer, b.buffer, o.buffer)), *options])})"
    if not o.attr("absent"):
        w.line(product)
        return
    w.line(f"if has_{o.attr('absent')} != 0 or {w.passed} > 0:")
    w.inner(product)
    w.line("else:")
    w.w.indent += 1
    index = w.loop(o.type.dims)
    w.line(f"{w.stored(o.type.dims, o.buffer).at(*index)} = 0")
    w.end(o.type.dims)
    w.w.indent -= 1


@rule("load", statement=True)
def load(w: GroupsWriter, o: Op, *operands: Value) -> None:
    """A load by one agent: an asynchronous copy that arrives at the ring's barrier. With a `tail` barrier, a ragged tail is
    copied likewise, and its rows past the sequence's end are set to zero. The copies of later loads that are `begun` with
    this one start here, too. Numbers of tokens are copied element by element.
    """
    t, channel, tail = w.p.tensor(o.attr("tensor")), o.attr("channel"), o.attr("tail")
    if channel is None or (t.index == "token" and len(t.dims) == 1):
        fill(w, o, *operands, branch=True)
        return
    x = w.buffers[channel]
    copy = _copy(w, o, f"{x.name}[{w.slot(x)}]")
    if not tail:
        w.line(copy)
        return
    w.line(f"if {w.use('rows')} >= C:")
    w.inner(copy)
    # Once for each sequence: rows that belong to the next sequence become zero.
    w.line("else:")
    begins = [*([] if o.attr("begun") else [o]), *(y for y in w.loop_body if isinstance(y, Op) and y.attr("begun") == o.out)]
    for y in begins:
        w.inner(_copy(w, y, f"{y.attr('tail')}[0]"), f"T.barrier_arrive({y.attr('tail')}[0])")
    w.inner(f"T.barrier_wait({tail}[0], {w.tails})")
    if _in_blocks(w, o.buffer):
        w.inner(f"t.zero_tail({w.whole(o.buffer)}, rows, {w.thread})")
        return
    row, n = w.row_of_several(t)
    w.inner(f"for i in T.serial(rows // {n}, C // {n}):", f"    for ii, j in T.Parallel({n}, {w.dim(t.dims[1])}):",
            f"        if {row} >= rows:", f"            {w.stored(t.dims, o.buffer).at(row, 'j')} = 0")


@rule("store", statement=True)
def store(w: GroupsWriter, o: Op, x: Value) -> None:
    """A store. A tile of tokens in shared memory is stored by a bulk copy if its chunk is whole. A warp stores a ragged tail in
    pieces of 16 bytes (`store_tail`), or element by element where the tile has several slots, is a block of V, or does not lie in
    swizzled blocks of 128 bytes. A tile in registers is stored by rows."""
    t = w.p.tensor(o.attr("tensor"))
    if o.attr(ORDER) == "rows":
        _store_rows(w, o, x)
        return
    if t.index != "token" or len(t.dims) < 2 or not x.buffer or w.buffers[x.buffer].space != "shared":
        base.of(o)(w, o, x)
        return
    when = w.when(t, o)
    for condition in when:
        w.line(f"if {condition}:")
        w.w.indent += 1
    w.line(f"if {w.use('rows')} >= C:")
    w.inner(f"T.copy({w.whole(x.buffer)}, {w.tile(t)})")
    w.line("else:")
    # If one instance stores all columns, the loop has the number of columns in memory and needs no condition for them.
    blocked = t.dims[1] == w.k.blocked_dim
    whole = not blocked and w.extents(t)[1] == w.dim(t.dims[1])
    if whole and w.buffers[x.buffer].layout == "swizzled" and w.buffers[x.buffer].slots == 1 and _in_blocks(w, x.buffer):
        first, second = (w.address(t, (row, "0")) for row in ("0", "1"))
        w.inner(f"t.store_tail({w.whole(x.buffer)}, {first}, {second}, rows, {w.thread})")
        w.w.indent -= len(when)
        return
    row, n = w.row_of_several(t)
    inside = [f"{row} < rows", *(w.inside(t, (row, "j"))[1:] if blocked else [])]
    w.inner(f"for i in T.serial(T.ceildiv(rows, {n})):",
            f"    for ii, j in T.Parallel({n}, {w.dim(t.dims[1]) if blocked else w.extents(t)[1]}):",
            f"        if {' and '.join(inside)}:", f"            {w.address(t, (row, 'j'))} = {x.at(row, 'j')}")
    w.w.indent -= len(when)


def _store_rows(w: GroupsWriter, o: Op, x: Value) -> None:
    """A store of a tile from registers, by rows."""
    t = w.p.tensor(o.attr("tensor"))
    when = w.when(t, o)
    for condition in when:
        w.line(f"if {condition}:")
        w.w.indent += 1
    rows = w.use("rows") if t.index == "token" else w.dim(t.dims[0])
    transposed = ", transposed=True" if o.attr("transposed") else ""
    to = ", ".join(f'T.access_ptr({w.address(t, (row, "0"))}, "w")' for row in ("0", "1"))
    w.line(f"t.store_rows({w.whole(x.buffer)}, {to}, {rows}, {w.thread}{transposed})")
    w.w.indent -= len(when)


@rule("move", statement=True)
def move(w: GroupsWriter, o: Op, x: Value) -> None:
    """A copy into another memory space. A copy to a swizzled tile uses stmatrix. Other tiles use TileLang's copy or a loop."""
    assert o.type is not None
    if w.buffers[o.buffer].layout == "swizzled":
        _store_tile(w, o, x)
    elif x.buffer and x.dims:
        w.line(f"T.copy({w.whole(x.buffer)}, {w.whole(o.buffer)})")
    elif x.dims:
        w.fill(w.stored(o.type.dims, o.buffer), x)
    else:
        w.line("for i in t.parallel(1):")
        w.w.indent += 1
        w.line(f"{w.stored((1,), o.buffer).at('i')} = {x.at()}")
        w.w.indent -= 1


@rule("row_sum", statement=True)
def row_sum(w: GroupsWriter, o: Op, x: Value) -> None:
    w.line(f"t.group_row_sums({w.whole(x.buffer)}, {w.whole(o.buffer)}, {w.thread})")


@rule("column_sum", statement=True)
def column_sum(w: GroupsWriter, o: Op, x: Value) -> None:
    """Sums of columns, by each warp of a fragment's rows, or of a few rows in shared memory."""
    assert o.type is not None
    if o.attr("parts"):
        w.line(f"t.group_column_sums({w.whole(x.buffer)}, {w.whole(o.buffer)}, {w.thread})")
        return
    index = w.loop(o.type.dims)
    terms = [str(x.at(str(n), *index)) for n in range(w.buffers[x.buffer].shape[0])]
    w.line(f"{w.stored(o.type.dims, o.buffer).at(*index)} = {' + '.join(terms)}")
    w.end(o.type.dims)


@rule("cumsum", statement=True)
def cumsum(w: GroupsWriter, o: Op, x: Value) -> None:
    """Running sums of a vector, by a warp, in place."""
    assert o.type is not None
    w.fill(w.stored(o.type.dims, o.buffer), x)
    w.line(f"t.warp_cumsum({w.whole(o.buffer)}, {w.thread})")


@rule("transpose", statement=True)
def transpose(w: GroupsWriter, o: Op, x: Value) -> None:
    if w.buffers[o.buffer].layout == "swizzled":
        _store_tile(w, o, x)
    else:
        w.line(f"t.load_transposed({w.whole(x.buffer)}, {w.whole(o.buffer)}, {w.thread})")


def _copy(w: GroupsWriter, o: Op, barrier: str) -> str:
    """An asynchronous copy of the tile of load `o`, which arrives at a barrier."""
    return f"T.tma_copy({w.tile(w.p.tensor(o.attr('tensor')))}, {w.whole(o.buffer)}, barrier={barrier})"


def _in_blocks(w: GroupsWriter, buffer: str) -> bool:
    """Whether a tile in shared memory lies in blocks of 128 bytes of columns, as operands of products do, and the agent is one
    warp."""
    x, home = w.buffers[buffer], {o.out: o.buffer for o in w.k.ops if o.out}
    operands = {home.get(a) for o in w.k.ops if o.kind == "matmul" for a in o.args[:2]}
    swizzled = x.layout == "swizzled" or buffer in operands
    return swizzled and w.agent.threads == WARP and BYTES[x.dtype] == 2 and w.sizes[str(x.dims[-1])] % 64 == 0


def _store_tile(w: GroupsWriter, o: Op, x: Value) -> None:
    transposed = ", transposed=True" if o.kind == "transpose" else ""
    if w.buffers[x.buffer].shape[1] > 64:
        w.line(f"t.store_wide_tile({w.whole(x.buffer)}, {w.whole(o.buffer)}, {w.thread})")
        return
    w.line(f"t.store_tile({w.whole(x.buffer)}, {w.whole(o.buffer)}, {w.thread}{transposed})")
