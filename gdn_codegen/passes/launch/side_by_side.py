"""side_by_side: ops in a row that one statement does.

Running sums and inverses of a whole tile take a warp each: two or four in a row run side by side, where there are warps for them.
Copies of rows of tokens that start together ask once whether the chunk is whole. Those ops are marked with their number, and
stand in a row. `check_storage` holds what they read against what the others write.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from ...devices import Device
from ...ir.core import Kernel, Loop, Op, Program, Stmt, map_loops
from ...ir.ops import BESIDE
from ..stage import takes
from ..storage.place import over
from .block_threads import WARP

#: How many may take a warp each: there is text for so many.
ROWS = (2, 4)


@takes("placed")
def side_by_side(p: Program, device: Device) -> Program:
    """`p` with marks at such ops, in kernels of one agent a block."""
    def kernel(k: Kernel) -> Kernel:
        if k.agents or k.heads_per_block > 1:
            return k
        outer = _marked(p, k, k.body, device)
        return replace(k, body=map_loops(outer, lambda lp: [_inside(p, k, lp, device)]))

    return p.map_kernels(kernel)


def _inside(p: Program, k: Kernel, loop: Loop, device: Device) -> Loop:
    body = _marked(p, k, loop.body, device)
    return replace(loop, body=map_loops(body, lambda lp: [_inside(p, k, lp, device)]))


def _marked(p: Program, k: Kernel, body: tuple[Stmt, ...], device: Device) -> tuple[Stmt, ...]:
    """The body with neighbouring ops that run side by side marked: loads of tokens, and ops that take one warp each."""
    out: list[Stmt] = []
    for kind, run in groupby(body, lambda s: s.kind if isinstance(s, Op) else ""):
        ops = list(run)
        if kind == "load":
            tokens = [o for o in ops if isinstance(o, Op) and o.attr("channel") and p.tensor(o.attr("tensor")).index == "token"]
            last = ops.index(tokens[-1]) if tokens else 0
            out += [*(o for o in ops[:last] if o not in tokens), *(_mark(o, len(tokens)) for o in tokens)]
            out += [o for o in ops[last:] if o not in tokens]
        elif kind and _a_warp_each(p, k, [o for o in ops if isinstance(o, Op)], device):
            out += [_mark(o, len(ops)) for o in ops if isinstance(o, Op)]
        else:
            out += ops
    return tuple(out)


def _a_warp_each(p: Program, k: Kernel, ops: list[Op], device: Device) -> bool:
    """Whether each of `ops`, which differ in their operands alone, is work for one warp."""
    one = ops[0]
    if not (one.kind == "cumsum" and p.sizes["C"] % WARP == 0) and not over(one, device):
        return False
    return len(ops) in ROWS and WARP * len(ops) <= k.threads and all(o.attrs == one.attrs for o in ops)


def _mark(o: Op, n: int) -> Op:
    return o.with_attrs(**{BESIDE: n}) if n > 1 else o
