"""warm_up: marks the ops that a walk skips during a warm-up. For Triton, and for Hopper's warp groups.

In a grid over parts, a walk may start some chunks before its part to compute the state only. With `warm_up="state"`, the ops on
which the next carried value does not depend get the attribute `own_part`. They do nothing in the iterations of the warm-up.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Loop, Op, Program, map_loops
from ...ir.ops import OWN_PART
from ...schedule.schedule import Schedule
from ..stage import takes


@takes("assigned")
def warm_up(p: Program, s: Schedule) -> Program:
    """`p` with marks in the loops that may have a warm-up. `p` itself with `warm_up="all"`."""
    if s.warm_up == "all":
        return p
    return p.map_kernels(lambda k: replace(k, body=map_loops(k.body, _marked)))


def _marked(loop: Loop) -> list[Loop]:
    """The loop with `own_part` on the ops that the carried value does not depend on. Other loops stay as they are."""
    if not loop.warm_up or loop.index != "chunk":
        return [loop]
    needed = {c.next for c in loop.carried}
    body: list[Op] = []
    for o in reversed(loop.body):
        assert isinstance(o, Op)
        if o.out in needed:
            needed |= set(o.args)
        else:
            o = o.with_attrs(**{OWN_PART: True})
        body.append(o)
    return [replace(loop, body=tuple(reversed(body)))]
