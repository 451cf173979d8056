"""How many value heads an instance of a kernel over chunks handles, for each way."""
from __future__ import annotations

from ...devices import Device
from ...schedule.schedule import Schedule

#: Ways for which the schedule may set the number of heads.
CHOSEN = ("key_head", "interleaved")


def heads(s: Schedule, device: Device, way: str) -> int:
    """The value heads of an instance for a way: the schedule's number if it may choose one, else the device's. 1 if the device
    does not have the way."""
    given = s.value_heads if way in CHOSEN and way in device.heads else 0
    return given or device.heads.get(way, 1)
