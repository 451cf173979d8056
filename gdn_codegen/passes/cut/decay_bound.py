"""decay_bound: computes, for each chunk, the log of an upper bound on how much of the state survives it.

`partition="decay"` needs it. The page bounds, for each token, the log of how much of the state survives (`forgets`). This pass
adds the sum over the chunk, and `cut` stores it. With other schedules the pass drops the bound and the ops that only it needs.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Op, Program
from ...schedule.schedule import Schedule, ScheduleError
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def decay_bound(p: Program, s: Schedule) -> Program:
    """`p` whose `forgets` names the sum over a chunk, or "". Raises ScheduleError if the schedule needs a bound and the page
    has none."""
    if s.partition == "decay" and not p.forgets:
        raise ScheduleError(f"schedule {s.name}: partition='decay' needs a page that bounds how a token changes the state, "
                            f"carried(..., forgets=NAME), which {p.name} does not have; accepted for it are None and 'exact'")
    if s.partition != "decay":
        return with_walk_body(replace(p, forgets=""), p.walk.body)
    b, kinds = walk_body(p), {}
    for o in p.walk.body:
        assert isinstance(o, Op)
        kinds[o.out] = o.kind
        b.copy(o)
    inert = p.forgets if kinds[p.forgets] in ("load", "valid") else b.op("valid", p.forgets)
    total = b.op("last", b.op("cumsum", inert), name=b.fresh(f"{p.forgets}_chunk"))
    return with_walk_body(replace(p, forgets=total), b.finish())
