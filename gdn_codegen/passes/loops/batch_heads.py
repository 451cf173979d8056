"""batch_heads: value heads of one key head as one instance.

Of a kernel over chunks that has products, an instance takes as many value heads as the schedule says, all of one key head: HV is
that multiple of H. What depends on the key head alone is loaded and computed once. What waits (loads, running sums, inverses)
is done for all heads in a row, so that they wait together; all else head by head, so that little is held at a time.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Op, Program
from ...schedule.schedule import Schedule
from ..stage import takes
from .interleave_heads import Copies

WAITS = ("load", "cumsum", "row_sum", "diag_inverse")


@takes("assigned")
def batch_heads(p: Program, s: Schedule) -> Program:
    """`p` with such kernels widened to the schedule's `value_heads`."""
    return p if s.value_heads == 1 else p.map_kernels(lambda k: _widened(p, k, s.value_heads) if _fits(k) else k)


def _fits(k: Kernel) -> bool:
    ops = [o for o in k.body if isinstance(o, Op)]
    return k.grid == "chunks" and k.heads_per_block == 1 and len(ops) == len(k.body) and any(o.kind == "matmul" for o in ops)


def _widened(p: Program, k: Kernel, n: int) -> Kernel:
    """The kernel with n value heads in an instance: ops of the key head once, the others once for each head."""
    ops = [o for o in k.body if isinstance(o, Op)]
    copies, common = Copies(ops, n), set[str]()
    out: list[Op] = []
    run: list[Op] = []  # of one head after the other

    def flush() -> None:
        out.extend(copies.of(o, lane) for lane in range(n) for o in run)
        run.clear()

    for o in ops:
        of = o.attr("tensor")
        if o.kind != "store" and (not of or p.tensor(of).heads == "H") and common.issuperset(o.args):
            common.add(o.out)
            flush()
            out.append(o)
        elif o.kind in WAITS:
            flush()
            out.extend(copies.of(o, lane) for lane in range(n))
        else:
            run.append(o)
    flush()
    return replace(k, lanes=n, body=tuple(out))
