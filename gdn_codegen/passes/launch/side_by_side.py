"""side_by_side: marks neighbouring ops that one statement runs at the same time. For TileLang kernels with one agent a block.

- A running sum, or an inverse of a whole tile, takes one warp. Two or four such ops in a row run side by side, if the block has
  enough warps.
- Two `decayed_pairs` in a row with the same second operand and sums share what scales their operands. Of three or more in a row
  none are marked.

The marked ops are neighbours, and each mark says how many there are. `check_storage` checks that no op of such a row writes
what another one reads.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from ...devices import Device
from ...ir.core import Kernel, Loop, Op, Program, Stmt, map_loops
from ...ir.ops import BESIDE
from ...ir.types import WARP
from ..stage import takes
from ..storage.stored_values import over

#: The numbers of ops that may run side by side, one warp each. Emitters have text for these.
ROWS = (2, 4)


@takes("placed")
def side_by_side(p: Program, device: Device) -> Program:
    """`p` with marks on such ops."""
    def kernel(k: Kernel) -> Kernel:
        if k.agents or k.batch.way == "threads":
            return k
        outer = _marked(p, k, k.body, device)
        return replace(k, body=map_loops(outer, lambda lp: [_inside(p, k, lp, device)]))

    return p.map_kernels(kernel)


def _inside(p: Program, k: Kernel, loop: Loop, device: Device) -> Loop:
    """The loop with marks in its body and in inner loops."""
    body = _marked(p, k, loop.body, device)
    return replace(loop, body=map_loops(body, lambda lp: [_inside(p, k, lp, device)]))


def _marked(p: Program, k: Kernel, body: tuple[Stmt, ...], device: Device) -> tuple[Stmt, ...]:
    """The body with marks on neighbouring ops that run side by side."""
    out: list[Stmt] = []
    for kind, run in groupby(body, lambda s: s.kind if isinstance(s, Op) else ""):
        row = list(run)
        ops = [o for o in row if isinstance(o, Op)]
        beside = bool(kind) and _beside(p, k, ops, device)
        out += [o.with_attrs(**{BESIDE: len(ops)}) for o in ops] if beside else row
    return tuple(out)


def _beside(p: Program, k: Kernel, ops: list[Op], device: Device) -> bool:
    """Whether `ops` run side by side. If each is work for one warp, they differ only in their operands, and the block has a warp
    for each."""
    one = ops[0]
    if one.kind == "decayed_pairs":
        return len(ops) == 2 and all(o.args[1:] == one.args[1:] and o.attrs == one.attrs for o in ops)
    if not (one.kind == "cumsum" and p.sizes["C"] % WARP == 0) and not over(one, device):
        return False
    return len(ops) in ROWS and WARP * len(ops) <= k.threads and all(o.attrs == one.attrs for o in ops)
