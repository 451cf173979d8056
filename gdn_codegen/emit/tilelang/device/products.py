"""Products of tiles."""
import math

import tilelang.language as T


def gemm_cuda(A, B, acc, transpose_A=False, transpose_B=False, clear_accum=True):
    """acc = A @ B, or acc + A @ B, on the matrix units. Warps share out rows first: TileLang 0.1.15 then has sums of columns of a
    product by mma.sync (GPUs before Hopper) with 64 rows. It has none if warps share out rows and columns, or of 128 rows."""
    return T.gemm(A, B, acc, transpose_A=transpose_A, transpose_B=transpose_B, policy=T.GemmWarpPolicy.FullRow,
                  clear_accum=clear_accum)


def gemm_sm_90a(A, B, acc, transpose_A=False, transpose_B=False, clear_accum=True):
    """The same in builds for Hopper. Tiles of wgmma have sums of columns however warps share them out, but for float32."""
    first = T.GemmWarpPolicy.FullRow if "float32" in (A.dtype, B.dtype) else T.GemmWarpPolicy.Square
    return T.gemm(A, B, acc, transpose_A=transpose_A, transpose_B=transpose_B, policy=first, clear_accum=clear_accum)


@T.macro
def widened(src, dst, transpose):
    """A copy in float32 and row-major, which the C compiler vectorises."""
    for i, j in T.grid(dst.shape[0], dst.shape[1]):
        dst[i, j] = T.cast(src[j, i] if transpose else src[i, j], T.float32)


@T.macro
def gemm_cpu(A, B, acc, transpose_A=False, transpose_B=False, clear_accum=True):
    """acc = A @ B, or acc + A @ B, in float32."""
    rows, cols, depth = int(acc.shape[0]), int(acc.shape[1]), int(A.shape[0 if transpose_A else 1])
    step = math.gcd(depth, 8)  # rows of B in one pass over a row of acc
    a = T.alloc_local((rows, depth), T.float32)
    b = T.alloc_local((depth, cols), T.float32)
    widened(A, a, transpose_A)
    widened(B, b, transpose_B)
    if clear_accum:
        for i, j in T.grid(rows, cols):
            acc[i, j] = 0.0
    for i, k in T.grid(rows, depth // step):
        for j in T.serial(cols):
            acc[i, j] = acc[i, j] + sum(a[i, k * step + r] * b[k * step + r, j] for r in range(step))
