"""by_length: starts the walks of the longest sequences first. For Hopper's warp groups under TileLang (sm_90a).

If there are more walks than the GPU runs at a time, the last one to start decides when all are done. In the order of a pack that
may be the longest. So an instance takes the sequence whose rank by length is the number of the instance. It finds it from
`cu_seqlens`, which is on the device. Results do not depend on the order.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Program, loops
from ...schedule.schedule import Schedule
from ..stage import takes


@takes("placed")
def by_length(p: Program, s: Schedule) -> Program:
    """`p` with that order in its walks over sequences, if the schedule asks for it."""
    def walks(k: Kernel) -> bool:
        return k.grid == "sequences" and any(x.index == "chunk" for x in loops(k.body))
    return p.map_kernels(lambda k: replace(k, by_length=s.by_length and walks(k)))
