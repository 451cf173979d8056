"""synchronise: derives every wait. For devices with cores (PTO).

Two ops that access the same bytes must run in program order if one of them writes. Where neither pipes nor earlier waits
guarantee this, the pass adds a signal after the first op and a wait before the second:
- They go into the innermost body that contains both ops. An op inside an inner loop is represented there by that loop.
- If the second op is in a later iteration than the first, the wait takes the signal of an earlier iteration. That is the
  previous one, or with storage of several slots the one that used the same slot. As many signals come before the loop, to prime
  it. As many waits come after the loop, to take the last signals.
- Two ops of one unordered pipe have a barrier between them instead.

Of several earlier ops, the pass waits for the latest first, because this wait often covers the others (vector clocks). A wait
in a loop for an op before the loop may be covered by waits that later iterations need. A barrier may be covered by one that is
found later. The pass removes such waits and barriers at the end. The first traversal finds nearly all waits in a part of the
trace. Those after it traverse the whole trace with the waits of the one before, until nothing is missing.

Within an agent, a signal goes from pipe to pipe and has an event id. Between agents, it goes from a pipe to an agent, whose
issuer waits, and uses a counter. Signals share an id only if each is set after the wait for the one before. If a pair for
storage with several slots sets its id before that wait, it uses as many ids in turn as there are slots. If no id is free, a
barrier over the agent makes one free (`event_ids`).

The cores of an agent run the same ops. Where one stores to global memory that another may still be loading, they wait for each
other (`core_joins`).

On a device with one agent, the target's compiler orders memory on the chip. There the pass adds barriers before ops that read
global memory which the threads of their own instance have written (`own_writes`).

Example, with a load on the pipe MTE2 and an exp on the pipe V:
    before:  x = load; y = exp(x)
    after:   x = load; signal from MTE2 to V; wait on V for MTE2; y = exp(x)
"""
from __future__ import annotations

from collections.abc import Sequence

from ...devices import Cores, Device
from ...ir.core import Kernel, Program
from ...schedule.schedule import ScheduleError
from ..stage import takes
from .accesses import Path, accesses
from .core_joins import core_joins
from .event_ids import number
from .insert import inserted
from .own_writes import own_writes
from .trace import Trace
from .traversal import Traversal
from .waits import Pair, Place, Waits

#: How often barriers over agents are added to make event ids free.
MOST = 63


@takes("placed", gives="synchronised")
def synchronise(p: Program, device: Device) -> Program:
    """`p` with signals, waits and barriers. Raises ScheduleError if flags or event ids do not suffice."""
    if not isinstance(device, Cores):
        return own_writes(p)
    return p.map_kernels(lambda k: _kernel(p, core_joins(p, k, device), device))


def _kernel(p: Program, k: Kernel, device: Cores) -> Kernel:
    """The kernel with its waits. Barriers over an agent are added until event ids suffice."""
    trace, name = Trace(k, device, accesses(p, k, device)), f"{p.name}, kernel {k.name}"
    drains: dict[Place, list[str]] = {}
    for _ in range(MOST + 1):
        found = derive(trace, drains)
        full = number(found, name)
        if not full:
            return inserted(trace, found.waits)
        if any(agent in drains.get(place, []) for agent, place in full.items()):
            break
        for agent, place in full.items():
            drains.setdefault(place, []).append(agent)
    raise ScheduleError(f"{name}: its pipes need more than the {device.events} event ids of a pair of pipes, even with barriers "
                        "that make ids free; cut the values into more kernels")


def derive(trace: Trace, drains: dict[Place, list[str]]) -> Traversal:
    """The traversal of a trace with all waits that it needs, and none that others cover. drains: barriers over agents that the
    kernel has in any case."""
    first = Traversal(trace, Waits(drains))
    first.run(trace.first_steps)
    found = Traversal(trace, first.waits)
    while not found.run():
        found = Traversal(trace, found.waits)
    found = _shorter(found, [x for x in found.waits.pairs if x.wait in trace.loops])
    return _shorter(found, sorted(found.waits.pipe_barriers - found.needed))


def _shorter(found: Traversal, covered: Sequence[Pair | Path]) -> Traversal:
    """The traversal without those of `covered` that other waits cover. covered: pairs and places of barriers, tried in order.

    If all accesses stay ordered without several, they stay ordered without any of them. So several are left out at once: first
    all, then half of them, or all before the one that is missed.
    """
    while covered:
        n, fails = len(covered), 0  # how many are left out; the least number of which one is needed
        while n:
            other = Traversal(found.trace, found.waits.without(covered[:n]), adds=False)
            if other.run():
                found = other
                break
            ends = [x.ends if isinstance(x, Pair) else x for x in covered[:n]]
            fails, n = n, max(ends.index(other.missing) if other.missing in ends else 0, (n + 1) // 2 if n > 1 else 0)
        covered = covered[n + (fails == n + 1):]
    return found
