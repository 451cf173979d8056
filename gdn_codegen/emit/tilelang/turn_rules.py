"""Rules for agents whose warps run iterations in turn: each warp has the tiles of an iteration in its registers."""
from __future__ import annotations

from ...ir.ops import BY_COLUMNS
from ...ir.types import WARP
from ..base import Op
from .groups import GroupsWriter, turn_rule
from .rules import least
from .tiles import Value

__all__ = ["turn_rule"]


@turn_rule("warp_barrier", statement=True)
def warp_barrier(w: GroupsWriter, o: Op) -> None:
    w.line("T.sync_warp()")


@turn_rule("matmul", statement=True)
def matmul(w: GroupsWriter, o: Op, a: Value, b: Value, acc: Value | None = None) -> None:
    assert o.type is not None
    if acc is not None and acc.buffer != o.buffer:
        w.fill(w.stored(o.type.dims, o.buffer), acc)
    more = ["clear=False"] if acc is not None or o.attr(BY_COLUMNS) else []
    w.line(f"t.warp_product({', '.join([*(w.whole(x) for x in (a.buffer, b.buffer, o.buffer)), *more])})")


@turn_rule("move", statement=True)
def move(w: GroupsWriter, o: Op, x: Value) -> None:
    """A copy of a swizzled tile by ldmatrix or stmatrix. Other tiles and vectors go to shared memory entry by entry."""
    assert o.type is not None
    to, piece = w.buffers[o.buffer], "piece" if o.attr(BY_COLUMNS) else "0"
    if to.space != "shared":
        w.line(f"t.load_warp_tile({w.whole(x.buffer)}, {w.whole(o.buffer)}, {piece}, {w.thread})")
    elif to.layout == "swizzled":
        w.line(f"t.store_warp_tile({w.whole(x.buffer)}, {w.whole(o.buffer)}, {piece}, {w.thread})")
    elif len(to.dims) == 2:
        w.line(f"t.store_warp_entries({', '.join([w.whole(x.buffer), *_slot(w, o.buffer), w.thread])})")
    else:
        _each(w, w.stored(o.type.dims, o.buffer), x)


def _each(w: GroupsWriter, to: Value, x: Value) -> None:
    """A loop in which the lanes of a warp copy a vector. Each has every 32nd entry. All of them write a number."""
    if not to.dims:
        w.line(f"{to.at()} = {x.at()}")
        return
    count = w.sizes[str(to.dims[0])]
    w.line(f"for run in T.unroll({-(-count // WARP)}):")
    inside = [f"if run * {WARP} + lane < {count}:"] if count % WARP else []
    index = f"run * {WARP} + lane"
    w.inner(*inside, "    " * len(inside) + f"{to.at(index)} = {x.at(index)}")


@turn_rule("diagonal", statement=True)
def diagonal(w: GroupsWriter, o: Op, x: Value) -> None:
    w.line(f"t.store_warp_diagonal({', '.join([w.whole(x.buffer), *_slot(w, o.buffer), w.thread])})")


@turn_rule("cumsum", statement=True)
def cumsum(w: GroupsWriter, o: Op, x: Value) -> None:
    """Running sums of the columns of a tile. Each lane has some columns. Past a sequence's end terms are computed, too, and
    then replaced by 0: a condition around their computation would be a branch for each row."""
    made = next((y for y in w.k.ops if y.out == o.args[0]), None)
    masked = made is not None and made.kind == "valid" and not (made.buffer or w.env[made.args[0]].buffer)
    of = w.env[made.args[0]] if made is not None and masked else x
    given = [f"lambda i, j: {of.at('i', 'j')}", *_slot(w, o.buffer), *(w.dim(d) for d in x.dims), w.thread, *least(o)]
    options = [*([f"valid_rows={w.use('rows')}"] if masked else []), *(["exclusive=True"] if o.attr("exclusive") else [])]
    w.line(f"t.warp_column_cumsum({', '.join([*given, *options])})")


@turn_rule("diag_inverse", statement=True)
def diag_inverse(w: GroupsWriter, o: Op, x: Value) -> None:
    w.line(f"t.warp_inverse({', '.join([*_slot(w, x.buffer), *_slot(w, o.buffer), w.thread])})")


def _slot(w: GroupsWriter, buffer: str) -> tuple[str, str]:
    """A ring, and the indices of its slot in this iteration."""
    ring = w.buffers[buffer]
    return w.name(buffer), f"({w.slot(ring)},)" if ring.slots > 1 else "()"
