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
def wait_copies_cuda(pending=0):
    """All threads wait for all asynchronous copies, but for so many that were started last."""
    T.ptx_wait_group(pending)
    T.sync_threads()


def wait_copies_cpu(pending=0):
    """Nothing: copies are complete where they stand."""


def no_copy_cuda():
    """In the place of a copy: what `wait_copies` counts as one that is complete."""
    return T.ptx_commit_group()


def no_copy_cpu():
    """Nothing."""


def parallel_cpu(*extents):
    """A loop over a tile, in order."""
    return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)
