"""arrange: chooses interleaved heads, prefetch, cached masks and the order of ops for each kernel. For cores (PTO).

The schedule's `value_heads`, `prefetch`, `cache_masks` and `order` say what is wanted. The spaces of the device limit what fits.
For each kernel the pass tries variants and takes the first for which `pack` finds room. It prefers more heads, then `prefetch`,
then more cached masks. If none fits, it orders ops for few live values, and then also loads tiles again for each reader.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, prod

from ...devices import Cores
from ...ir.core import Kernel, Program
from ...ir.types import BYTES, Tensor
from ...schedule.schedule import Schedule, ScheduleError
from ..common import with_tensors
from ..heads.interleaved import interleaved
from ..heads.number import heads
from ..loops.depth_first import depth_first
from ..loops.hoist import candidates, hoist
from ..loops.list_scheduling import list_scheduling
from ..loops.prefetch import prefetch
from ..loops.reload import reload
from ..stage import takes
from .core_values import is_view, pipe
from .live_ranges import late_loads, with_copies
from .offsets import NoRoom
from .pack import KernelValues

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
    left: dict[str, set[tuple[str, str]]] = {}  # value or channel -> pipes that the paths to it have left
    made: dict[str, tuple[str, str]] = {}
    for o in k.ops:
        if is_view(o):
            if o.args and o.args[0] in made:
                left[o.out], made[o.out] = left[o.args[0]], made[o.args[0]]
            continue
        sources = [*o.args, *([o.attr("tensor")] if o.kind == "load" else [])]
        mine = pipe(device, o)
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
        sizes = [prod(t.tile.shape(p.sizes)) * BYTES[t.dtype] // device.copies[device.agents[0]]
                 for t in map(whole.tensor, masks)]

        def variant(what: str, kept: int, wide: Kernel = wide, whole: Program = whole,
                    masks: list[str] = masks) -> tuple[Kernel, float]:
            """The variant with the first `kept` masks cached, and how many bytes it lacks."""
            done = prefetch(whole, hoist(wide, set(masks[:kept])), what, device)
            done = list_scheduling(whole, done, device) if s.order == "list" else done
            return done, lacking(whole, done, s, roomy if kept else device)

        for what in ahead:
            lacks: float = 0
            if sum(sizes) * 4 > roomy.spaces[home]:  # less than that nearly always fits
                lacks = lacking(whole, prefetch(whole, hoist(wide, set(masks)), what, device), s, roomy)
            found = _most(partial(variant, what), sizes, lacks)
            if found is not None:
                return found, made
    for x in (k, reload(k, device)):
        x = depth_first(p, x, device)
        if not lacking(p, x, s, device):
            return x, []
    return k, []  # `pack` raises the error that names the values


def _most(variant: Callable[[int], tuple[Kernel, float]], sizes: list[int], lacks: float) -> Kernel | None:
    """The variant with the most masks. None if not even the variant without masks fits. A variant fits if one with more masks
    does. Therefore few variants are tried.

    variant: a number of masks -> the variant with them, and how many bytes it lacks. sizes: the bytes of each mask. lacks: how
    many bytes the variant with all masks lacks before its ops are ordered, which is about what it lacks. The one without so many
    bytes of masks is the first guess.
    """
    def guess(most: int, least: int) -> int:
        """How many masks fit, at most `most`, if those lack `lacks` bytes. At least `least`."""
        return max((n for n in range(least, most + 1) if sum(sizes[n:most]) >= lacks), default=least)

    found, low, high = None, -1, len(sizes) + 1  # low fits, high does not
    n = guess(len(sizes), 0)
    tries = 0
    while high - low > 1:
        k, lacks = variant(n)
        tries += 1
        if lacks:
            high, n = n, guess(n, low + 1) if tries < 3 else (low + n) // 2
        else:
            found, low, n = k, n, n + 1 if tries < 3 else (n + high) // 2
    return found


def lacking(p: Program, k: Kernel, s: Schedule, device: Cores) -> float:
    """How many bytes a space lacks for the values of a kernel, at least. 0 if all fit, inf if a core cannot hold one."""
    k, lacks = with_copies(k, device), inf
    for x in (late_loads(k), k):  # most kernels fit only with late loads
        try:
            KernelValues(p, x, s, device)
            return 0
        except NoRoom as e:
            lacks = min(e.lacking, lacks)
            if e.lacking > 1:  # so many bytes are live at once, and more would be with early loads
                break
        except ScheduleError:
            pass
    return lacks
