"""warm_up: what a walk leaves out before its own part. Requires stage "assigned"; keeps it.

In a grid over parts a walk may begin some chunks early, for its state alone. With `early="state"` ops that do not lead to the
next carried value are marked `own`: they do nothing in those turns.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Loop, Op, Program
from ...ir.ops import OWN_PART
from ...schedule.schedule import Schedule


def warm_up(p: Program, s: Schedule) -> Program:
    """`p` with marks in the loops that may begin early."""
    if s.early == "all":
        return p
    return replace(p, kernels=tuple(replace(k, body=tuple(
        _marked(x) if isinstance(x, Loop) and x.early and x.index == "chunk" else x for x in k.body)) for k in p.kernels))


def _marked(loop: Loop) -> Loop:
    needed = {c.next for c in loop.carried}
    body: list[Op] = []
    for o in reversed(loop.body):
        assert isinstance(o, Op)
        if o.out in needed:
            needed |= set(o.args)
        else:
            o = replace(o, attrs=tuple(sorted({**dict(o.attrs), OWN_PART: True}.items())))
        body.append(o)
    return replace(loop, body=tuple(reversed(body)))
