"""descriptors: tiles of rows that are read by a descriptor of their sequence. Requires stage "assigned"; keeps it.

A unit that copies by descriptors (TMA) takes addresses and the end of the sequence upon itself, so that threads need neither.
With `descriptors` the loads of a walk are marked that may go that way.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Loop, Op, Program
from ...schedule.schedule import Schedule


def descriptors(p: Program, s: Schedule) -> Program:
    """`p` with marks at loads in loops over chunks."""
    if not s.descriptors:
        return p
    kernels = []
    for k in p.kernels:
        def marked(o: Op) -> Op:
            if o.kind != "load" or not p.describes(k, o):
                return o
            return replace(o, attrs=tuple(sorted({**dict(o.attrs), "described": True}.items())))

        kernels.append(replace(k, body=tuple(
            replace(x, body=tuple(marked(o) if isinstance(o, Op) else o for o in x.body))
            if isinstance(x, Loop) and x.index == "chunk" else x for x in k.body)))
    return replace(p, kernels=tuple(kernels))
