"""Inverses (I + A)^-1 of strictly lower blocks on the diagonal of a tile."""
import tilelang.language as T

from .headers import HELPERS
from .tiles import pointer


@T.macro
def substituted(A, X, size, scale, strict):
    """Inverses of the `size` x `size` blocks of A, in X, by forward substitution. scale: a vector that multiplies the columns,
    or None. strict: without the ones of the diagonal."""
    x = T.alloc_local((size, size), T.float32)
    for n in T.serial(X.shape[0] // size):
        for i in T.serial(size):
            for j in T.serial(size):
                x[i, j] = T.if_then_else(i == j, 1.0, 0.0)
            for r, j in T.grid(i, size):
                x[i, j] -= T.cast(A[n * size + i, n * size + r], T.float32) * x[r, j]
        for i, j in T.grid(size, X.shape[1]):
            X[n * size + i, j] = 0.0
        for i, j in T.grid(size, size):
            X[n * size + i, n * size + j] = x[i, j] if scale is None else x[i, j] * scale[n * size + j]
        if strict:
            for i in T.serial(size):
                X[n * size + i, n * size + i] = 0.0


@T.macro
def substituted_column(A, X, size, column):
    """A column of the inverses of the blocks of A, in X, by one thread. Nothing for a column that X does not have."""
    wide = 128 // A.dtype.bits  # elements of A in a load
    if column < X.shape[1]:
        a = T.alloc_local((wide,), A.dtype)
        x = T.alloc_local((size,), T.float32)
        first = column // size * size
        for i in T.unroll(size):
            x[i] = T.if_then_else(i == column % size, 1.0, 0.0)
        for r in T.unroll(size // wide):
            for i in T.unroll(r * wide + 1, size):
                for c in T.vectorized(wide):
                    a[c] = A[first + i, first + r * wide + c]
                for c in T.unroll(T.min(wide, i - r * wide)):
                    x[i] -= T.cast(a[c], T.float32) * x[r * wide + c]
        for i in T.unroll(size):
            X[first + i, column] = x[i]


@T.macro
def substituted_by_columns(A, X, size, thread, threads):
    """Inverses of the blocks of A, in X, by forward substitution: each thread takes every `threads`-th column."""
    for i, j in T.Parallel(X.shape[0], X.shape[1]):
        if i // size != j // size:
            X[i, j] = 0.0
    for n in T.unroll(-(-X.shape[1] // threads)):
        substituted_column(A, X, size, n * threads + thread)


def diag_inverse_cuda(A, X, size, thread=None, threads=0):
    """Inverses of the `size` x `size` blocks of A, in X. thread, threads: of those that share the work, and how many they are;
    None and 0 for those of the block."""
    if thread is None:
        thread, threads = T.get_thread_binding(), T.get_thread_extent()
    return substituted_by_columns(A, X, size, thread, threads)


def diag_inverse_cpu(A, X, size):
    """Inverses of the `size` x `size` blocks of A, in X."""
    return substituted(A, X, size, None, False)


@T.macro
def inverted_by_warps(tiles, scales, strict, warp, warps):
    """Inverses of tiles, each by a warp, that of number 0 and the next; all warps come here. warps: how many take turns."""
    T.import_source(HELPERS)
    dtype = (tiles[0].buffer if hasattr(tiles[0], "region") else tiles[0]).dtype
    which = ("true" if x else "false" for x in (dtype == "bfloat16", scales[0] is not None, strict))
    each = [x for A, scale in zip(tiles, scales, strict=True)
            for x in (pointer(A, "rw"), T.reinterpret("handle", T.uint64(0)) if scale is None else pointer(scale, "r"))]
    for n in T.unroll(-(-len(tiles) // warps)):
        T.call_extern("handle", f"unit_lower_inverses<{', '.join(which)}>", n * warps + warp, *each)


def whole_inverses_cuda(tiles, scales, strict=False, thread=None, warp=0):
    """Inverses of one, two or four tiles of 64 x 64, in place, each by a warp. scales: for each tile, a vector that multiplies
    the columns, or None. strict: without the ones of the diagonal. thread: of those that share the work, None for those of the
    block. warp: of theirs, the one that inverts the first tile."""
    if thread is None:
        return inverted_by_warps(tiles, scales, strict, T.get_thread_binding() // 32, T.get_thread_extent() // 32)
    return inverted_by_warps(tiles, scales, strict, thread // 32 - warp, len(tiles))


def whole_inverses_cpu(tiles, scales, strict=False):
    """Inverses of tiles of 64 x 64, in place."""
    for A, scale in zip(tiles, scales, strict=True):
        substituted(A, A, 64, scale, strict)
