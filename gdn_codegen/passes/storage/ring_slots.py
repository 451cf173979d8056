"""ring_slots: fits the slots of rings into shared memory. `rings` uses it. For walks on Hopper under TileLang (sm_90a).

Where rings do not fit, a loaded value that leads to no next carried value has one slot. It is read last, so that it is loaded
while the iteration computes the carried value. Where agents run iterations in turn, all rings have fewer slots, but one for each
turn: otherwise a warp could wait for a phase of a slot before it has seen the phase before. Kernels with sums of tiles have
further slots where there is room.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...ir.core import Kernel, Loop
from ...schedule.schedule import ScheduleError
from .ring_bytes import loaded, shared_bytes


def with_room(k: Kernel, loop: Loop, sums: bool, device: Groups) -> Kernel:
    """`k` with slots that fit, if any do. loop: the walk. sums: whether agents sum tiles. ScheduleError for fewer iterations that
    loads run ahead than turns."""
    turns = max(a.turns for a in k.agents)
    stages = max((b.slots for b in k.buffers if b.name in loaded(k)), default=turns)
    if stages < turns:
        raise ScheduleError(f"kernel {k.name}: stages={stages}; accepted with agents of {turns} turns: {turns} or more")
    if turns > 1:
        return _shortened(k, turns, device)
    if not _fits(k, device):
        return _narrowed(k, loop)
    return _widened(k, loop, device) if sums else k


def _fits(k: Kernel, device: Groups) -> bool:
    return shared_bytes(k, device) <= device.spaces[device.operand]


def _narrowed(k: Kernel, loop: Loop) -> Kernel:
    """`k` with one slot in each ring of a load that leads to no next carried value."""
    first = {c.next for c in loop.carried}
    for o in reversed(loop.ops):
        first |= set(o.args) if o.out in first else set()
    last = {o.buffer for o in k.ops if o.kind == "load" and o.out not in first}
    return replace(k, buffers=tuple(replace(b, slots=1) if b.name in last else b for b in k.buffers))


def _shortened(k: Kernel, turns: int, device: Groups) -> Kernel:
    """`k` with as many slots in each ring as fit, at most what it has, and at least one for each turn."""
    for most in range(max(b.slots for b in k.buffers), turns - 1, -1):
        k = replace(k, buffers=tuple(replace(b, slots=min(b.slots, most)) for b in k.buffers))
        if _fits(k, device):
            break
    return k


def _widened(k: Kernel, loop: Loop, device: Groups) -> Kernel:
    """`k` with a further slot in rings of loads, as far as there is room: first in those that are read last, because the next
    iteration waits for them."""
    last = {a: n for n, o in enumerate(loop.ops) for a in o.args}
    for o in sorted((o for o in loop.ops if o.kind == "load"), key=lambda o: -last.get(o.out, 0)):
        wider = replace(k, buffers=tuple(replace(b, slots=b.slots + 1) if b.name == o.out else b for b in k.buffers))
        k = wider if _fits(wider, device) else k
    return k
