"""needed_barriers: removes synchronisation that a walk does not need. `mbarriers` uses it.

Each barrier, arrival, wait, fence and drain is left out in turn. It stays out if `check_rings` still proves the kernel. The only
arrival or the only wait of a barrier is not tried: without the arrival nothing ends the waits, and without the wait the barrier
orders nothing.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...ir.core import Kernel, Op, map_ops, walk
from ...prove.rings import BARRIER

#: The kind of a signal or wait, its channel and its agent.
Sync = tuple[str, str, str]


def needed(k: Kernel, proven: Callable[[Kernel], bool]) -> Kernel:
    """The kernel without unneeded synchronisation. It tries to remove barriers, then arrivals, then waits, then fences and
    drains.

    proven: whether the barriers of a kernel order its accesses.
    """
    def less(k: Kernel, drop: set[Sync]) -> Kernel:
        """The kernel without `drop` if it is proven. Otherwise `k`."""
        tried = _without(k, drop)
        return tried if proven(tried) else k

    for channel in dict.fromkeys(c for _, c, _ in _syncs(k)):
        k = less(k, {s for s in _syncs(k) if s[1] == channel})
    for kind in ("signal", "wait"):
        for s in _syncs(k):
            if s[0] == kind and any(x[:2] == s[:2] and x != s for x in _syncs(k)):
                k = less(k, {s})
    for o in [o for o in k.ops if o.kind in ("fence", "drain", "warp_barrier")]:
        tried = replace(k, body=map_ops(k.body, lambda x, o=o: [] if x is o else [x]))  # type: ignore[misc]
        k = tried if proven(tried) else k
    return k


def _sync(o: Op) -> Sync:
    return o.kind, str(o.attr("channel")), o.agent


def _syncs(k: Kernel) -> list[Sync]:
    """The signals and waits of a kernel."""
    return [_sync(o) for o in k.ops if o.kind in ("signal", "wait")]


def _without(k: Kernel, drop: set[Sync]) -> Kernel:
    """The kernel without `drop`. Barriers then count only the threads that still arrive."""
    body = map_ops(k.body, lambda o: [] if _sync(o) in drop else [o])
    threads = {a.name: a.of_iteration for a in k.agents}
    used = {o.attr(x) for o in walk(body) for x in ("channel", "tail")}
    buffers = tuple(replace(b, shape=(b.shape[0] - sum(threads[a] for kind, c, a in drop if (kind, c) == ("signal", b.name)),))
                    if b.space == BARRIER else b for b in k.buffers if b.space != BARRIER or b.name in used)
    return replace(k, body=body, buffers=buffers)
