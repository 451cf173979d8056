"""instance_warps: chooses the threads of an instance. For Triton, whose compiler distributes tiles over warps.

A number in the schedule's `warps` is taken, or in `piece_warps` for a kernel that takes pieces of K (`column_loop`). Otherwise an
instance has four warps, with these exceptions:
- Eight, if a carried value has 128 x 128 entries or more, which is about 64 float32 registers per thread.
- In a kernel that has no products and carries no value, so many that each lane holds ALONE entries of its largest tile, from two
  to eight.
- Two, if no product has more than 32 x 32 entries, because more warps would only exchange data.
- Two, if a product of 64 rows or more has fewer than 64 columns, beside many products of 64 x 64 or more, as those of an inverse.
  With more warps Triton makes wgmmas of them. On an H100, Triton 3.6, such kernels (`fused`, `prepared`; V = 16 or 32, 16 bits)
  gave wrong numbers or accessed memory out of bounds.
- In a kernel that takes pieces of K, as many as hold its sums in SUMS registers of each lane.
- As many as leave each lane MULTIPLICATIONS of float32 products, 16 at most. Tensor cores do not compute these products here, and
  Triton writes each multiplication of a lane as an instruction of its own. LLVM and ptxas took minutes for kernels with more.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...ir.core import Kernel, Program, loops
from ...ir.core import types as types_of
from ...ir.types import WARP
from ...schedule.schedule import Schedule
from ..stage import takes

#: The most products of tokens x tokens that are not many. Kernels with so few, and a narrow one, were right on that GPU.
FEW = 4
#: Multiplications of float32 products for each lane, in the text of a kernel. Walks in chunks of 32 tokens have fewer.
MULTIPLICATIONS = 13_000
#: Entries that each lane holds of the sums that a loop over columns carries, at most. On an H100 kernels with one or two sums of
#: 32 x 32 took 0.75 to 0.95 times as long with one warp as with two; one with four spills with one.
SUMS = 64
#: Entries that each lane holds of a tile, in kernels without products.
ALONE = 32
#: The most warps for such products: 128 registers for each lane.
MOST = 16


@takes("placed")
def instance_warps(p: Program, s: Schedule) -> Program:
    """`p` with threads on its kernels."""
    return p.map_kernels(lambda k: replace(k, threads=WARP * (_given(k, s) or max(_by_tiles(p, k), _by_float32(p, k)))))


def _given(k: Kernel, s: Schedule) -> int:
    """The number of warps that the schedule gives the kernel, 0 if it gives none."""
    return s.piece_warps if _in_pieces(k) else s.warps


def _in_pieces(k: Kernel) -> bool:
    """Whether the kernel takes pieces of the columns in a loop."""
    return any(lp.index == "columns" for lp in loops(k.body))


def _by_tiles(p: Program, k: Kernel) -> int:
    """The number of warps by the sizes of carried values and products."""
    sizes = {**p.sizes, **k.sizes}
    carried = [prod(c.type.shape(sizes)) for lp in loops(k.body) for c in lp.carried]
    if _in_pieces(k):
        return max(1, 1 << (-(-sum(carried) // (32 * SUMS)) - 1).bit_length())
    shapes = [o.type.shape(sizes) for o in k.ops if o.kind == "matmul" and o.type]
    if max(carried, default=0) >= 128 * 128:
        return 8
    if not shapes and not carried:
        largest = max((prod(o.type.shape(sizes)) for o in k.ops if o.type), default=0)
        return max(2, min(8, largest // (WARP * ALONE)))
    many = sum(shape == (sizes["C"], sizes["C"]) and sizes["C"] >= 64 for shape in shapes) > FEW
    narrow = many and any(rows >= 64 and columns < 64 for *_, rows, columns in shapes)
    return 2 if narrow or max(map(prod, shapes), default=32 * 32) <= 32 * 32 else 4


def _by_float32(p: Program, k: Kernel) -> int:
    """The number of warps by the multiplications of float32 products; 0 if there are none."""
    sizes, types, count = {**p.sizes, **k.sizes}, types_of(k.body), 0
    for o in (o for o in k.ops if o.kind == "matmul"):
        left, right = (types[a] for a in o.args[:2])
        if left.dtype == "float32":
            count += prod(left.shape(sizes)) * right.shape(sizes)[0 if o.attr("tb") else 1]
    wanted = -(-count // (WARP * MULTIPLICATIONS))
    return min(MOST, 1 << (wanted - 1).bit_length()) if wanted else 0
