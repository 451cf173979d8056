"""decayed_ops: which decayed products a device computes by an op, wholly or in part. A part of the pass `decayed_products`.

`decayed_pairs` has all entries of a `decayed_product` below the diagonal, and `decayed_blocks` those of a `decayed_matmul` within
diagonal blocks. Both choose at run time whether one product serves the pairs of a block, relative to its middle row, because
gates seldom forget so much within 8 tokens that it cannot. On Hopper the warps of a group share the rows of a chunk. Each has a
block of 16, chooses for it alone, and adds what the tokens of earlier blocks give. So there is one block, the chunk, and no other
level. Triton's kernels choose for all diagonal blocks of a chunk at once.

float16 allows no exponent but 0, so warps would compute level by level. A kernel with `decayed_product` then takes 2.6 times as
long as with ordinary products (Kimi Delta Attention, 1 x 8192, 64 heads, an H200: 1726 us and 674). So float16 keeps these.
"""
from __future__ import annotations

from math import inf

from ...ir.core import Op, Program
from ...ir.types import WARPS_OF_GROUP


def by_op(group: list[Op], p: Program, dtype: str, limit: float, rows: int, block: int, by_warps: bool
          ) -> tuple[int, float | None]:
    """The rows of the diagonal blocks that an op computes for `group`, decayed products of `p` of one kind, and the limit of its
    exponents: inf where gates have a bound that keeps them below it. (0, None) if not all of `group` can have it.

    limit: for the dtype of products. rows: those of the device, 0 for none. block: the rows of blocks that one product computes,
    as gates have a bound. by_warps: whether the warps of a group share the rows, each with a limit of its own."""
    chunk, at_once = p.sizes["C"], rows // WARPS_OF_GROUP if by_warps else rows
    derivatives = all(o.kind == "decayed_matmul" for o in group)
    if by_warps:
        fits = rows == chunk > block and dtype != "float32" and (derivatives or limit > 0)
    else:  # scaled operands are too large for float16
        fits = block <= rows < chunk and dtype == "bfloat16" and derivatives
    return (rows, inf if block >= at_once else limit) if fits else (0, None)
