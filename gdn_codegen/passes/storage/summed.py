"""summed: which ops sum tiles or vectors among the threads of an agent. For Hopper's warp groups."""
from __future__ import annotations

from ...ir.core import Op

#: Ops whose results lie in shared memory, where threads of an agent write them. They read tiles from fragments.
SUMS = ("row_sum", "column_sum", "cumsum")


def is_sum(o: Op) -> bool:
    """Whether `o` is such a sum. Running sums of a tile are none: the threads that compute them need nothing of each other."""
    return o.kind in SUMS and not (o.kind == "cumsum" and o.type is not None and o.type.rank == 2)
