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
