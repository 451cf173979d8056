"""batch_heads: lets an instance of a kernel over chunks handle several value heads.

For each way that the device has (`Device.heads`), it changes the kernels which that way suits. A kernel is batched once. Heads
that are interleaved come later: `arrange` tries how many of them fit on the chip.
"""
from __future__ import annotations

from ...devices import Cores, Device
from ...ir.core import Program
from ...schedule.schedule import Schedule
from ..stage import require, takes
from .key_head import key_head
from .product import product
from .threads import threads

#: Way -> a function that changes the kernels which the way suits. It takes the program, the number of heads and the device.
BY = {"product": product, "threads": threads, "key_head": key_head}
#: Ways for which the schedule may set the number of heads.
CHOSEN = ("key_head", "interleaved")


@takes("decomposed", "assigned")
def batch_heads(p: Program, s: Schedule, device: Device) -> Program:
    """`p` with `Kernel.batch` set, and bodies changed, on such kernels. `p` itself if the device has no way.

    Cores run it at stage "decomposed", because a product needs the cube core. Other devices run it at stage "assigned".
    """
    require("batch_heads", p, "decomposed" if isinstance(device, Cores) else "assigned")
    for way, by in BY.items():
        n = heads(s, device, way)
        p = by(p, n, device) if n > 1 else p
    return p


def heads(s: Schedule, device: Device, way: str) -> int:
    """The value heads of an instance for a way: the schedule's number if it may choose one, else the device's. 1 if the device
    does not have the way."""
    given = s.value_heads if way in CHOSEN and way in device.heads else 0
    return given or device.heads.get(way, 1)
