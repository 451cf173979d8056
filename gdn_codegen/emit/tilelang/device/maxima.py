"""The largest entry of each row of a tile, or of a vector, among the first `within`."""
import math

import tilelang.language as T


@T.macro
def row_max_cuda(src, dst, within):
    """The largest entry of each row, by a thread block."""
    x = T.alloc_fragment(src.shape, dst.dtype)
    largest = T.alloc_fragment((src.shape[0],), dst.dtype)
    for i, j in T.Parallel(*src.shape):
        x[i, j] = T.if_then_else(j < within, src[i, j], T.float32(-math.inf))
    T.reduce_max(x, largest, dim=1)
    for i in T.Parallel(src.shape[0]):
        dst[i] = largest[i]


@T.macro
def vector_max_cuda(src, dst, within):
    """The largest entry of a vector, by a thread block."""
    x = T.alloc_fragment(src.shape, dst.dtype)
    largest = T.alloc_fragment((1,), dst.dtype)
    for i in T.Parallel(src.shape[0]):
        x[i] = T.if_then_else(i < within, src[i], T.float32(-math.inf))
    T.reduce_max(x, largest, dim=0)
    dst[0] = largest[0]


@T.macro
def row_max_cpu(src, dst, within):
    """The largest entry of each row."""
    for i in T.serial(src.shape[0]):
        dst[i] = src[i, 0]
        for j in T.serial(1, within):
            dst[i] = T.max(dst[i], src[i, j])


@T.macro
def vector_max_cpu(src, dst, within):
    """The largest entry of a vector."""
    dst[0] = src[0]
    for i in T.serial(1, within):
        dst[0] = T.max(dst[0], src[i])
