"""blocks: finds a dim that the grid of a kernel may divide into blocks of columns. `cut` uses it."""
from __future__ import annotations

from ...ir.core import Kernel, Loop, Op
from ...ir.types import Tensor
from ...schedule.schedule import Schedule, ScheduleError


def blocked_dim(s: Schedule, blocks: dict[str, int], k: Kernel, tensors: dict[str, Tensor], sizes: dict[str, int]) -> str:
    """The first dim that the kernel's grid may divide into blocks of so many columns, "" if there is none.

    It may if all stored tensors have the dim, no tile has it twice, and no product or sum runs over it.
    """
    ops = [o for st in k.body for o in (st.body if isinstance(st, Loop) else [st]) if isinstance(o, Op)]
    env = {o.out: o.type for o in ops if o.type} | {c.name: c.type for st in k.body if isinstance(st, Loop)
                                                   for c in st.carried}

    def divides(dim: str) -> bool:
        """Whether the grid may divide `dim`."""
        if any(t is not None and t.dims.count(dim) > 1 for t in env.values()):
            return False
        for o in ops:
            if o.kind == "store" and dim not in tensors[o.attr("tensor")].dims:
                return False
            if o.kind in ("row_sum", "row_norm", "row_max") and env[o.args[0]].dims[-1] == dim:
                return False
            if o.kind == "matmul" and env[o.args[0]].dims[0 if o.attr("ta") else 1] == dim:
                return False
        return True

    for dim, block in blocks.items():
        if not block or block >= sizes[dim]:
            continue
        if sizes[dim] % block:
            raise ScheduleError(f"schedule {s.name}: {dim.lower()}_block={block} does not divide {dim}={sizes[dim]}")
        if divides(dim):
            return dim
    return ""
