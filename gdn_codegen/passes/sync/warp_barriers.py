"""warp_barriers: lets the threads of a warp that runs iterations in turn wait for each other. A part of `mbarriers`.

Threads of a warp need not be in step. A barrier of the warp comes before an op that reads a buffer in shared memory which the
warp has written since its last barrier, and before one that writes a buffer which it has read or written since then. The last
ops of an iteration come before the first ones of the warp's next iteration. Ops that compute pieces of columns together form a
run, and synchronisation stands before or after it.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, loops, map_ops
from ...ir.ops import BY_COLUMNS
from .ring_accesses import reads


def around_runs(ops: Sequence[Op], before: dict[Op, list[Op]], after: dict[Op, list[Op]]
                ) -> tuple[dict[Op, list[Op]], dict[Op, list[Op]]]:
    """What comes before and after ops, such that it comes before and after a run of ops that compute pieces of columns together.

    ops: of a loop."""
    first, last = _ends(ops)
    out: tuple[dict[Op, list[Op]], dict[Op, list[Op]]] = {}, {}
    for given, end, moved in ((before, first, out[0]), (after, last, out[1])):
        for o in (o for o in ops if o in given):
            moved.setdefault(end.get(o, o), []).extend(given[o])
    return out


def _ends(ops: Sequence[Op]) -> tuple[dict[Op, Op], dict[Op, Op]]:
    """For ops that compute pieces of columns: the first and the last of their run, without expressions."""
    first, last, run = dict[Op, Op](), dict[Op, Op](), dict[str, list[Op]]()
    for o in (o for o in ops if o.buffer or not o.out):
        mine = run.setdefault(o.agent, [])
        if o.attr(BY_COLUMNS):
            mine.append(o)
            first[o] = mine[0]
            last.update(dict.fromkeys(mine, o))
        else:
            mine.clear()
    return first, last


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
    """The ops of a loop before which the agent's warps need a barrier."""
    read, home = reads(k), {o.out: o.buffer for o in k.ops if o.buffer in shared}
    out: set[Op] = set()
    first, _ = _ends([o for o in lp.body if isinstance(o, Op)])
    written, used = set[str](), set[str]()
    for o in (*lp.body, *lp.body):  # twice, since the warp's next iteration comes after this one
        if not isinstance(o, Op) or o.agent != agent or not (o.buffer or not o.out):
            continue
        sources = {home[x] for x in read(o) if x in home}
        target = {o.buffer} & set(shared)
        if sources & written or target & (written | used):
            out.add(first.get(o, o))
            written, used = set(), set()
        used |= sources
        written |= target
    return out
