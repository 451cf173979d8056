"""mbarriers: derives the waits among warp groups. For walks on Hopper under TileLang (sm_90a).

A ring has two barriers for each slot. On "ready", the producer's threads arrive after they have written the slot. On "free",
the readers' threads arrive after they have read it. Rings with the same producer, readers and number of slots share barriers.
If one agent overwrites in a slot what another agent wrote, the slot is ready twice an iteration. It is free when the readers of
the last value are done.

A reader waits before its first read and arrives after its last one. The producer waits before its first write, for the slot's
readers of `slots` iterations before. A fence comes before the arrival where a product or a store to tokens reads values that
threads wrote. This includes loads of tokens, because threads fill up the last chunk of a sequence. One comes before the
arrival at "free", too, where threads have written what a copy unit overwrites. Barriers of rings that are filled only outside
warm-ups count only those iterations. Values that lead to an inverse have separate barriers, because they are read ahead of
others. So have rings that an agent frees at different points between its products, where its last products run to the end of
the iteration: their loads then begin early. An asynchronous product is drained before its result is read, or at the end of the
iteration if the next one reads it; products that began later may go on (`but`). A signal to stores that would end an iteration
comes in the next one, behind such a product. In a kernel with a loop over items, the rings of that loop have barriers of their
own, which count items. Those of the walk count its iterations in all items.

Then the pass removes what is not needed (`needed_barriers`).

Example, for a ring k of two slots:
    loader:  wait k_free, of two iterations before; k = load; signal k_ready
    state:   wait k_ready; y = x @ k; signal k_free
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

from ...devices import Groups
from ...ir.core import Buffer, Kernel, Op, Program, loops, map_ops
from ...prove.happens_before import RaceError
from ...prove.rings import BARRIER, check_ring
from ..agents.products_end import Ends
from ..agents.tasks import INVERSE, leads
from ..stage import takes
from .early_tails import early_tails
from .late_signals import late_place
from .needed_barriers import needed
from .ring_accesses import by_threads, by_units, of_one_warp, own_part, reads, sync, written_over
from .warp_barriers import around_runs, with_warp_barriers


@takes("placed", gives="synchronised")
def mbarriers(p: Program, device: Groups) -> Program:
    """`p` with waits, signals and fences in the kernels with several agents."""
    return p.map_kernels(lambda k: _searched(p, k, device) if k.agents else k)


def _searched(p: Program, k: Kernel, device: Groups) -> Kernel:
    """The kernel with the barriers that it needs. Each try is checked without a warm-up, which takes a fraction of the time, and
    the result with warm-ups. If that fails, each try is checked with warm-ups."""
    def tried(warmed_up: bool) -> Kernel:
        def proven(k: Kernel) -> bool:
            return _proven(p, k, device, warmed_up)
        return needed(_derived(p, k, device, proven), proven)

    found = tried(warmed_up=False)
    found = found if _proven(p, found, device) else tried(warmed_up=True)
    early = early_tails(found)
    return early if _proven(p, early, device) else found


def _proven(p: Program, k: Kernel, device: Groups, warmed_up: bool = True) -> bool:
    """Whether the barriers of `k` order its accesses."""
    try:
        check_ring(p, k, device, warmed_up)
    except RaceError:
        return False
    return True


def _derived(p: Program, k: Kernel, device: Groups, proven: Callable[[Kernel], bool]) -> Kernel:
    """The kernel with all barriers. Rings share them, and signals are late, unless an agent would then wait for a value that
    the agent itself writes later."""
    made = None
    for share, late in product((True, False), (True, False)):
        before, made = made, _kernel(p, k, device, share, late)
        if made != before and proven(made):
            break
    assert made is not None
    return made


def _kernel(p: Program, k: Kernel, device: Groups, share: bool, late: bool) -> Kernel:
    """The kernel with a pair of barriers for each ring. share: rings with the same agents and slots have one pair. late: signals
    may come in the next iteration."""
    within = {o: lp.index for lp in loops(k.body) for o in lp.body if isinstance(o, Op)}
    ops = list(within)
    slots = {b.name: b.slots for b in k.buffers if b.space == device.operand}
    read, count = reads(k), {a.name: a.of_iteration for a in k.agents}
    final = {o.buffer: o for o in ops if o.buffer in slots}  # buffer -> the op that writes it last in an iteration
    given = {o.buffer: o for o in reversed(ops) if o.buffer in slots}  # buffer -> the op that writes it first
    before, after = dict[Op, list[Op]](), dict[Op, list[Op]]()
    places = {"before": before, "after": after}
    loop_ops = {lp.index: [o for o in lp.body if isinstance(o, Op)] for lp in loops(k.body)}
    ends, to_inverse, private = Ends(ops, read), leads(ops, INVERSE), of_one_warp(k, ops, read)
    groups: dict[tuple[object, ...], list[Op]] = {}
    for o in (o for o in ops if o.buffer in slots and o.buffer not in private):
        readers, last = (tuple(dict.fromkeys(r.agent for r in ops if x.out in read(r))) for x in (o, final[o.buffer]))
        freed = [ends.later_products(r) for r in ops if final[o.buffer].out in read(r) and ends.end_late(r.agent)]
        key = (within[o], o.agent, readers, last if o is given[o.buffer] else (), slots[o.buffer], o.out in to_inverse,
               min(freed, default=0), "" if share else o.out)
        groups.setdefault(key, []).append(o)
    for (where, at), over, but in ends.drained(lambda o: loop_ops[within[o]]):
        drain = sync("drain", over[0].agent, **({"but": but} if but else {}), **own_part(over))
        places[where].setdefault(at, []).append(drain)
    copied, barriers = dict[Op, dict[str, str]](), list[Buffer]()  # copied: load -> the barriers on which its copy arrives
    for writes in groups.values():
        producer, n, own = writes[0].agent, slots[writes[0].buffer], own_part(writes)
        ready, free = f"{writes[0].out}_ready", f"{writes[0].buffer}_free"
        barriers.append(Buffer(ready, BARRIER, (count[producer],), "uint64", slots=n, own=bool(own)))
        for o in writes:
            if o.kind == "load":
                copied[o] = {"channel": ready}
                if o.type is not None and o.type.rank == 2 and by_threads(p, o):
                    copied[o]["tail"] = f"{o.out}_tail"
                    barriers.append(Buffer(f"{o.out}_tail", BARRIER, (count[producer],), "uint64"))
        users = [r for r in ops if read(r) & {o.out for o in writes}]
        done = [r for r in ops if read(r) & {final[o.buffer].out for o in writes}]
        if writes[0] is given[writes[0].buffer]:
            before.setdefault(writes[0], []).append(sync("wait", producer, channel=free, back=n, **own))
            done.sort(key=ends.over)
            last_of = {r.agent: r for r in done}
            barriers.append(Buffer(free, BARRIER, (sum(count[c] for c in last_of),), "uint64", slots=n, own=bool(own)))
            for c, r in last_of.items():
                where, at = ends.place(r, loop_ops[within[r]])
                fence = [sync("fence", c, **own)] if any(written_over(o, c, ops) for o in writes) else []
                places[where].setdefault(at, []).extend([*fence, sync("signal", c, channel=free, **own)])
        fenced = {o.out for o in writes if by_threads(p, o)}
        at, when = late_place(ops, writes[-1], users, n) if late else (writes[-1], {})
        if any(by_units(p, r) and read(r) & fenced for r in users):
            after.setdefault(at, []).append(sync("fence", producer, **own, **when))
        after.setdefault(at, []).append(sync("signal", producer, channel=ready, **own, **when))
        for c, r in {r.agent: r for r in reversed(users)}.items():
            before.setdefault(r, []).append(sync("wait", c, channel=ready, **own))
    before, after = around_runs(loops(k.body), before, after)

    def synchronised(o: Op) -> Iterable[Op]:
        return (*before.get(o, []), o.with_attrs(**copied[o]) if o in copied else o, *after.get(o, []))

    return with_warp_barriers(replace(k, buffers=(*k.buffers, *barriers), body=map_ops(k.body, synchronised)), set(slots))
