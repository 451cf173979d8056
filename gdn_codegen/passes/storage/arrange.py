"""arrange: chooses interleaved heads, prefetch, cached masks and the order of ops for each kernel. For cores (PTO).

The schedule's `value_heads`, `prefetch`, `cache_masks` and `order` say what is wanted. The spaces of the device limit what fits.
For each kernel the pass tries variants and takes the first for which `pack` finds room. It prefers more heads, then `prefetch`,
then more cached masks.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import product

from ...devices import Cores
from ...ir.core import Kernel, Op, Program, walk
from ...ir.types import Tensor
from ...schedule.schedule import Schedule
from ..common import with_tensors
from ..heads.batch_heads import heads
from ..heads.interleaved import interleaved
from ..loops.hoist import candidates, hoist
from ..loops.list_scheduling import list_scheduling
from ..loops.prefetch import prefetch
from ..stage import takes
from .pack import VIEWS, fits

ROOM = 0.8  # with cached masks, values may fill this fraction of the space; in a full space ops wait for each other


@takes("fed")
def arrange(p: Program, s: Schedule, device: Cores) -> Program:
    """`p` with every kernel in the best variant that fits."""
    kernels, made = [], []
    for k in p.kernels:
        variant, channels = _best(p, k, s, device)
        kernels.append(variant)
        made += channels
    return with_tensors(replace(p, kernels=tuple(kernels)), *made)


def _returns(k: Kernel, device: Cores) -> bool:
    """Whether the path to some value leaves a pipe and returns to it. The pipe idles meanwhile, so a second head can use it."""
    def pipe(o: Op) -> str:
        table = device.pipes[o.agent]
        return f"{o.agent}.{table.get(o.kind, table.get('*', ''))}"

    left: dict[str, set[str]] = {}  # value or channel -> pipes that the paths to it have left
    made: dict[str, str] = {}
    for o in walk(k.body):
        if o.kind in VIEWS:
            if o.args and o.args[0] in made:
                left[o.out], made[o.out] = left[o.args[0]], made[o.args[0]]
            continue
        sources = [*o.args, *([o.attr("tensor")] if o.kind == "load" else [])]
        mine = pipe(o)
        seen = {x for a in sources for x in left.get(a, set()) | {made.get(a, mine)}} - {mine}
        back = any(mine in left.get(a, set()) and made.get(a) != mine for a in sources)
        if back:
            return True
        target = o.out or o.attr("tensor")
        left[target], made[target] = seen, mine
    return False


def _best(p: Program, k: Kernel, s: Schedule, device: Cores) -> tuple[Kernel, list[Tensor]]:
    """The first variant of a kernel that fits, and the workspaces that it adds. If none fits, the kernel itself."""
    home = device.home[device.agents[0]]
    roomy = replace(device, spaces={**device.spaces, home: int(device.spaces[home] * ROOM)})
    most = heads(s, device, "interleaved") if k.grid == "chunks" and _returns(k, device) else 1
    ahead = dict.fromkeys((s.prefetch, "no")) if k.grid == "sequences" else ("no",)
    for n in range(most, 0, -1):
        wide, made = interleaved(p, k, n)
        whole = with_tensors(p, *made)
        masks = candidates(whole, wide) if s.cache_masks else []
        for what, kept in product(ahead, range(len(masks), -1, -1)):
            variant = prefetch(whole, hoist(wide, set(masks[:kept])), what, device)
            variant = list_scheduling(whole, variant, device) if s.order == "list" else variant
            if fits(whole, variant, s, roomy if kept else device):
                return variant, made
    return k, []  # `pack` raises the error that names the values
