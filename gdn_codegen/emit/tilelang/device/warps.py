"""Tiles of 16 rows in the registers of one warp. Several warps run the same text for different iterations. TileLang is told that
each of them has all of a tile."""
import math

import tilelang
import tilelang.language as T

from .headers import HELPERS
from .sums import bounded
from .tiles import pointer


def as_warp_sums_cuda(*shape, warps):
    """A loop over a tile in the order in which sums of mma.m16n8k16 lie (PTX ISA), by each of so many warps."""
    return T.Parallel(*shape, loop_layout=tilelang.layout.Fragment(
        shape, forward_thread_fn=lambda i, j, warp: warp * 32 + i % 8 * 4 + j % 8 // 2,
        forward_index_fn=lambda i, j: j // 8 * 4 + i // 8 * 2 + j % 2, replicate=warps))


@T.macro
def warp_product_cuda(a, b, to, clear=True):
    """to = a @ b.T, or to + a @ b.T, of fragments in that order, by each warp."""
    T.import_source(HELPERS)
    options = f"{a.shape[1]}, {str(a.dtype == 'bfloat16').lower()}, {str(clear).lower()}"
    T.call_extern("handle", f"warp_product<{options}>", a.access_ptr("r"), b.access_ptr("r"), to.access_ptr("rw"))


@T.macro
def load_warp_tile_cuda(tile, to, piece, lane):
    """From swizzled shared memory to a fragment in that order, by a warp: columns from 16 `piece` on."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"warp_tile<true, {to.shape[1]}>", to.access_ptr("w"), pointer(tile, "r"), piece, lane)


# TileLang is told "r" for `tile`, as in `store_tile`.
@T.macro
def store_warp_tile_cuda(x, tile, piece, lane):
    """From a fragment in that order to swizzled shared memory, by a warp: columns from 16 `piece` on."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"warp_tile<false, {x.shape[1]}>", x.access_ptr("r"), pointer(tile, "r"), piece, lane)


@T.macro
def warp_entries(x, y, count):
    """The `count` entries that each lane has of a fragment, in an array `y`."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"warp_entries<{count * x.dtype.bits // 32}>", x.access_ptr("r"), y.access_ptr("w"))


@T.macro
def store_warp_entries_cuda(x, to, slot, lane):
    """The same entry by entry, to a tile that lies as TileLang chooses: the slot of a ring `to` with these indices."""
    count = x.shape[0] * x.shape[1] // 32
    y = T.alloc_local((count,), x.dtype)
    warp_entries(x, y, count)
    for n in T.unroll(count):
        to[slot + (n // 2 % 2 * 8 + lane // 4, n // 4 * 8 + lane % 4 * 2 + n % 2)] = y[n]


@T.macro
def store_warp_diagonal_cuda(x, to, slot, lane):
    """The diagonal of a fragment of 16 x 16, to a vector in such a slot."""
    y = T.alloc_local((8,), x.dtype)
    warp_entries(x, y, 8)
    for n in T.unroll(8):
        if n // 2 % 2 * 8 + lane // 4 == n // 4 * 8 + lane % 4 * 2 + n % 2:
            to[slot + (n // 2 % 2 * 8 + lane // 4,)] = y[n]


@T.macro
def warp_inverse_cuda(A, of, X, to, lane):
    """The inverse of a tile of 16 x 16 in slot `of` of the ring A, in slot `to` of X, by a warp: each lane has a column."""
    size, wide = 16, 128 // A.dtype.bits  # elements of A in a load
    a = T.alloc_local((wide,), A.dtype)
    x = T.alloc_local((size,), T.float32)
    for i in T.unroll(size):
        x[i] = T.if_then_else(i == lane % size, 1.0, 0.0)
    for r in T.unroll(size // wide):
        for i in T.unroll(r * wide + 1, size):
            for c in T.vectorized(wide):
                a[c] = A[of + (i, r * wide + c)]
            for c in T.unroll(T.min(wide, i - r * wide)):
                x[i] -= T.cast(a[c], T.float32) * x[r * wide + c]
    if lane < size:
        for i in T.unroll(size):
            X[to + (i, lane)] = x[i]


@T.macro
def warp_column_cumsum_cuda(term, to, slot, rows, columns, lane, least=None, valid_rows=None, exclusive=False):
    """Running sums of the columns of a tile, by a warp. term: (row, column) -> a term. to, slot: the ring, which may have the
    terms, and the indices of its slot. valid_rows: terms of later rows are replaced by 0."""
    wide, at_once = columns // 32, math.gcd(rows, 8)  # rows whose terms are under way at once; with all of them the text is long
    x, total, added = (T.alloc_local((n * wide,), T.float32) for n in (at_once, 1, 1))
    for c in T.unroll(wide):
        total[c] = 0.0
    for m in T.serial(rows // at_once):
        for i in T.unroll(at_once):
            for c in T.vectorized(wide):
                x[i * wide + c] = term(m * at_once + i, lane * wide + c)
        for i in T.unroll(at_once):
            if exclusive:
                for c in T.vectorized(wide):
                    to[slot + (m * at_once + i, lane * wide + c)] = total[c]
            for c in T.unroll(wide):
                added[c] = bounded(x[i * wide + c], least)
                if valid_rows is not None:
                    added[c] = T.if_then_else(m * at_once + i < valid_rows, added[c], 0.0)
                total[c] = total[c] + added[c]
            if not exclusive:
                for c in T.vectorized(wide):
                    to[slot + (m * at_once + i, lane * wide + c)] = total[c]
