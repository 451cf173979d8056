"""descriptors: tiles of rows that are read by a descriptor of their sequence.

A unit that copies by descriptors (TMA) takes addresses and the end of the sequence upon itself, so that threads need neither.
With `descriptors` the loads of a walk are marked that may go that way.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Op, Program, map_loops, map_ops
from ...schedule.schedule import Schedule
from ..stage import takes


@takes("assigned")
def descriptors(p: Program, s: Schedule) -> Program:
    """`p` with marks at loads in loops over chunks."""
    if not s.descriptors:
        return p
    def marked(k: Kernel, o: Op) -> Op:
        return o.with_attrs(described=True) if o.kind == "load" and p.describes(k, o) else o

    def each(k: Kernel) -> Kernel:
        return replace(k, body=map_loops(k.body, lambda s: [
            replace(s, body=map_ops(s.body, lambda o: [marked(k, o)])) if s.index == "chunk" else s]))

    return p.map_kernels(each)
