"""register_room: orders a kernel over chunks so that its tiles have room in registers, and computes it in pieces of K where they
have none. For Triton.

Triton's compiler holds every tile in registers, on its way to shared memory, too. A tile of 64 x 128 numbers takes 64 registers
of each of 128 threads. Kernels with many products spilled up to 3 KB a thread. So where the tiles that are live at once in the
order of the page are more than the registers hold, `few_live` orders the ops. If they still are, values along K get pieces
(`column_pieces`). Where none has room, the form with the fewest bytes is taken. A kernel with branches and many tiles loads each
directly before it is read (`late`).
"""
from __future__ import annotations

from collections.abc import Callable
from math import isinf

from ...ir.core import Kernel, Loop, Program
from ...schedule.schedule import Schedule
from ..stage import takes
from .column_pieces import in_pieces
from .few_live import few_live, late, most_live

#: Bytes of the registers of a warp: 255 for each of 32 lanes (CUDA C++ Programming Guide, compute capability 9.0).
OF_A_WARP = 255 * 32 * 4
#: Warps of an instance for which a schedule gives no number.
WARPS = 4
#: The part of the room that tiles may take in a kernel with branches, those of `decayed_blocks`. With more, loads come late:
#: what is loaded before a branch stays in registers throughout it. Between two kernels of KDA's gradient on an H200: one with
#: tiles of 0.72 of the room took 1797 us instead of 2066 so, and one with 0.56 took 1205 instead of 1148.
BESIDE_BRANCHES = 2 / 3


@takes("decomposed")
def register_room(p: Program, s: Schedule) -> Program:
    """`p` with its kernels over chunks in the first of these forms that has room, or in that which needs least."""
    room = (s.warps or WARPS) * OF_A_WARP

    def fitting(k: Kernel) -> Kernel:
        """The kernel in that form."""
        if k.grid != "chunks" or any(isinstance(x, Loop) for x in k.body) or not any(o.kind == "matmul" for o in k.ops):
            return k
        sizes, tried = {**p.sizes, **k.sizes}, list[tuple[int, Kernel]]()
        branches = any(o.kind == "decayed_blocks" and not isinf(o.attr("limit")) for o in k.ops)
        if branches and most_live(k, sizes) > room * BESIDE_BRANCHES:
            k = late(k, sizes)
        forms: tuple[Callable[[], Kernel], ...] = (
            lambda: k, lambda: few_live(k, sizes), lambda: few_live(in_pieces(p, k, s), sizes))
        for form in forms:
            tried.append((most_live(x := form(), sizes), x))
            if tried[-1][0] <= room:
                break
        return min(tried, key=lambda x: x[0])[1]  # the first of equal ones

    return p.map_kernels(fitting)
