"""Stores of rows of tiles that warp groups have in registers."""
import tilelang.language as T

from .headers import HELPERS


@T.macro
def store_rows_cuda(x, first, second, rows, thread, transposed=False):
    """From a fragment in 16 bit to the first `rows` rows in global memory. first, second: the addresses of the first two rows.
    transposed: the columns of the fragment are the rows in memory."""
    T.import_source(HELPERS)
    T.call_extern("handle", f"store_rows<{x.shape[1]}, {str(transposed).lower()}>", x.access_ptr("r"), first, second, rows,
                  thread)
