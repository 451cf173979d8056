"""warm_up_bounds: computes the exact bound on forgetting only for chunks that a warm-up may need. Not for devices with cores.

A warm-up needs the bounds of the chunks right before a part. Nothing reads those of other chunks. The bound may depend on tiles
that the storing kernel would not load otherwise (rows of k, for their norms). Then that kernel stores two substitutes. One is a
lower bound on the exact bound, which needs no such load. The other is infinity in place of the exact bound, which means
"nothing is forgotten". A further kernel then overwrites infinities with exact bounds: for the chunks before each part that the
warm-up needs by the lower bound, and for some more. A part that looks further back finds infinity. It then starts from a
summary, or from the start of its sequence. That is slower, with the same result.

With `partition="short"` no part looks further back than the longest warm-up. So one kernel computes the bounds of so many chunks
before each part, and no other kernel does.
"""
from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from ...devices import Cores, Device
from ...ir.body import Body
from ...ir.core import Kernel, Loop, Program, Stmt, walk
from ...ir.ops import OPS
from ...ir.types import Tensor
from ...schedule.schedule import Schedule
from ..common import dead_code
from ..stage import takes
from .partition import begins, longest_short

#: The number of instances that share the chunks before a part. Each handles its chunks one after another.
SLICES = 16
#: A margin, as a fraction of the chunks that suffice by the lower bound: norms can make the exact warm-up a little longer.
MARGIN = 0.25


@takes("cut")
def warm_up_bounds(p: Program, s: Schedule, device: Device, dtype: str) -> Program:
    """`p` with the bound in a kernel of its own, if the kernel that stores it then reads fewer tiles, or if warm-ups are short.
    Otherwise `p` itself."""
    if not p.forgets or isinstance(device, Cores):  # `partition` refuses such a device
        return p
    at = f"{p.forgets}_ws"
    i, k = next((i, k) for i, k in enumerate(p.kernels) if any(o.attr("tensor") == at for o in k.ops))
    ops = k.ops
    (store,) = (o for o in ops if o.attr("tensor") == at)
    bound = dead_code((*(o for o in ops if o.out), store), set())
    others = dead_code(tuple(o for o in ops if o is not store), set())
    step = min(k.step for k in p.kernels)
    if s.partition == "short":
        rest = (replace(k, name=k.name.replace(p.forgets, "").strip("_"), body=others),) if others else ()
        before = _short(p, bound, step)
        return replace(p, kernels=(*p.kernels[:i], before, *rest, *p.kernels[i + 1:]))
    b = Body({t.name: t for t in p.tensors})
    for o in walk(others):
        b.copy(o)
    b.taken |= {o.out for o in ops}
    least = _Least(bound, b).of(p.forgets)
    if not least or _tiles(p, bound) <= _tiles(p, others):
        return p
    t = Tensor(f"{least}_ws", "workspace", "slot", "HV", ())
    b.tensors[t.name] = t
    b.op("store", least, tensor=t.name)
    b.op("store", b.op("const", value=inf), tensor=at)
    first = replace(k, name=k.name.replace(p.forgets, t.name.removesuffix("_ws")), body=b.finish())
    second = _before(p.forgets, b.tensors, bound, begins(t.name, device, dtype, p.sizes["C"], step), step)
    return replace(p, tensors=(*p.tensors, t), kernels=(*p.kernels[:i], first, second, *p.kernels[i + 1:]))


def _short(p: Program, body: tuple[Stmt, ...], step: int) -> Kernel:
    """A kernel that runs `body` for as many chunks before each part as a short warm-up may have."""
    b, chunks = Body({t.name: t for t in p.tensors}), longest_short(p.sizes["C"])
    b.taken |= {o.out for o in walk(body)}
    longest = b.op("const", value=float(chunks), name=b.fresh("longest_warm_up"))
    b.stmts.append(Loop("before", (), body, longest, step))
    return Kernel(p.forgets, "parts", b.finish(), slices=chunks)


def _before(name: str, tensors: dict[str, Tensor], body: tuple[Stmt, ...], begins: dict[str, Any], step: int) -> Kernel:
    """A kernel that runs `body` for the chunks that a walk of this step passes before a part."""
    b = Body(tensors)
    b.taken |= {o.out for o in walk(body)}
    # -1: no warm-up is short enough, whatever the norms are (in a call with summaries)
    enough = b.op("warm_up_length", name=b.fresh("warm_up_least"), **begins)
    more = b.op("mul", enough, b.op("const", value=1 + MARGIN), name=b.fresh("warm_up_with_margin"))
    warm_up = b.op("add", more, b.op("const", value=1.0), name=b.fresh("warm_up"))
    b.stmts.append(Loop("before", (), body, warm_up, step))
    return Kernel(name, "parts", b.finish(), slices=SLICES)


def _tiles(p: Program, body: tuple[Stmt, ...]) -> set[str]:
    """The tensors of tiles (rank 2) that the body loads."""
    return {o.attr("tensor") for o in walk(body) if o.kind == "load" and len(p.tensor(o.attr("tensor")).dims) > 1}


class _Least:
    """Lower bounds of values: the same sums without terms that are never negative."""

    def __init__(self, body: tuple[Stmt, ...], b: Body) -> None:
        self.defs, self.b = {o.out: o for o in walk(body)}, b

    def of(self, name: str) -> str:
        """A value of the new body that is at most `name`. "" if none is known."""
        o = self.defs[name]
        if name in self.b.types:
            return name
        if o.kind == "add":
            return next((self.of(x) for x, y in (o.args, o.args[::-1]) if self.positive(y)), "")
        if o.kind == "load" and len(self.b.tensors[o.attr("tensor")].dims) == 1:
            return self.b.copy(o)
        if o.kind not in ("valid", "cumsum") and not OPS[o.kind].entry:
            return ""
        x = self.of(o.args[0])
        return x and self.b.op(o.kind, x, line=o.line, name=self.b.fresh(f"{name}_least"), **dict(o.attrs))

    def positive(self, name: str) -> bool:
        """Whether the value is never negative: it is at least 1, or the log of such a value."""
        o = self.defs[name]
        of = self.defs[o.args[0]] if o.kind == "log" else o
        return of.kind == "maximum" and any(self.defs[x].kind == "const" and self.defs[x].attr("value") >= 1 for x in of.args)
