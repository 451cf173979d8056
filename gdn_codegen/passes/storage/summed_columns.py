"""summed_columns: the fragments of which a warp holds whole columns (layout "columns"). `layouts` uses it.

Sums of columns then cross no warps and need no barrier. In the order that TileLang's compiler chooses a warp holds some rows, and
a sum over 256 threads has six barriers. A fragment can have this layout if only loops over entries fill and read it, and all
fragments that they connect have it. A product, or a sum of rows, has an order of its own.
"""
from __future__ import annotations

from ...devices import Device
from ...ir.core import Kernel, Op
from ...ir.ops import OPS
from ...ir.types import COLUMNS_OF_A_THREAD, WARP


def by_columns(k: Kernel, device: Device) -> set[str]:
    """The names of these buffers of a kernel over chunks."""
    shape, connected, fixed, summed = _fragments(k, device)
    return {n for group in connected for n in group if group & summed and not group & fixed
            and len({shape[x] for x in group}) == 1 and _fits(*shape[n], k.threads)}


def of_products(k: Kernel, device: Device) -> set[str]:
    """The names of the fragments of a kernel over chunks that results of products are, or that loops over entries connect with
    one. They lie as the product does."""
    results = {o.buffer for o in k.ops if o.kind == "matmul"}
    return {n for group in _fragments(k, device)[1] if group & results for n in group} | results


def _fragments(k: Kernel, device: Device) -> tuple[dict[str, tuple[int, int]], list[set[str]], set[str], set[str]]:
    """The shapes of a kernel's fragments; those that loops over entries connect, as sets; those that other ops fill or read; and
    those whose columns are summed. None in walks, and in kernels with several agents."""
    shape = {b.name: (b.shape[0], b.shape[1]) for b in k.buffers
             if b.space == device.tile and len(b.shape) == 2 and isinstance(b.dims[0], str)}
    summed, fixed, connected = set[str](), set[str](), list[set[str]]()
    if k.agents or k.grid != "chunks":
        return shape, connected, fixed, summed
    defs = {o.out: o for o in k.ops if o.out}

    def read_by(n: str) -> set[str]:
        """The fragments that a reader of the value `n` reads. A value without a buffer is an expression."""
        o = defs[n]
        return {o.buffer} & set(shape) if o.buffer else set[str]().union(*map(read_by, o.args))

    for o in k.ops:
        read = set[str]().union(*map(read_by, o.args))
        if o.kind == "column_sum":
            summed |= read
        elif _of_entries(o):
            connected = _joined(connected, read | {o.buffer} & set(shape))
        else:
            fixed |= read | {o.buffer} & set(shape)
    return shape, connected, fixed, summed


def _of_entries(o: Op) -> bool:
    """Whether the op is a loop over entries, or part of one."""
    return OPS[o.kind].elementwise or o.kind in ("valid", "load", "store", "move")


def _joined(groups: list[set[str]], new: set[str]) -> list[set[str]]:
    """The groups, of which those that share something with `new` are one."""
    met = [g for g in groups if g & new]
    return [*(g for g in groups if not g & new), new.union(*met)] if new else groups


def _fits(rows: int, columns: int, threads: int) -> bool:
    """Whether so many threads hold such a tile, each warp equally many columns, and each thread equally many rows of some."""
    each, rest = divmod(columns, max(threads // WARP, 1))
    entries = WARP * COLUMNS_OF_A_THREAD  # of a warp at a time
    return not rest and each % COLUMNS_OF_A_THREAD == 0 and not entries % each and not rows % (entries // each)
