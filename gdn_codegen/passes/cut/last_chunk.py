"""last_chunk: a walk whose next states depend on no state runs its last iteration only. All targets run it.

Each iteration replaces what the iteration before has made, so that only the last one counts. A walk that also stores tiles of
tokens runs all of its iterations.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Loop, Op, Program, map_loops
from ..stage import takes


@takes("cut")
def last_chunk(p: Program) -> Program:
    """`p` with loops over the last chunk in place of such walks."""
    return p.map_kernels(lambda k: k if k.grid != "sequences" else replace(k, body=map_loops(
        k.body, lambda lp: [replace(lp, index="last") if _only_last(lp) else lp])))


def _only_last(lp: Loop) -> bool:
    """Whether the last iteration of a walk makes all results."""
    reached = {c.name for c in lp.carried}
    for o in lp.ops:
        if o.kind == "store":
            return False
        reached |= {o.out} if isinstance(o, Op) and reached & set(o.args) else set()
    return lp.index == "chunk" and lp.step > 0 and bool(lp.carried) and not reached & {c.next for c in lp.carried}
