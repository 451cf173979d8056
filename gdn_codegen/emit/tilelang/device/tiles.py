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


def expect_rows_cuda(x):
    """The kernel compiles only if a tile's rows lie one after another."""
    T.import_source(HELPERS)
    rows, columns = (int(n) for n in x.shape)
    for r, c in [(1 << n, 0) for n in range(rows.bit_length() - 1)] + [(0, 1 << n) for n in range(columns.bit_length() - 1)]:
        T.evaluate(T.call_extern("handle", "expect_element", T.address_of(x[0, 0]), T.address_of(x[r, c]), r * columns + c))


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
    T.call_extern("handle", f"load_transposed<{to.shape[1]}>", to.access_ptr("w"), pointer(tile, "r"), thread)


@T.macro
def zero_tail_cuda(tile, first, thread):
    """Zeros in the rows from `first` on of a tile of 16 bit in shared memory, or of a slot of a ring, by a warp."""
    T.import_source(HELPERS)
    rows, columns = (tile.buffer if hasattr(tile, "region") else tile).shape[-2:]
    T.call_extern("handle", f"zero_tail<{rows}, {columns // 64}>", pointer(tile, "w"), first, thread)


def store_tail_cuda(tile, first, second, rows, thread):
    """The first rows of a swizzled tile of 16 bit, by a warp, to the memory in which `first` and `second` are the first two."""
    T.import_source(HELPERS)
    return T.call_extern("handle", f"store_tail<{tile.shape[0]}, {tile.shape[1] // 64}>", tile.access_ptr("r"),
                         T.address_of(first), T.address_of(second), rows, thread)


# `tile` is written, but TileLang is told "r": for memory that it knows to be written it adds a fence before the agent's next
# product. Passes derive the fences that are needed.
@T.macro
def store_tile_cuda(x, tile, thread, transposed=False):
    """From a fragment to shared memory, `transposed` its columns as rows. TileLang takes it for a read: passes derive the fences,
    and it would add one before the agent's next product."""
    T.import_source(HELPERS)
    options = f"{str(transposed).lower()}, {x.shape[1]}"
    T.call_extern("handle", f"store_tile<{options}>", pointer(tile, "r"), x.access_ptr("r"), thread)
