"""Copies of tiles, and loops over them."""
import tilelang.language as T

copy_cuda = T.copy
start_copy_cuda = T.async_copy
start_copy_cpu = T.copy
parallel_cuda = T.Parallel


@T.macro
def copy_cpu(src, dst):
    """A copy of a tile, element by element."""
    for i, j in T.grid(dst.shape[0], dst.shape[1]):
        dst[i, j] = src[i, j]


@T.macro
def wait_copies_cuda():
    """All threads wait for all asynchronous copies."""
    T.ptx_wait_group(0)
    T.sync_threads()


def wait_copies_cpu():
    """Nothing: copies are complete where they stand."""


def parallel_cpu(*extents):
    """A loop over a tile, in order."""
    return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)
