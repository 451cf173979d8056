"""batch_heads: computes several value heads of one key head in one instance. For TileLang (option `value_heads`).

It applies to kernels over chunks that have products. An instance takes `value_heads` value heads of one key head, so this
number must divide HV / H. Ops that depend on the key head only are done once. Ops with a long latency (loads, sums, inverses)
are done for all heads in a row, so that their waits overlap. All other ops are done head by head, so that few values are live
at a time.

Example, with two heads:
    before:  k = load k; x = k @ k.T; b = load beta; A = b * x; T = diag_inverse(A)
    after:   k = load k; x = k @ k.T; b = load beta; b_b = load beta (lane 1); A = b * x; A_b = b_b * x;
             T = diag_inverse(A); T_b = diag_inverse(A_b)
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
    """`p` with such kernels widened to the schedule's `value_heads`. `p` itself if that is 1."""
    return p if s.value_heads == 1 else p.map_kernels(lambda k: _widened(p, k, s.value_heads) if _fits(k) else k)


def _fits(k: Kernel) -> bool:
    """Whether `k` is a kernel over chunks with products and without loops."""
    ops = [o for o in k.body if isinstance(o, Op)]
    return k.grid == "chunks" and k.heads_per_block == 1 and len(ops) == len(k.body) and any(o.kind == "matmul" for o in ops)


def _widened(p: Program, k: Kernel, n: int) -> Kernel:
    """The kernel with n value heads in an instance: ops of the key head once, the others once for each head."""
    ops = [o for o in k.body if isinstance(o, Op)]
    copies, common = Copies(ops, n), set[str]()
    out: list[Op] = []
    run: list[Op] = []  # ops that are done head by head

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
