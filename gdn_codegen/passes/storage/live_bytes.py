"""live_bytes: the bytes of a kernel's buffers that are live at once. TileLang lets buffers that are not share their place."""
from __future__ import annotations

from math import prod

from ...devices import Device
from ...ir.core import Kernel, Loop
from ...ir.types import BYTES

#: Bytes of shared memory that a block takes beside its tiles.
OF_A_BLOCK = 1024


def live_bytes(k: Kernel, *spaces: str) -> int:
    """The bytes of buffers in `spaces` that are live at once, at most.

    A buffer is live from the first statement that fills it to the last that reads it. A loop is one statement: what its ops fill
    or read is live throughout. TileLang 0.1.15 allocates as much for a kernel with one agent, within KiB.
    """
    size = {b.name: b.slots * prod(b.shape) * BYTES[b.dtype] for b in k.buffers if b.space in spaces}
    under: dict[str, set[str]] = {}  # the buffers that an expression reads
    ends: dict[str, tuple[int, int]] = {}  # the first statement that fills a buffer, and the last that reads it
    for n, o in ((n, o) for n, s in enumerate(k.body) for o in (s.ops if isinstance(s, Loop) else (s,))):
        read = set[str]().union(*(under.get(a, ()) for a in o.args))
        if o.out:
            under[o.out] = {o.buffer} if o.buffer else read
        for x in ({*read, o.buffer} if o.buffer or not o.out else read) & size.keys():
            ends[x] = ends.get(x, (n, n))[0], n
    return max((sum(size[x] for x, (first, last) in ends.items() if first <= n <= last) for n in range(len(k.body))), default=0)


def most_of_two(device: Device) -> int:
    """The bytes of shared memory that tiles of a block may take, so that a multiprocessor has room for two."""
    return device.spaces["shared"] // 2 - OF_A_BLOCK


def two_fit(k: Kernel, device: Device) -> bool:
    """Whether shared memory has room for two blocks of `k`, placed."""
    return live_bytes(k, "shared", "staged") <= most_of_two(device)
