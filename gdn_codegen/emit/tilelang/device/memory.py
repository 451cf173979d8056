"""A kernel's grid, and the memory of its values. The C backend has one memory space."""
import tilelang
import tilelang.language as T

blocks_at_least_cuda = T.annotate_min_blocks_per_sm
start_next_kernel_cuda = T.pdl_trigger
wait_for_earlier_kernels_cuda = T.pdl_sync
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


barrier_cuda = T.sync_threads


def barrier_cpu():
    """Nothing: one thread runs an instance."""


def blocks_at_least_cpu(n):
    """Nothing: there are no multiprocessors."""


def staged_cuda(shape, dtype):
    """A tile in shared memory, swizzled."""
    x = T.alloc_shared(shape, dtype)
    T.annotate_layout({x: tilelang.layout.make_swizzled_layout(x)})
    return x


def rows_cuda(shape, dtype, threads):
    """A fragment whose rows or columns are summed, and the length of whose rows is no power of two, for which TileLang finds no
    layout by itself: neighbouring threads have equal parts of a row."""
    x = T.alloc_fragment(shape, dtype)
    each = max(1, threads // shape[0])
    part = shape[1] // each
    T.annotate_layout({x: tilelang.layout.Fragment(
        shape, lambda i, j: ((i * each + j // part) % threads, i * each // threads * part + j % part))})
    return x


def columns_cuda(shape, dtype, threads):
    """A fragment whose columns are summed. A warp has whole columns, so that no sum crosses warps. A thread has two columns side
    by side, and neighbouring threads have the next ones of the row."""
    x, each = T.alloc_fragment(shape, dtype), shape[1] // (threads // 32)  # columns of a warp
    lanes, rows = each // 2, 64 // each  # of a row, and at a time
    T.annotate_layout({x: tilelang.layout.Fragment(
        shape, lambda i, j: (j // each * 32 + i % rows * lanes + j % each // 2, i // rows * 2 + j % 2))})
    return x


def lane_of_column(j, columns, lanes, piece):
    """The lane that holds column j of a row, and the place of the column in it: each lane has pieces of so many columns, which
    are 16 bytes in memory."""
    each = min(piece, columns // lanes)
    return j // each % lanes, j // (each * lanes) * each + j % each


def state_rows_cuda(shape, dtype, threads, lanes, piece):
    """A fragment [rows, columns] whose rows `lanes` neighbouring threads share, so that sums of rows cross few threads."""
    x, teams = T.alloc_fragment(shape, dtype), threads // lanes
    T.annotate_layout({x: tilelang.layout.Fragment(shape, lambda i, j: (
        i % teams * lanes + lane_of_column(j, shape[1], lanes, piece)[0],
        i // teams * (shape[1] // lanes) + lane_of_column(j, shape[1], lanes, piece)[1]))})
    return x


def along_columns_cuda(shape, dtype, threads, lanes, piece):
    """A vector with an entry for each column of such a fragment. Each team of `lanes` threads has it."""
    x = T.alloc_fragment(shape, dtype)
    T.annotate_layout({x: tilelang.layout.Fragment(
        shape, forward_thread_fn=lambda j, team: team * lanes + lane_of_column(j, shape[0], lanes, piece)[0],
        replicate=threads // lanes, forward_index_fn=lambda j: lane_of_column(j, shape[0], lanes, piece)[1])})
    return x


def along_rows_cuda(shape, dtype, threads, lanes, piece):
    """A vector with an entry for each row of such a fragment. All threads of the row's team have it."""
    x, teams = T.alloc_fragment(shape, dtype), threads // lanes
    T.annotate_layout({x: tilelang.layout.Fragment(
        shape, forward_thread_fn=lambda i, one: i % teams * lanes + one, replicate=lanes, forward_index_fn=lambda i: i // teams)})
    return x


def token_rows_cuda(shape, dtype, threads, lanes, piece):
    """A tile of tokens in shared memory, 4 bytes an entry. A lane reads its pieces of 8 columns in halves, and the halves of
    neighbouring lanes lie side by side, in different banks. So do pieces of 4 columns, which are in order."""
    x, columns = T.alloc_shared(shape, dtype), 8 * lanes
    if piece == 8 and shape[1] % columns == 0:
        T.annotate_layout({x: tilelang.layout.Layout(shape, lambda i, j: (
            i, j // columns * columns + j % 8 // 4 * (4 * lanes) + j // 8 % lanes * 4 + j % 4))})
    return x


def token_rows_cpu(shape, dtype, threads, lanes, piece):
    """A tile of tokens."""
    return T.alloc_local(shape, dtype)


def rows_cpu(shape, dtype, threads):
    """A tile whose rows are summed."""
    return T.alloc_local(shape, dtype)


def columns_cpu(shape, dtype, threads):
    """A tile whose columns are summed."""
    return T.alloc_local(shape, dtype)


def state_rows_cpu(shape, dtype, threads, lanes, piece):
    """A tile whose rows are summed."""
    return T.alloc_local(shape, dtype)


def along_columns_cpu(shape, dtype, threads, lanes, piece):
    """A vector with an entry for each column of such a tile."""
    return T.alloc_local(shape, dtype)


def along_rows_cpu(shape, dtype, threads, lanes, piece):
    """A vector with an entry for each row of such a tile."""
    return T.alloc_local(shape, dtype)
