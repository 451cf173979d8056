"""heads_by_key_head: batches value heads of one key head. For TileLang.

It applies to kernels over chunks that have products. The number of heads must divide HV / H. Ops that depend on the key head
only are done once. Ops with a long latency (loads, sums, inverses) are done for all heads in a row, so that their waits
overlap. All other ops are done head by head, so that few values are live at a time.

Example, with two heads:
    before:  k = load k; x = k @ k.T; b = load beta; A = b * x; T = diag_inverse(A)
    after:   k = load k; x = k @ k.T; b = load beta; b_h1 = load beta (head 1); A = b * x; A_h1 = b_h1 * x;
             T = diag_inverse(A); T_h1 = diag_inverse(A_h1)
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...devices import Device
from ...ir.core import Kernel, Op, Program
from ...ir.ops import OF_ROWS
from ...ir.types import Batch
from ...schedule.schedule import Schedule
from ..stage import takes
from .copies import copies
from .number import heads

WAITS = ("load", "cumsum", *OF_ROWS, "diag_inverse")


@takes("assigned")
def heads_by_key_head(p: Program, s: Schedule, device: Device) -> Program:
    """`p` with several value heads of a key head in an instance of such kernels, as many as the schedule or the device says."""
    n = heads(s, device, "key_head")

    def batched(k: Kernel) -> Kernel:
        ops = [o for o in k.body if isinstance(o, Op)]
        if not _fits(k, ops):
            return k
        body = copies(ops, n, _of_key_head(p, ops), lambda o: o.kind in WAITS)
        return replace(k, batch=Batch(n, "key_head"), body=tuple(body))

    return p.map_kernels(batched) if n > 1 else p


def _fits(k: Kernel, ops: Sequence[Op]) -> bool:
    """Whether `k` is a kernel over chunks with products and without loops."""
    return k.grid == "chunks" and k.batch.heads == 1 and len(ops) == len(k.body) and any(o.kind == "matmul" for o in ops)


def _of_key_head(p: Program, ops: Sequence[Op]) -> set[str]:
    """The values that depend on the key head only."""
    found: set[str] = set()
    for o in ops:
        of = o.attr("tensor")
        if o.out and (not of or p.tensor(of).heads == "H") and found.issuperset(o.args):
            found.add(o.out)
    return found
