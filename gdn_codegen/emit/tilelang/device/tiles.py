"""Swizzled tiles in shared memory that CUDA headers address by themselves, and fragments in the layout of a product's result."""
import math

import tilelang
import tilelang.language as T

from .headers import HELPERS


def expect_swizzled_cuda(x):
    """The kernel compiles only if a tile, or slots of one, lies as the helpers address it: where rows and columns 1, 2, 4... lie
    says where all of it does."""
    T.import_source(HELPERS)
    slot, (rows, columns) = (0,) * (len(x.shape) - 2), (int(n) for n in x.shape[-2:])
    for r, c in [(1 << n, 0) for n in range(rows.bit_length() - 1)] + [(0, 1 << n) for n in range(3, columns.bit_length() - 1)]:
        offset = c // 64 * rows * 64 + r * 64 + (c % 64 // 8 ^ r % 8) * 8
        first, place = (*slot, 0, 0), (*slot, r, c)
        T.evaluate(T.call_extern("handle", "expect_element", T.address_of(x[first]), T.address_of(x[place]), offset))


def expect_swizzled_cpu(x):
    """Nothing: there are no helpers that address tiles."""


def pointer(x, access):
    """The address of a buffer, or of a slot of one."""
    if not hasattr(x, "region"):
        return x.access_ptr(access)
    return x.buffer.access_ptr(access, offset=x.region[0].min * math.prod(int(n) for n in x.buffer.shape[1:]))


def as_sums_cuda(*shape):
    """A loop over a tile in the order in which sums of wgmma lie, 64 rows a warp group (PTX ISA, wgmma, fragment D)."""
    return T.Parallel(*shape, loop_layout=tilelang.layout.Fragment(shape, lambda i, j: (
        i // 64 * 128 + i % 64 // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2)))


def below_diagonal_cuda(thread):
    """By how many rows a thread's first entry lies below the diagonal, in a tile in the order of `as_sums`. Threads of warp
    groups, from `thread` 0 on."""
    T.import_source(HELPERS)
    return T.call_extern("int32", "below_diagonal", thread)


@T.macro
def load_transposed_cuda(tile, to, thread):
    """From shared memory to a fragment, its columns as rows; threads of warp groups, from `thread` 0 on."""
    T.import_source(HELPERS)
    T.call_extern("handle", "load_transposed", to.access_ptr("w"), pointer(tile, "r"), thread)


@T.macro
def store_tile_cuda(x, tile, thread, transposed=False):
    """From a fragment to shared memory, `transposed` its columns as rows."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"store_tile<{str(transposed).lower()}>", pointer(tile, "w"), x.access_ptr("r"), thread)
