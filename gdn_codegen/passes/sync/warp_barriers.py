"""warp_barriers: lets the threads of a warp that runs iterations in turn wait for each other. A part of `mbarriers`.

Threads of a warp need not be in step. A barrier of the warp comes before an op that reads a buffer in shared memory which the
warp has written since its last barrier, and before one that writes a buffer which it has read or written since then, in the
iteration before too. Ops that compute pieces of columns together form a
run, and synchronisation stands before or after it.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from ...ir.core import Kernel, Loop, Op, loops, map_ops
from ...ir.ops import BY_COLUMNS
from .ring_accesses import reads


def around_runs(loops: Iterable[Loop], before: dict[Op, list[Op]], after: dict[Op, list[Op]]
                ) -> tuple[dict[Op, list[Op]], dict[Op, list[Op]]]:
    """What comes before and after ops, outside of runs of ops that compute pieces of columns together."""
    out: tuple[dict[Op, list[Op]], dict[Op, list[Op]]] = {}, {}
    for run in (run for lp in loops for agent in dict.fromkeys(o.agent for o in lp.ops) for run in _runs(lp, agent)):
        for given, end, moved in ((before, run[0], out[0]), (after, run[-1], out[1])):
            if some := [x for o in run for x in given.get(o, [])]:
                moved[end] = some
    return out


def _runs(lp: Loop, agent: str) -> Iterator[list[Op]]:
    """The agent's ops in a loop, without expressions, those that compute pieces of columns together as one list."""
    mine = [o for o in lp.body if isinstance(o, Op) and o.agent == agent and (o.buffer or not o.out)]
    for pieces, run in groupby(mine, lambda o: bool(o.attr(BY_COLUMNS))):
        some = list(run)
        yield from [some] if pieces else ([o] for o in some)


def with_warp_barriers(k: Kernel, shared: Collection[str]) -> Kernel:
    """The kernel with these barriers. shared: the buffers in shared memory."""
    before: set[Op] = set()
    for a in (a for a in k.agents if a.turns > 1):
        for lp in loops(k.body):
            before |= _needed(k, lp, a.name, shared)
    if not before:
        return k

    def each(o: Op) -> list[Op]:
        return [Op("warp_barrier", "", agent=o.agent), o] if o in before else [o]
    return replace(k, body=map_ops(k.body, each))


def _needed(k: Kernel, lp: Loop, agent: str, shared: Collection[str]) -> set[Op]:
    """The ops of a loop before which the agent's warps need a barrier. The search goes round the loop twice."""
    read, home = reads(k), {o.out: o.buffer for o in k.ops if o.buffer in shared}
    out: set[Op] = set()
    written, used = set[str](), set[str]()
    for run in [*_runs(lp, agent)] * 2:
        sources = {home[x] for o in run for x in read(o) if x in home}
        targets = {o.buffer for o in run} & set(shared)
        if sources & written or targets & (written | used):
            out.add(run[0])
            written, used = set(), set()
        used |= sources
        written |= targets
    return out
