"""heads_by_product: batches running sums of value heads by one matrix product. For devices with cores (PTO).

It applies to kernels over chunks that do nothing but sum up loaded vectors of one number per token. The vectors of the heads are
the columns of a tile X, [C, heads]. Their sums are the rows of X^T L^T, where L is the lower triangle of ones. The cube core
computes all of them at once. A vector core would sum one head after another.

If x is zero after an entry, all later entries are equal to it bit for bit, because they add the same terms in the same order.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.body import Body
from ...ir.core import Kernel, Op, Program
from ...ir.types import Batch, Tensor
from ...schedule.schedule import Schedule
from ..common import rebuild_kernel, with_tensors
from ..stage import takes
from .number import heads

MASK = Tensor("lower_mask", "workspace", "const", "HV", ("C", "C"), fill="lower 1.0 0.0")


@takes("decomposed")
def heads_by_product(p: Program, s: Schedule, device: Cores) -> Program:
    """`p` with several heads in an instance of such kernels, as many as the device says. `p` itself if a chunk is no multiple of
    their number, or if L does not fit the operands' space. It runs before `assign`, as a product needs the cube core."""
    n, side = heads(s, device, "product"), p.sizes["C"]
    if n == 1 or side % n or 4 * side * side > device.spaces[device.feeds[1]]:
        return p
    chosen = [k.name for k in p.kernels if _only_sums(p, k)]
    if not chosen:
        return p
    p = with_tensors(p, MASK)

    def batched(k: Kernel) -> Kernel:
        return replace(rebuild_kernel(p, k, lambda o, b: _rule(o, b, n)), batch=Batch(n, "product"))

    return p.map_kernels(lambda k: batched(k) if k.name in chosen else k)


def _only_sums(p: Program, k: Kernel) -> bool:
    """Whether `k` only loads a caller's tensors of one number per token and value head, sums them and stores the sums."""
    kind = {o.out: o.kind for o in k.body if isinstance(o, Op) and o.out}

    def fits(o: Op) -> bool:
        if o.kind == "cumsum":
            return o.attr("least") is None
        t = p.tensor(o.attr("tensor")) if o.kind in ("load", "store") else None
        if t is None or t.dims != ("C",) or t.heads != "HV" or t.optional:
            return False
        return t.index == "token" if o.kind == "load" else t.index == "slot" and kind[o.args[0]] == "cumsum"

    return k.grid == "chunks" and k.batch.heads == 1 and all(isinstance(o, Op) and fits(o) for o in k.body)


def _rule(o: Op, b: Body, n: int) -> str:
    """`cumsum` becomes a product with the lower triangle of ones. Loads and stores access `n` heads."""
    if o.kind == "cumsum":
        mask = b.op("load", name=b.fresh(MASK.name), tensor=MASK.name, line=o.line)
        return b.op("matmul", o.args[0], mask, ta=True, tb=True, name=o.out, line=o.line)
    return b.op(o.kind, *o.args, name=o.out, line=o.line, heads=n, **dict(o.attrs))
