"""A kernel's grid, and the memory of its values. The C backend has one memory space."""
import tilelang
import tilelang.language as T

blocks_at_least_cuda = T.annotate_min_blocks_per_sm
shared_cuda = T.alloc_shared
shared_cpu = T.alloc_local
fragment_cuda = T.alloc_fragment
fragment_cpu = T.alloc_local
staged_cpu = T.alloc_local
bfloat16_cuda = T.bfloat16
bfloat16_cpu = T.float32  # the C backend has no bfloat16: the host widens such tensors


def kernel_cuda(*grid, threads):
    """The grid of a kernel, with `threads` threads in a block."""
    return T.Kernel(*grid, threads=threads)


def kernel_cpu(*grid, threads):
    """The grid of a kernel, as loops."""
    return T.Kernel(*grid)


def blocks_at_least_cpu(n):
    """Nothing: there are no multiprocessors."""


def staged_cuda(shape, dtype):
    """A tile in shared memory, swizzled."""
    x = T.alloc_shared(shape, dtype)
    T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x)})
    return x


def rows_cuda(shape, dtype, threads):
    """A fragment whose rows are summed, and whose length is no power of two, for which TileLang finds no layout by itself:
    neighbouring threads have equal parts of a row."""
    x = T.alloc_fragment(shape, dtype)
    each = max(1, threads // shape[0])
    part = shape[1] // each
    T.annotate_layout({x: tilelang.layout.Fragment(
        shape, lambda i, j: ((i * each + j // part) % threads, i * each // threads * part + j % part))})
    return x


def rows_cpu(shape, dtype, threads):
    """A tile whose rows are summed."""
    return T.alloc_local(shape, dtype)
