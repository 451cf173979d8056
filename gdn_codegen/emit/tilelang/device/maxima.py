"""The largest entry of each row of a tile, or of a vector, among the first `within`. It is NaN if one of these is NaN: maxima
pass over NaN, so a sum of the NaN entries is added. TileLang's compiler takes x != x for false."""
import math

import tilelang.language as T


def rows_of_warps(rows, columns, threads):
    """A layout in which each warp has whole rows, a lane up to four columns side by side. So no sum or maximum of a row crosses
    warps. For a tile that a branch computes TileLang would give each thread one column and all rows."""
    warps, n = threads // 32, math.gcd(columns // 32, 4)
    return T.Fragment((rows, columns), lambda i, j: (
        i % warps * 32 + j // n % 32, i // warps * (columns // 32) + j // (32 * n) * n + j % n))


@T.macro
def row_max_cuda(src, dst, within, threads=0):
    """The largest entry of each row, by a thread block. threads: those of the block, or 0."""
    x, nan = T.alloc_fragment(src.shape, dst.dtype), T.alloc_fragment(src.shape, dst.dtype)
    if threads >= 32 and src.shape[0] % (threads // 32) == 0 and src.shape[1] % 32 == 0:
        T.annotate_layout({x: rows_of_warps(int(src.shape[0]), int(src.shape[1]), threads)})
    largest, nans = T.alloc_fragment((src.shape[0],), dst.dtype), T.alloc_fragment((src.shape[0],), dst.dtype)
    for i, j in T.Parallel(*src.shape):
        x[i, j] = T.if_then_else(j < within, src[i, j], T.float32(-math.inf))
        nan[i, j] = T.if_then_else(T.isnan(x[i, j]), x[i, j], T.float32(0))
    T.reduce_max(x, largest, dim=1)
    T.reduce_sum(nan, nans, dim=1)
    for i in T.Parallel(src.shape[0]):
        dst[i] = largest[i] + nans[i]


@T.macro
def vector_max_cuda(src, dst, within):
    """The largest entry of a vector, by a thread block."""
    x, nan = T.alloc_fragment(src.shape, dst.dtype), T.alloc_fragment(src.shape, dst.dtype)
    largest, nans = T.alloc_fragment((1,), dst.dtype), T.alloc_fragment((1,), dst.dtype)
    for i in T.Parallel(src.shape[0]):
        x[i] = T.if_then_else(i < within, src[i], T.float32(-math.inf))
        nan[i] = T.if_then_else(T.isnan(x[i]), x[i], T.float32(0))
    T.reduce_max(x, largest, dim=0)
    T.reduce_sum(nan, nans, dim=0)
    dst[0] = largest[0] + nans[0]


@T.macro
def row_max_cpu(src, dst, within, threads=0):
    """The largest entry of each row."""
    for i in T.serial(src.shape[0]):
        dst[i] = src[i, 0]
        for j in T.serial(1, within):
            x = src[i, j]
            dst[i] = T.if_then_else(dst[i] > x, dst[i], T.if_then_else(dst[i] <= x, x, dst[i] + x))


@T.macro
def vector_max_cpu(src, dst, within):
    """The largest entry of a vector."""
    dst[0] = src[0]
    for i in T.serial(1, within):
        x = src[i]
        dst[0] = T.if_then_else(dst[0] > x, dst[0], T.if_then_else(dst[0] <= x, x, dst[0] + x))
