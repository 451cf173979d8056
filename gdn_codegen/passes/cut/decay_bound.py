"""decay_bound: what a chunk forgets at least, as a value of the walk.

For `partition="decay"`: the page's bound of a token, summed over the chunk. `cut` stores it in the first kernel that is
parallel over chunks. Otherwise the bound is dropped, and what only it reads.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Op, Program
from ...schedule.schedule import Schedule, ScheduleError
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def decay_bound(p: Program, s: Schedule) -> Program:
    """`p` whose `forgets` names the sum over a chunk, or nothing."""
    if s.partition == "decay" and not p.forgets:
        raise ScheduleError(f"schedule {s.name}: partition='decay' needs a page that bounds how a token changes the state, "
                            f"carried(..., forgets=NAME), which {p.name} has not; accepted for it are None and 'exact'")
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
