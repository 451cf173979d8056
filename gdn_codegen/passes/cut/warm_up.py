"""warm_up: what a walk leaves out in a warm-up.

In a grid over parts a walk may start some chunks before its part, for its state alone. With `warm_up="state"` the ops that do not
lead to the next carried value are marked `own_part`: they do nothing in the iterations of the warm-up.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Loop, Op, Program, map_loops
from ...ir.ops import OWN_PART
from ...schedule.schedule import Schedule
from ..stage import takes


@takes("assigned")
def warm_up(p: Program, s: Schedule) -> Program:
    """`p` with marks in the loops that may have a warm-up."""
    if s.warm_up == "all":
        return p
    return p.map_kernels(lambda k: replace(k, body=map_loops(k.body, _marked)))


def _marked(loop: Loop) -> list[Loop]:
    """The loop; ops that the carried value does not depend on are marked as the part's own, so that warm-ups leave them out."""
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
