"""batch_head_sums: running sums of several value heads by one product.

A kernel over chunks that only adds up what it loads, one value a token, takes HEADS value heads as one item. Their values
are the columns of a tile X, [C, heads], and their sums the rows of X^T L^T, L the lower triangle of ones: what multiplies
does it at once, where a vector core adds up one head after another. Entries after which x is zero come out equal to the
bit, since their terms are equal in number, order and value.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.builder import Body
from ...ir.core import Kernel, Op, Program
from ...ir.types import Tensor
from ..common import rebuild_kernel, with_tensors
from ..stage import takes

HEADS = 16  # a matrix unit takes so many rows at least
MASK = Tensor("lower_mask", "workspace", "const", "HV", ("C", "C"), fill="lower 1.0 0.0")


@takes("decomposed")
def batch_head_sums(p: Program, device: Cores) -> Program:
    """`p` with such kernels in that form."""
    side = p.sizes["C"]
    if side % HEADS or 4 * side * side > device.spaces[device.feeds[1]]:
        return p
    chosen = [k.name for k in p.kernels if _only_sums(p, k)]
    if not chosen:
        return p
    p = with_tensors(p, MASK)
    return p.map_kernels(lambda k: replace(rebuild_kernel(p, k, _rule), lanes=HEADS) if k.name in chosen else k)


def _only_sums(p: Program, k: Kernel) -> bool:
    """Whether all that happens is: a load from a caller's tensor of one value a token and value head, cumsum, store."""
    kind = {o.out: o.kind for o in k.body if isinstance(o, Op) and o.out}

    def fits(o: Op) -> bool:
        if o.kind == "cumsum":
            return o.attr("least") is None
        t = p.tensor(o.attr("tensor")) if o.kind in ("load", "store") else None
        if t is None or t.dims != ("C",) or t.heads != "HV" or t.optional:
            return False
        return t.index == "token" if o.kind == "load" else t.index == "slot" and kind[o.args[0]] == "cumsum"

    return k.grid == "chunks" and all(isinstance(o, Op) and fits(o) for o in k.body)


def _rule(o: Op, b: Body) -> str:
    if o.kind == "cumsum":
        mask = b.op("load", name=b.fresh(MASK.name), tensor=MASK.name, line=o.line)
        return b.op("matmul", o.args[0], mask, ta=True, tb=True, name=o.out, line=o.line)
    return b.op(o.kind, *o.args, name=o.out, line=o.line, heads=HEADS, **dict(o.attrs))
