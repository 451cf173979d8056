"""heads_per_block: instances that a thread block runs side by side.

A kernel over chunks that has one value a token and head, and no tile, gives a block too little to do: it waits for its loads,
each of which takes one number of a row of heads. There a block takes as many value heads as the device says. What an instance
does stays as it was.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir.core import Kernel, Op, Program
from ...ir.ops import OPS
from ..stage import takes

KINDS = ("const", "scalar", "full", "valid", "cumsum", "last")


@takes("assigned")
def heads_per_block(p: Program, device: Device) -> Program:
    """`p` with such kernels marked, where `device` takes several instances."""
    return p.map_kernels(lambda k: replace(k, heads_per_block=device.heads_per_block) if _narrow(p, k) else k)


def _narrow(p: Program, k: Kernel) -> bool:
    """Whether all that happens is: loads of one value a token and value head, ops on such values and on numbers, stores to
    workspaces."""
    def fits(o: Op) -> bool:
        if o.kind in ("load", "store"):
            t = p.tensor(o.attr("tensor"))
            lies = t.index == "token" and len(t.dims) == 1 if o.kind == "load" else t.index == "slot" and len(t.dims) <= 1
            return lies and t.heads == "HV" and not t.optional
        return o.type is not None and o.type.rank <= 1 and (OPS[o.kind].elementwise or o.kind in KINDS)

    return k.grid == "chunks" and not k.split and all(isinstance(o, Op) and fits(o) for o in k.body)
