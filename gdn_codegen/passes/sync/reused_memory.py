"""reused_memory: barriers where shared memory goes from one buffer to another. For TileLang, in kernels with one agent.

TileLang's compiler lets buffers share memory if they are not live at once, and adds barriers between their uses. Version 0.1.15
misses some. For accesses by pointer, which are asynchronous copies, operands of the matrix units and arguments of device
functions, it compares offsets that count elements, not bytes (`PointerAccessIsDisjoint` in thread_storage_sync.cc). So it can
take two buffers for disjoint if their elements have different sizes. A block of one agent still has several warp groups. A copy
of a float32 tile then starts while another warp group reads a bfloat16 operand from the same memory. The pass adds a barrier
before the first use of a buffer if a buffer with elements of another size had its last use since the last barrier.

Sums over warps have a float32 buffer of the compiler's own. They wait before they write to it, but not after they have read it.
With elements of one size the compiler is right if it knows how long a buffer is: device functions are given whole tiles
(`access_ptr`), not addresses of their first elements. Buffers of several agents are live in one loop, and share no memory.

Example, where d may lie where b was:
    before:  y = a @ b; d = load d (copies)
    after:   y = a @ b; barrier; d = load d (copies)
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir.core import Kernel, Op, Program, Stmt
from ...ir.ops import BESIDE
from ...ir.types import BYTES
from ..stage import takes
from ..storage.live_bytes import live_ranges

#: Spaces in shared memory.
SHARED = ("shared", "staged")
#: Ops for which the compiler may have a buffer of its own, in float32.
OVER_WARPS = ("row_sum", "column_sum", "row_max")


@takes("synchronised")
def reused_memory(p: Program, device: Device) -> Program:
    """`p` with these barriers. `p` itself if the device's blocks have no shared memory."""
    if "shared" not in device.spaces:
        return p
    return p.map_kernels(lambda k: k if k.agents else replace(k, body=_ordered(k, device.agents[0])))


def _ordered(k: Kernel, agent: str) -> tuple[Stmt, ...]:
    """The body of `k` with barriers. None is between ops of one statement."""
    size = {b.name: BYTES[b.dtype] for b in k.buffers}
    live = live_ranges(k, SHARED)
    out: list[Stmt] = []
    ended: set[int] = set()  # the sizes of elements of buffers that had their last use since the last barrier
    row = 0  # how many ops that one statement runs side by side are still to come
    for n, s in enumerate(k.body):
        within = row > 0
        row = row - 1 if within else s.attr(BESIDE, 1) - 1 if isinstance(s, Op) else 0
        begun = set() if within else {size[b] for b, (first, _) in live.items() if n <= first <= n + row}
        if any(ended - {x} for x in begun):
            out.append(Op("barrier", "", (), (("scope", "block"),), agent=agent))
            ended.clear()
        if isinstance(s, Op) and s.kind in ("barrier", "wait"):
            ended.clear()
        out.append(s)
        ended |= {size[b] for b, (_, last) in live.items() if last == n}
        if isinstance(s, Op) and s.kind in OVER_WARPS:
            ended.add(BYTES["float32"])
    return tuple(out)
