"""single_launch: runs all kernels in one launch, for schedules with `launch="single"`. Only for devices with cores (PTO).

Each kernel but the last ends with a barrier over the whole device, for each agent. After it, every core sees what the kernel
wrote to global memory. The barrier has flags of its own: core group to cube cores, all cube cores, cube cores to core group.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores, Device
from ...ir.core import Op, Program
from ...schedule.schedule import Schedule, ScheduleError
from ..stage import takes


@takes("checked")
def single_launch(p: Program, s: Schedule, device: Device) -> Program:
    """`p` with barriers between its kernels, as one launch. `p` itself for `launch="kernels"`. Raises ScheduleError on other
    devices."""
    if s.launch == "kernels":
        return p
    if not isinstance(device, Cores):
        raise ScheduleError(f"schedule {s.name}: launch='single' needs a barrier over all cores, which {device.target} does not "
                            "have; accepted: launch='kernels'")
    barrier = tuple(Op("barrier", "", (), (("ids", device.barrier_flags), ("scope", "device")), agent=a) for a in device.agents)
    first = tuple(replace(k, body=(*k.body, *barrier)) for k in p.kernels[:-1])
    return replace(p, launch="single", kernels=(*first, *p.kernels[-1:]))
