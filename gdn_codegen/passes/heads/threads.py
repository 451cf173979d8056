"""heads_by_threads: batches value heads by the threads of a block. For TileLang.

It applies to kernels over chunks that only handle one number per token and head, without tiles. One head gives a block too little
work: the block waits for loads, each of which takes one number of a row of heads. With several heads, neighbouring threads load
neighbouring numbers. The ops of an instance do not change.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir.core import Kernel, Op, Program
from ...ir.ops import OPS
from ...ir.types import Batch
from ...schedule.schedule import Schedule
from ..stage import takes
from .number import heads

KINDS = ("const", "scalar", "full", "valid", "cumsum")


@takes("assigned")
def heads_by_threads(p: Program, s: Schedule, device: Device) -> Program:
    """`p` with several heads in a block of such kernels, as many as the device says."""
    n = heads(s, device, "threads")
    return p.map_kernels(lambda k: replace(k, batch=Batch(n, "threads")) if n > 1 and _narrow(p, k) else k)


def _narrow(p: Program, k: Kernel) -> bool:
    """Whether `k` has only loads of one number per token and value head, ops on vectors and numbers, and stores of these to
    workspaces."""
    def fits(o: Op) -> bool:
        if o.kind in ("load", "store"):
            t = p.tensor(o.attr("tensor"))
            lies = t.index == "token" and len(t.dims) == 1 if o.kind == "load" else t.index == "slot" and len(t.dims) <= 1
            return lies and t.heads == "HV" and not t.optional
        return o.type is not None and o.type.rank <= 1 and (OPS[o.kind].elementwise or OPS[o.kind].entry or o.kind in KINDS)

    return k.grid == "chunks" and k.batch.heads == 1 and not k.blocked_dim and all(isinstance(o, Op) and fits(o) for o in k.body)
