"""by_rows: which tiles threads of warp groups store by rows, from registers in the order of a product's sum. `rings` gives such a
tile registers, and `layouts` that order.

In that order four threads have 16 bytes of a row, 4 bytes each. They exchange what they have, so that each stores 16 bytes.
"""
from __future__ import annotations

from ...ir.core import Op, Program
from ...ir.types import BYTES

#: The rows of a product's sum that a warp group holds. A tile that it moves has as many columns.
ROWS = 64


def stored_by_rows(p: Program, o: Op) -> bool:
    """Whether `o` stores a tile of a chunk in 16 bits, so that threads can store 16 bytes of a row each."""
    t = p.tensor(o.attr("tensor")) if o.kind == "store" else None
    return t is not None and t.index in ("token", "slot") and len(t.dims) == 2 and BYTES[t.dtype] == 2 and not any(p.padded(t))


def held(tile: tuple[int, ...], rows: int, o: Op) -> bool:
    """Whether warp groups that hold so many rows have a tile in that order, and the function for its store takes it."""
    return tile[0] == rows and (tile[1] == ROWS if o.attr("transposed") else not tile[1] % ROWS)
