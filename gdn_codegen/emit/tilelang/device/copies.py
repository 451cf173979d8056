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


def async_parallel_cuda(*extents):
    """A loop over a tile in shared memory whose assignments are asynchronous copies from global memory, of up to 16 bytes each. A
    copy whose condition does not hold (`T.if_then_else` with 0) reads nothing and writes zeros, so that no thread waits in a
    branch. `commit_copy` follows. The annotations are those of TileLang's `T.Parallel(prefer_async=True)` and `T.async_copy`."""
    return T.Parallel(*extents, annotations={"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True})


def commit_copy_cuda():
    """End a group (cp.async.commit_group): `wait_copies` counts the copies that were started since the last group as one."""
    return T.ptx_commit_group()


@T.macro
def wait_copies_cuda(pending=0):
    """All threads wait for all asynchronous copies, but for so many that were started last."""
    T.ptx_wait_group(pending)
    T.sync_threads()


def wait_copies_cpu(pending=0):
    """Nothing: copies are complete where they stand."""


def parallel_cpu(*extents):
    """A loop over a tile, in order."""
    return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)


def async_parallel_cpu(*extents):
    """A loop over a tile, in order."""
    return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)


def commit_copy_cpu():
    """Nothing: copies are complete where they stand."""
