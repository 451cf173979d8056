"""if_declined: lets a build run only where another one has declined the call. For Hopper's warp groups under TileLang (sm_90a).

A build with `partition="short"` may find that the gates forget too slowly for it. It then writes no result, and sets a counter.
The build of this pass comes after it, in the same call and with the same counter. All its kernels end at once if that is zero.
The host knows nothing of this, so that it need not wait for the device. Programmatic dependent launch does not change it: the
first kernel of a build starts, or its blocks wait first, after all work before it. Blocks of kernels that start early read the
counter before they let the next kernel start, so that none reads it after the call.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device, Groups
from ...ir.core import Op, Program, loops
from ...schedule.schedule import Schedule, ScheduleError
from ..common import with_tensors
from ..stage import takes
from .parts import counter


@takes("cut")
def if_declined(p: Program, s: Schedule, device: Device) -> Program:
    """`p` whose kernels end at once if the counter is zero, if the schedule asks for it. ScheduleError on devices without warp
    groups, and for programs without a state."""
    if not s.if_declined:
        return p
    states = [c.name for k in p.kernels for lp in loops(k.body) for c in lp.carried]
    if not isinstance(device, Groups) or not states:
        raise ScheduleError(f"schedule {s.name}: if_declined=True for {p.name} on {device.name}; accepted: False")
    declined = counter(p, states[0])
    end = Op("return_if_zero", "", (), (("tensor", declined.name),))
    return with_tensors(p.map_kernels(lambda k: replace(k, body=(end, *k.body))), declined)
