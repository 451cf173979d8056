"""descriptors: marks loads that may use a tensor descriptor. For Triton (TMA on Hopper), with the option `descriptors`.

A copy unit that uses descriptors computes addresses and checks the end of the sequence itself. Threads then do neither.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Op, Program, map_loops, map_ops
from ...ir.verify import describes
from ...schedule.schedule import Schedule
from ..stage import takes


@takes("assigned")
def descriptors(p: Program, s: Schedule) -> Program:
    """`p` with the mark `described` on such loads in loops over chunks. `p` itself if the schedule does not ask for it."""
    if not s.descriptors:
        return p
    def marked(k: Kernel, o: Op) -> Op:
        return o.with_attrs(described=True) if o.kind == "load" and describes(p, k, o) else o

    def each(k: Kernel) -> Kernel:
        return replace(k, body=map_loops(k.body, lambda s: [
            replace(s, body=map_ops(s.body, lambda o: [marked(k, o)])) if s.index == "chunk" else s]))

    return p.map_kernels(each)
