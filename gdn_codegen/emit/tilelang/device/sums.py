"""Sums along a dim of a tile, and running sums. `least`: a bound from below on each term, or None."""
import math

import tilelang
import tilelang.language as T

from .headers import HELPERS


def bounded(x, least):
    """What counts of a term; a NaN does as it is."""
    return x if least is None else T.if_then_else(x < least, least, x)


@T.macro
def bounded_cumsum(src, dst, least):
    """Running sums of a vector, by a thread block."""
    for i in T.Parallel(src.shape[0]):
        dst[i] = bounded(src[i], least)
    T.cumsum(dst, dst)


def cumsum_cuda(src, dst, least=None):
    """Running sums of a vector, by a thread block."""
    return T.cumsum(src, dst) if least is None else bounded_cumsum(src, dst, least)


@T.macro
def cumsum_cpu(src, dst, least=None):
    """Running sums of a vector."""
    dst[0] = bounded(src[0], least)
    for i in T.serial(1, src.shape[0]):
        dst[i] = dst[i - 1] + bounded(src[i], least)


@T.macro
def cumsums_cuda(sources, sums, least=None):
    """Running sums of two or four vectors, each by another warp, or in turns where there are fewer warps."""
    T.import_source(HELPERS)
    warps = T.get_thread_extent() // 32
    each = [x for src, dst in zip(sources, sums, strict=True) for x in (src.access_ptr("r"), dst.access_ptr("w"))]
    lowest = T.float32(-math.inf if least is None else least)
    for n in T.unroll(-(-len(sources) // warps)):
        T.call_extern("handle", f"running_sums<{sources[0].shape[0]}>", n * warps + T.get_thread_binding() // 32, lowest, *each)


def cumsums_cpu(sources, sums, least=None):
    """Running sums of two or four vectors."""
    for src, dst in zip(sources, sums, strict=True):
        cumsum_cpu(src, dst, least)


@T.macro
def column_cumsum_cuda(src, dst, columns, least=None, exclusive=False):
    """Running sums of each of so many columns of a tile, which may be `dst`, by one thread. exclusive: without the row itself."""
    loads = min(src.shape[0], 16)
    for j in T.Parallel(columns):
        total = T.alloc_var(T.float32, init=0.0)
        x = T.alloc_local((loads,), T.float32)  # as many loads under way at once
        for n in T.serial(src.shape[0] // loads):
            for i in T.unroll(loads):
                x[i] = bounded(src[n * loads + i, j], least)
            for i in T.unroll(loads):
                if exclusive:
                    dst[n * loads + i, j] = total
                total = total + x[i]
                if not exclusive:
                    dst[n * loads + i, j] = total


@T.macro
def column_cumsum_cpu(src, dst, columns, least=None, exclusive=False):
    """Running sums of each of so many columns of a tile, which may be `dst`. exclusive: without the row itself."""
    for j in T.serial(columns):
        total = T.alloc_var(T.float32, init=0.0)
        for i in T.serial(src.shape[0]):
            x = bounded(src[i, j], least)
            dst[i, j] = total if exclusive else total + x
            total = total + x


@T.macro
def sum_row(src, dst, row, tokens, least):
    """Running sums of the first `tokens` entries of a row, by one thread."""
    loads = min(tokens, 32)
    x = T.alloc_local((loads,), T.float32)  # as many loads under way at once
    total = T.alloc_var(T.float32, init=0.0)
    for n in T.unroll(tokens // loads):
        for i in T.unroll(loads):
            x[i] = src[row, n * loads + i]
        for i in T.unroll(loads):
            total = total + bounded(x[i], least)
            x[i] = total
        for i in T.unroll(loads):
            dst[row, n * loads + i] = x[i]


@T.macro
def row_cumsum_cuda(src, dst, tokens, least=None):
    """Running sums of each row, by one thread. A thread has several rows if the block has fewer threads than rows."""
    threads = T.get_thread_extent()
    for n in T.unroll(-(-src.shape[0] // threads)):
        if n * threads + T.get_thread_binding() < src.shape[0]:
            sum_row(src, dst, n * threads + T.get_thread_binding(), tokens, least)


@T.macro
def row_cumsum_cpu(src, dst, tokens, least=None):
    """Running sums of each row."""
    for row in T.serial(src.shape[0]):
        sum_row(src, dst, row, tokens, least)


@T.macro
def row_sum_cuda(src, dst):
    """The sum of each row, by a thread block."""
    total = T.alloc_fragment((src.shape[0],), dst.dtype)
    T.reduce_sum(src, total, dim=1)
    for i in T.Parallel(src.shape[0]):
        dst[i] = total[i]


def sums_at_a_time(many):
    """How many sums threads may exchange at a time: `many`, but one for GPUs from sm_100 on. There TileLang 0.1.15 packs several
    into a variable that it does not declare."""
    target = tilelang.tvm.target.Target.current(allow_none=True)
    arch = str(target.attrs["arch"]) if target is not None and "arch" in target.attrs else ""
    digits = "".join(x for x in arch if x.isdigit())
    return 1 if arch.startswith("sm_") and int(digits) >= 100 else many


@T.macro
def column_sum_cuda(src, dst, batch=0):
    """The sum of each column, by a thread block. Threads exchange `batch` sums at a time, at most as many as one has columns. 0:
    four where the tile is as large as a product's sum, of which a thread has at least four columns."""
    total = T.alloc_fragment((src.shape[1],), dst.dtype)
    T.reduce_sum(src, total, dim=0, batch=sums_at_a_time(batch or (4 if min(src.shape) >= 64 else 1)))
    for i in T.Parallel(src.shape[1]):
        dst[i] = total[i]


@T.macro
def vector_sum_cuda(src, dst):
    """The sum of a vector, by a thread block, with zeros up to the next power of two: of other lengths TileLang 0.1.15 finds no
    layout with more threads than entries."""
    size = src.shape[0]
    x = T.alloc_fragment((1 << (int(size) - 1).bit_length(),), dst.dtype)
    total = T.alloc_fragment((1,), dst.dtype)
    for i in T.Parallel(x.shape[0]):
        x[i] = T.if_then_else(i < size, src[T.min(i, size - 1)], 0) if size & (size - 1) else src[i]
    T.reduce_sum(x, total, dim=0)
    dst[0] = total[0]


@T.macro
def column_sum_cpu(src, dst, batch=0):
    """The sum of each column."""
    for j in T.serial(src.shape[1]):
        dst[j] = 0.0
        for i in T.serial(src.shape[0]):
            dst[j] = dst[j] + src[i, j]


@T.macro
def vector_sum_cpu(src, dst):
    """The sum of a vector."""
    dst[0] = 0.0
    for i in T.serial(src.shape[0]):
        dst[0] = dst[0] + src[i]


@T.macro
def row_sum_cpu(src, dst):
    """The sum of each row."""
    for i in T.serial(src.shape[0]):
        dst[i] = 0.0
        for j in T.serial(src.shape[1]):
            dst[i] = dst[i] + src[i, j]
