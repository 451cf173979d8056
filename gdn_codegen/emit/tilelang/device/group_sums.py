"""Sums that warp groups compute of fragments in the layout of a product's result, and one warp of a vector."""
import tilelang.language as T

from .headers import HELPERS
from .tiles import pointer


@T.macro
def group_row_sums_cuda(x, sums, thread):
    """The sum of each row of a fragment, to shared memory."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"group_row_sums<{x.shape[1]}>", pointer(sums, "w"), x.access_ptr("r"), thread)


@T.macro
def group_column_sums_cuda(x, sums, thread):
    """The sum of each column of a fragment over 16 rows, those of a warp, to shared memory."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"group_column_sums<{x.shape[1]}>", pointer(sums, "w"), x.access_ptr("r"), thread)


@T.macro
def warp_cumsum_cuda(x, thread):
    """Running sums of a vector in shared memory, in place, by a warp."""
    T.import_source(HELPERS)
    entries = (x.buffer if hasattr(x, "region") else x).shape[-1]
    T.call_extern("handle", f"warp_cumsum<{entries}>", pointer(x, "rw"), thread)


# TileLang is told that `tile` is written, unlike in `store_tile`. So it adds a fence before the agent's next product. Passes
# derive fences here, too, but kernels with wide tiles were not measured without TileLang's.
@T.macro
def store_wide_tile_cuda(x, tile, thread):
    """From a fragment of several times 64 columns to shared memory, which has blocks of 64 columns."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"store_wide_tile<{x.shape[0]}, {x.shape[1]}>", pointer(tile, "w"), x.access_ptr("r"), thread)
