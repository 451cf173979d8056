"""The device functions of Triton: functions that kernels call by name.

A generated module has copies of those that its kernels call. Nothing of the package imports this file, since it imports triton.
"""
import triton
import triton.language as tl


@triton.jit
def rounded(x, OPERAND: tl.constexpr):
    """x rounded to bfloat16. In float32 for Triton's interpreter, which would truncate, and cannot multiply bfloat16."""
    if OPERAND == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["N"])
def find_sequence(cu_seqlens, slot, N, size):
    """The last sequence whose first slot, of as many tokens as `size`, cu_seqlens[n] // size + n, is not after `slot`."""
    low = tl.full([], 0, tl.int32)
    high = low + N - 1
    while low < high:
        middle = (low + high + 1) // 2
        reached = tl.load(cu_seqlens + middle) // size + middle <= slot
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def warm_up_length(totals, stride, chunks, most, bound, summed):
    """The fewest of the last of `chunks` chunks whose totals sum to -bound or less; -1 if that is more than `most`. If their sum
    stays above: all; but -1 if the call has summaries (`summed`) and `most` such chunks would not reach the bound. totals: of the
    first of them. stride: from one to the next, below 0 in a walk back."""
    i = tl.arange(0, 32)  # of a warp: sums cross no other
    limit = tl.minimum(chunks, most)
    total = tl.full([], 0.0, tl.float32)
    found = tl.full([], -1, tl.int32)
    done = tl.full([], 0, tl.int32)
    while (found < 0) & (done < limit):
        n = done + i + 1
        x = tl.load(totals + (chunks - n).to(tl.int64) * stride, mask=n <= limit, other=0.0)
        enough = (total + tl.cumsum(x, axis=0) <= -bound) & (n <= limit)
        nearest = tl.min(tl.where(enough, n, limit + 1), axis=0)
        found = tl.where(nearest <= limit, nearest, -1)
        total += tl.sum(x, axis=0)
        done += 32
    every = (chunks <= most) & ((summed == 0) | (total * most <= -bound * chunks))
    return tl.where((found < 0) & every, chunks, found).to(tl.float32)


#: exp(x) = exp2(x LOG2_E): on NVIDIA GPUs exp2 takes two instructions, exp five.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_middles(x, SIZE: tl.constexpr):
    """For each row of x, row SIZE / 2 - 1 of its block of SIZE rows: a sum over the block with all other rows masked."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    kept = tl.where(tl.arange(0, rows)[:, None] % SIZE == SIZE // 2 - 1, x, 0.0)
    middles = tl.sum(tl.reshape(kept, [rows // SIZE, SIZE, columns]), axis=1)[:, None, :]
    return tl.reshape(tl.broadcast_to(middles, [rows // SIZE, SIZE, columns]), [rows, columns])


@triton.jit
def decayed_entries(p, x, later, earlier, TRANSPOSED: tl.constexpr, OPERAND: tl.constexpr):
    """Row i is the sum over j of p[i, j] x[j] later[i] earlier[j]; TRANSPOSED: row j is the sum over i of p[i, j] x[i] later[i]
    earlier[j]. Scaled x is rounded in two parts: results may be terms of a running sum that nearly cancel."""
    p = p.to(OPERAND)
    if TRANSPOSED:
        scaled = x * later
        high = rounded(scaled, OPERAND)
        low = rounded(scaled - high.to(tl.float32), OPERAND)
        return tl.dot(tl.trans(p), low, acc=tl.dot(tl.trans(p), high)) * earlier
    else:
        scaled = x * earlier
        high = rounded(scaled, OPERAND)
        low = rounded(scaled - high.to(tl.float32), OPERAND)
        return tl.dot(p, low, acc=tl.dot(p, high)) * later


@triton.jit
def blocks_at_once(p, x, later, earlier, SIZE: tl.constexpr, TRANSPOSED: tl.constexpr, OPERAND: tl.constexpr):
    """`decayed_entries` of the diagonal blocks of p, for exponents of `later` and `earlier`."""
    i = tl.arange(0, p.shape[0])[:, None]
    j = tl.arange(0, p.shape[0])[None, :]
    block = tl.where(i // SIZE == j // SIZE, p, 0.0)
    x = x.to(tl.float32)
    return decayed_entries(block, x, tl.exp2(later * LOG2_E), tl.exp2(earlier * LOG2_E), TRANSPOSED, OPERAND)


@triton.jit
def decayed_blocks(
    p, x, sums, before, middles, SIZE: tl.constexpr, LIMIT: tl.constexpr, TRANSPOSED: tl.constexpr, OPERAND: tl.constexpr
):
    """Of the blocks of SIZE rows on the diagonal of p: row i is the sum over j < i of p[i, j] x[j] exp(before[i] - sums[j]).
    TRANSPOSED: row j is the sum over i > j of p[i, j] x[i] exp(before[i] - sums[j]). middles: for each row the sums at its
    block's middle row. p is 0 on and above the diagonal.

    One product computes it if no exponent relative to the middle row is above LIMIT, of either sign, or if LIMIT is None: then
    none can be. Otherwise blocks of SIZE, SIZE / 2, ... 2 rows have one each, for rows of their second halves and columns of
    their first. Relative to the last row of the first half no exponent is positive there, if sums never rise. Conversions come
    within the branches: a tile that is converted before them takes registers throughout."""
    later = before - middles
    earlier = middles - sums
    if LIMIT is None:
        out = blocks_at_once(p, x, later, earlier, SIZE, TRANSPOSED, OPERAND)
    elif tl.max(tl.maximum(tl.abs(later), tl.abs(earlier))) <= LIMIT:
        out = blocks_at_once(p, x, later, earlier, SIZE, TRANSPOSED, OPERAND)
    else:
        i = tl.arange(0, p.shape[0])[:, None]
        j = tl.arange(0, p.shape[0])[None, :]
        out = tl.full([p.shape[0], x.shape[1]], 0.0, tl.float32)
        for n in tl.static_range(0, SIZE.bit_length() - 1):
            m = block_middles(sums, SIZE >> n)
            level = tl.where((i // (SIZE >> n) == j // (SIZE >> n)) & (i // (SIZE >> (n + 1)) > j // (SIZE >> (n + 1))), p, 0.0)
            scale = tl.exp2(tl.where(i // (SIZE >> (n + 1)) % 2 == 1, before - m, m - sums) * LOG2_E)
            out += decayed_entries(level, x.to(tl.float32), scale, scale, TRANSPOSED, OPERAND)
    return out
