"""live_bytes: the bytes that a kernel's buffers take where those that are not live at once may have one place."""
from __future__ import annotations

from heapq import heappop, heappush
from math import prod

from ...devices import Device
from ...ir.core import Kernel, Loop
from ...ir.types import BYTES
from .padded_tiles import with_pads

#: Bytes of shared memory that a block takes beside its buffers.
OF_A_BLOCK = 1024
#: Bytes that TileLang takes at most to align a kernel's buffers; 512 were seen.
ALIGNMENT = 1024


def live_bytes(k: Kernel, *spaces: str) -> int:
    """The bytes of buffers in `spaces` that are live at once, at most."""
    ranges = _ranges(k, spaces)
    return max((sum(size for first, last, size in ranges if first <= n <= last) for n in range(len(k.body))), default=0)


def packed_bytes(k: Kernel) -> int:
    """The bytes of shared memory that the buffers of a kernel with one agent take, but for their alignment.

    TileLang 0.1.15 places one after another, each in the smallest gap with room for it (its pass MergeSharedMemoryAllocations).
    """
    free, active, top = dict[int, int](), list[tuple[int, int, int]](), 0  # first byte -> bytes; (last use, first byte, bytes)
    for first, last, size in sorted(_ranges(k, ("shared", "staged")), key=lambda x: (x[0], -x[2])):
        while active and active[0][0] < first:
            _, at, freed = heappop(active)
            before = next((a for a in free if a + free[a] == at), at)
            free[before] = free.pop(before, 0) + freed + free.pop(at + freed, 0)
        at = min((a for a in free if free[a] >= size), key=lambda a: free[a], default=-1)
        if at < 0:
            at = next((a for a in free if a + free[a] == top), top)
            free[at], top = size, at + size
        if rest := free.pop(at) - size:
            free[at + size] = rest
        heappush(active, (last, at, size))
    return top


def live_ranges(k: Kernel, spaces: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """The first and the last statement of the body between which each buffer in `spaces` is live.

    A buffer is live from the first statement that fills it to the last that reads it. A loop is one statement: what its ops fill
    or read is live throughout.
    """
    names = {b.name for b in k.buffers if b.space in spaces}
    under: dict[str, set[str]] = {}  # the buffers that an expression reads
    ends: dict[str, tuple[int, int]] = {}
    for n, o in ((n, o) for n, s in enumerate(k.body) for o in (s.ops if isinstance(s, Loop) else (s,))):
        read = set[str]().union(*(under.get(a, ()) for a in o.args))
        if o.out:
            under[o.out] = {o.buffer} if o.buffer else read
        for x in ({*read, o.buffer} if o.buffer or not o.out else read) & names:
            ends[x] = ends.get(x, (n, n))[0], n
    return ends


def _ranges(k: Kernel, spaces: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """When buffers in `spaces` are live, as (first statement, last statement, bytes), in the order of their names."""
    size = {b.name: b.slots * prod((*b.shape[:-1], sum(b.shape[-1:]) + b.pad) if b.shape else ()) * BYTES[b.dtype]
            for b in k.buffers if b.space in spaces}
    return [(*ends, size[x]) for x, ends in sorted(live_ranges(k, spaces).items())]


def most_of_two(device: Device) -> int:
    """The bytes of shared memory that tiles of a block may take, so that a multiprocessor has room for two."""
    return device.spaces["shared"] // 2 - OF_A_BLOCK


def two_fit(k: Kernel, device: Device) -> bool:
    """Whether shared memory has room for two blocks of `k`, placed."""
    return packed_bytes(with_pads(k, device)) <= most_of_two(device)
