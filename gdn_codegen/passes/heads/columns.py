"""heads_by_columns: batches running sums of value heads as the columns of a tile. For devices with cores (PTO).

It applies to kernels over chunks that do nothing but sum up loaded vectors of one number per token. The vectors of the heads are
the columns of a tile, [C, heads], as they lie in a caller's memory. Each vector core has some of the columns with all of their
rows, so it bounds the terms of all of them at once, and adds whole rows.

If x is zero after an entry, all later entries are equal to it bit for bit, because they add the same terms in the same order.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.body import Body
from ...ir.core import Kernel, Op, Program
from ...ir.types import Batch
from ...schedule.schedule import Schedule
from ..common import rebuild_kernel
from ..stage import takes
from .number import heads


@takes("decomposed")
def heads_by_columns(p: Program, s: Schedule, device: Cores) -> Program:
    """`p` with several heads in an instance of such kernels, as many as the device says."""
    n = heads(s, device, "columns")

    def batched(k: Kernel) -> Kernel:
        if n == 1 or not _only_sums(p, k):
            return k
        return replace(rebuild_kernel(p, k, lambda o, b: _rule(o, b, n)), batch=Batch(n, "columns"))

    return p.map_kernels(batched)


def _only_sums(p: Program, k: Kernel) -> bool:
    """Whether `k` only loads a caller's tensors of one number per token and value head, sums them and stores the sums."""
    kind = {o.out: o.kind for o in k.body if isinstance(o, Op) and o.out}

    def fits(o: Op) -> bool:
        if o.kind == "cumsum":
            return True
        t = p.tensor(o.attr("tensor")) if o.kind in ("load", "store") else None
        if t is None or t.dims != ("C",) or t.heads != "HV" or t.optional or t.dtype != "float32":
            return False
        return t.index == "token" if o.kind == "load" else t.index == "slot" and kind[o.args[0]] == "cumsum"

    return k.grid == "chunks" and k.batch.heads == 1 and all(isinstance(o, Op) and fits(o) for o in k.body)


def _rule(o: Op, b: Body, n: int) -> str:
    """`cumsum` sums columns. Loads and stores access `n` heads."""
    how = {"by_head": True} if o.kind == "cumsum" else {"heads": n}
    return b.op(o.kind, *o.args, name=o.out, line=o.line, **how, **dict(o.attrs))
