"""decay_bound: computes, for each chunk, the log of an upper bound on how much of the state survives it.

`partition="decay"` and `"short"` need it. The page bounds, for each token, the log of how much of the state survives
(`forgets`). This pass adds the bound of the chunk, and `cut` stores it. With other schedules the pass drops the bound and the ops
that only it needs.

A page may bound each channel (row of the state) on its own: `forgets` is then a tile [C, K]. How these make one number follows
from how the next state depends on the state:
- If ops are elementwise on the state, as in Diag(exp(g)) S, each channel keeps to itself. The bound is the largest of the sums
  over the chunk, that of the slowest channel.
- If products lead from the state to the next one, as in (I - k k^T) Diag(exp(g)) S, what is left may go from one channel to
  another with each token. The norm of a token's factor is bounded by its own slowest channel. The bound is the sum over the
  chunk of these.
These bounds read whole tiles. So they come first, and what only they read leaves its place in shared memory to later tiles.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Op, Program, Stmt
from ...ir.decays import channels_apart
from ...schedule.schedule import Schedule, ScheduleError
from ..algebra.clamp_decay import FLOOR
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def decay_bound(p: Program, s: Schedule) -> Program:
    """`p` whose `forgets` names the bound of a chunk, a number, or "". Raises ScheduleError if the schedule needs a bound and the
    page has none."""
    if s.warms_up and not p.forgets:
        raise ScheduleError(f"schedule {s.name}: partition={s.partition!r} needs a page that bounds how a token changes the "
                            f"state, carried(..., forgets=NAME), which {p.name} does not have; accepted for it are None and "
                            "'exact'")
    if not s.warms_up:
        return with_walk_body(replace(p, forgets=""), p.walk.body)
    b = walk_body(p)
    for o in p.walk.body:
        assert isinstance(o, Op)
        b.copy(o)
    name, channels = f"{p.forgets}_chunk", b.types[p.forgets].dims[1:]
    within = channels[0] if channels and channels[0] in dict(p.extents) else None
    if channels and channels_apart(p):
        sums = b.op("cumsum", _inert(p.forgets, b), least=FLOOR)  # often a sum of the page; exp(FLOOR) rounds to 0
        total = b.op("row_max", b.op("last", sums), name=b.fresh(name), within=within)
    else:
        bound = b.op("row_max", p.forgets, within=within) if channels else p.forgets
        total = b.op("last", b.op("cumsum", _inert(bound, b)), name=b.fresh(name))
    body = b.finish()
    return with_walk_body(replace(p, forgets=total), _first(body, total))


def _first(body: tuple[Stmt, ...], name: str) -> tuple[Stmt, ...]:
    """`body` in which the ops that `name` depends on come before the others, after all loads, which run side by side, if they
    have maxima over channels."""
    needed, kinds = {name}, set[str]()
    for o in reversed(body):
        assert isinstance(o, Op)
        if o.out in needed:
            needed |= set(o.args)
            kinds.add(o.kind)
    if "row_max" not in kinds:
        return body
    return tuple(sorted(body, key=lambda o: isinstance(o, Op) and o.kind != "load" and (1 + (o.out not in needed))))


def _inert(x: str, b: Body) -> str:
    """`x` with zeros past the sequence's end, which add nothing to a sum."""
    made = next(o for o in b.finish() if isinstance(o, Op) and o.out == x)
    filled = made.kind == "load" and b.tensors[made.attr("tensor")].index == "token"
    return x if filled or made.kind == "valid" else b.op("valid", x)
