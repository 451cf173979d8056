"""The rules of Triton for ops across the rows of a tile: op -> an expression."""
from __future__ import annotations

from math import isinf

from ..base import ATOM, SUM, Op, Text
from .kernel import KernelWriter, rule


@rule("delay", "advance")
def moved_rows(w: KernelWriter, o: Op, x: Text, *before: Text) -> Text:
    """The rows of a tile, moved down or up. `tl.gather` takes them from other threads."""
    if o.attr("given"):
        return _first_rows(w, o, x, before)
    rows, columns = (w.dim(d) for d in w.type[o.args[0]].dims)
    i, by = w.index(w.type[o.args[0]].dims[0], 0, 2), o.attr("by", 0) - len(before)
    there = f"tl.maximum({i} - {-by}, 0)" if by < 0 else f"tl.minimum({i} + {by}, {rows} - 1)"
    moved = f"tl.gather({x}, tl.broadcast_to({there}, [{rows}, {columns}]), axis=0)"
    if by > 0:
        return Text(f"tl.where({i} < {rows} - {by}, {moved}, 0.0)")
    for n, row in enumerate(before):
        moved = f"tl.where({i} == {n}, {row.at(ATOM)}[None, :], {moved})"
    return Text(moved)


def _first_rows(w: KernelWriter, o: Op, x: Text, before: tuple[Text, ...]) -> Text:
    """A tile whose rows lie as they should, but for the first ones of a sequence."""
    i, made = w.index(w.type[o.args[0]].dims[0], 0, 2), str(x)
    for n, row in enumerate(before):
        made = f"tl.where(({i} == {n}) & (t == 0), {row.at(ATOM)}[None, :], {made})"
    return Text(made)


@rule("latest")
def latest(w: KernelWriter, o: Op, x: Text) -> Text:
    rows = w.type[o.args[0]].dims[0]
    last = f"tl.minimum({w.use('length')} - t, {w.dim(rows)}) - 1"
    return Text(f"tl.sum(tl.where({w.index(rows, 0, 2)} == {last}, {x}, 0.0), axis=0)")


@rule("to_middle", "from_middle")
def to_middle(w: KernelWriter, o: Op, x: Text, *more: Text) -> Text:
    """Differences to the middle row, or from it. If it is not given, the middle row of each block is the sum of the block's rows
    with all other rows masked."""
    (rows, columns), size = (w.dim(d) for d in w.type[o.args[0]].dims), o.attr("size")
    i = w.index(w.type[o.args[0]].dims[0], 0, 2)
    blocks = f"[{rows} // {2 * size}, {2 * size}, {columns}]"
    middle = f"tl.sum(tl.reshape(tl.where({i} % {2 * size} == {size - 1}, {x}, 0.0), {blocks}), axis=1)[:, None, :]"
    m = more[-1] if o.attr("given") else f"tl.reshape(tl.broadcast_to({middle}, {blocks}), [{rows}, {columns}])"
    later = Text(f"{(*more[:len(more) - o.attr('given', False)], x)[0].at(SUM)} - {m}", SUM)
    return later if o.kind == "from_middle" else Text(f"tl.where({i} // {size} % 2 == 1, {later}, {m} - {x.at(SUM + 1)})")


@rule("decayed_blocks")
def decayed_blocks(w: KernelWriter, o: Op, p: Text, x: Text, sums: Text, *more: Text) -> Text:
    """A call of a device function, with the middle rows."""
    given, size = bool(o.attr("given")), o.attr("size")
    before = (*more[:len(more) - given], sums)[0]
    middles = more[-1] if given else f"block_middles({sums}, {size})"
    limit = None if isinf(o.attr("limit")) else o.attr("limit")
    options = f"{size}, {limit}, {bool(o.attr('transposed'))}, {w.use('OPERAND')}"
    return Text(f"decayed_blocks({p}, {x}, {sums}, {before}, {middles}, {options})")
