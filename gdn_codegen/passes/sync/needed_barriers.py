"""needed_barriers: removes synchronisation that a walk does not need. `mbarriers` uses it.

Each barrier, arrival, wait, fence and drain is left out in turn. It stays out if `check_rings` still proves the kernel.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...ir.core import Kernel, Loop, Op, Program, loops, map_loops, map_ops, walk
from ...prove.happens_before import RaceError
from ...prove.rings import BARRIER, check_ring


def needed(p: Program, k: Kernel, device: Groups) -> Kernel:
    """The kernel without unneeded synchronisation. It tries to remove barriers, then arrivals, then waits, then fences and
    drains."""
    def proven(less: Kernel) -> Kernel:
        """`less` if its barriers order all agents. Otherwise `k`."""
        try:
            check_ring(p, less, device)
        except RaceError:
            return k
        return less

    syncs = [(o.kind, o.attr("channel"), o.agent) for o in walk(k.body) if o.kind in ("signal", "wait")]
    drops = [{s for s in syncs if s[1] == c} for c in dict.fromkeys(c for _, c, _ in syncs)]
    for drop in (*drops, *({s} for kind in ("signal", "wait") for s in syncs if s[0] == kind)):
        k = proven(_without(k, drop))
    for o in [o for o in walk(k.body) if o.kind in ("fence", "drain")]:
        k = proven(replace(k, body=map_ops(k.body, lambda x, o=o: [] if x is o else [x])))  # type: ignore[misc]
    return k


def with_walk(k: Kernel, loop: Loop) -> Kernel:
    """The kernel with `loop` as its walk."""
    return replace(k, body=map_loops(k.body, lambda s: [loop]))


def _without(k: Kernel, drop: set[tuple[str, str, str]]) -> Kernel:
    """The kernel without these (kind, channel, agent). Barriers then count only the threads that still arrive."""
    (loop,) = loops(k.body)
    body = tuple(o for o in loop.body if not (isinstance(o, Op) and (o.kind, o.attr("channel"), o.agent) in drop
                                              and o.kind in ("signal", "wait")))
    threads = {a.name: a.threads for a in k.agents}
    used = {o.attr("channel") for o in body if isinstance(o, Op)} | {o.attr("tail") for o in body if isinstance(o, Op)}
    gone = {(c, a): threads[a] for kind, c, a in drop if kind == "signal"
            and any(isinstance(o, Op) and (o.kind, o.attr("channel"), o.agent) == (kind, c, a) for o in loop.body)}
    buffers = tuple(replace(b, shape=(b.shape[0] - sum(n for (c, _), n in gone.items() if c == b.name),))
                    if b.space == BARRIER else b for b in k.buffers if b.space != BARRIER or b.name in used)
    return with_walk(replace(k, buffers=buffers), replace(loop, body=body))
