"""instance_warps: threads of an instance whose compiler spreads tiles over warps (Triton).

The schedule's `warps`, where it has a number. Else eight where what a walk carries has 128 x 128 entries, about 64 float32
registers a thread; two where no product has more than 32 x 32 entries, which more warps would only hand to each other; else four.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...ir.core import Kernel, Program, loops, walk
from ...schedule.schedule import Schedule
from ..stage import takes

#: Threads of a warp.
WARP = 32


@takes("placed")
def instance_warps(p: Program, s: Schedule) -> Program:
    """`p` with threads on its kernels."""
    return p.map_kernels(lambda k: replace(k, threads=WARP * (s.warps or _warps(p, k))))


def _warps(p: Program, k: Kernel) -> int:
    sizes = {**p.sizes, **k.sizes}
    carried = [prod(c.type.shape(sizes)) for lp in loops(k.body) for c in lp.carried]
    products = [prod(o.type.shape(sizes)) for o in walk(k.body) if o.kind == "matmul" and o.type]
    if max(carried, default=0) >= 128 * 128:
        return 8
    return 2 if max(products, default=32 * 32) <= 32 * 32 else 4
