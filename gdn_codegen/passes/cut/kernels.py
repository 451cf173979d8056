"""cut: makes one kernel of each group of the schedule. A group lists values by name or by role (`roles`), and computes what they
need (`groups`). All targets run it.

A kernel is parallel over chunks unless it needs the state of each chunk and no earlier group wrote that state. Then it walks
the chunks in order. Values that later groups read are stored in workspaces, one tile for each chunk slot. So is
`Program.forgets`. Of the kernels over chunks before the first walk that one stores it which computes most of what it depends on;
without such kernels an added one does.

A vector of `Program.scales` is stored too, if several groups read it, or if only a walk does and a kernel over chunks comes
before. Then a walk loads one number per token instead of summing rows. On cores that share no memory, an added first kernel
computes all of `scales`, because each core sums its own share of the rows.

Example: Gated DeltaNet with the groups (@gate_sum, @inverse) and (@output, @state) gets two kernels. The first is parallel over
chunks and stores G and Tinv. The second walks the chunks, loads G and Tinv, and stores o and S.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Program
from ...ir.types import Tensor
from ...schedule.schedule import Schedule, ScheduleError
from ..stage import takes
from .blocks import blocked_dim
from .boundaries import without_boundaries
from .groups import KernelGroups, Slice
from .resolve import resolved
from .roles import roles

#: The order in which a kernel loads values from workspaces, by role. Row scales come last.
READ_ORDER = ("system", "gate_sum", "state", "inverse", "solution", "offset", "weight", "gate", "")

#: Values that a kernel's name lists at most.
NAMED = 4


@takes("traced", gives="cut")
def cut(p: Program, s: Schedule, sizes: dict[str, int], v_block: int = 0, apart: bool = False) -> Program:
    """The kernels of the groups of `s`.

    sizes: extents of C, K and V. v_block: columns of V that an instance of a walk holds where the schedule does not say, 0 for
    all. apart: whether `scales` get a kernel of their own. Raises ScheduleError for groups that do not fit the page.
    """
    if not any(isinstance(x, Loop) for k in p.kernels for x in k.body):
        raise ScheduleError(f"{p.name}: got a program without a loop over chunks; accepted: a traced page")
    s = resolved(p, s)
    g = KernelGroups(p, s)
    g.check(apart)
    if p.forgets:
        s = replace(s, kernels=g.with_forgets())
        g = KernelGroups(p, s)
    if p.scales:
        s = replace(s, kernels=(p.scales, *s.kernels) if apart else g.with_scales())
        g = KernelGroups(p, s)
    parts = [g.slice(i) for i in range(len(s.kernels))]
    kernels, tensors = [], list(p.tensors)
    for i, part in enumerate(parts):
        read_later = {n for later in parts[i + 1:] for n in later.reads} | {p.forgets}
        kernel, made = _kernel(g, i, part, read_later)
        block = s.v_block or (v_block if part.walks and v_block and sizes["V"] % v_block == 0 else 0)
        blocks = {"V": block, "K": 0 if part.walks else s.k_block}
        dim = blocked_dim(s, blocks, kernel, {t.name: t for t in [*tensors, *made]}, sizes)
        kernels.append(replace(kernel, blocked_dim=dim, dims=((dim, blocks[dim]),) if dim else ()))
        tensors += made
    return replace(p, kernels=tuple(kernels), tensors=tuple(tensors), dims=tuple(sizes.items()), scales=())


def _read_order(g: KernelGroups) -> Callable[[str], tuple[int, int]]:
    """The sort key of values that a kernel reads from workspaces: first the role, then the place in the program. Names do not
    matter."""
    role_of = roles(g.p)

    def key(n: str) -> tuple[int, int]:
        if n in g.p.scales:
            return len(READ_ORDER), -g.p.scales.index(n)
        role = next((i for i, r in enumerate(READ_ORDER) if n in role_of.get(r, ())), len(READ_ORDER) - 1)
        return role, list(g.states).index(n) if n in g.states else list(g.defs).index(n)
    return key


def _workspace(g: KernelGroups, n: str) -> Tensor:
    """The workspace of a value: one tile for each chunk slot. An output that is one serves as it is."""
    o = g.defs.get(n)
    if n in g.outputs and (out := g.p.tensor(g.outputs[n].attr("tensor"))).index == "slot":
        return out
    t = g.states[n].type if o is None else o.type
    assert t is not None
    return Tensor(f"{n}_ws", "workspace", "slot", "HV", t.dims, t.dtype, wide=o is not None and bool(o.attr("wide")))


def _kernel(g: KernelGroups, i: int, part: Slice, read_later: set[str]) -> tuple[Kernel, list[Tensor]]:
    """The kernel of group i, and the workspaces that it writes. read_later: the values that later groups read."""
    group = g.s.kernels[i]
    made = {n: t for n in group if n in read_later and (t := _workspace(g, n)).role == "workspace"}
    body: list[Op] = []
    for n in sorted(part.reads, key=_read_order(g)):
        t = _workspace(g, n)
        body.append(Op("load", n, (), (("tensor", t.name),), t.tile))
    body += [Op("store", "", (n,), (("tensor", made[n].name),)) for n in group if n in made and n in g.states]
    for o in g.loop.body:
        assert isinstance(o, Op)
        if o.out in part.ops:
            body.append(o)
            if o.out in made:
                body.append(Op("store", "", (o.out,), (("tensor", made[o.out].name),)))
        elif o.kind == "store" and (o.args[0] in {x for n in group if n in g.states for x in (n, g.states[n].next)}
                                    if o in g.kept else o.args[0] in group):
            body.append(o)
    name = "_".join(group if len(group) <= NAMED else (*group[:NAMED - 1], "and", str(len(group) - NAMED + 1), "more"))
    body = without_boundaries(body, {n for c in g.loop.carried for n in (c.name, c.next)})
    if not part.walks:
        return Kernel(name, "chunks", tuple(body)), [*made.values()]
    walked = tuple(c for c in g.loop.carried if c.next in part.ops or c.next in part.reads)
    # A state that an earlier group wrote is loaded like any value, so it is not walked again.
    walked = tuple(c for c in walked if c.name not in part.reads)
    before = [o for o in g.whole.body if isinstance(o, Op) and o.out in {c.init for c in walked}]
    after = [o for o in g.whole.body if isinstance(o, Op) and o.kind == "store"
             and o.args[0] in {c.result for c in walked if c.name in group}]
    return Kernel(name, "sequences", (*before, replace(g.loop, carried=walked, body=tuple(body)), *after)), [*made.values()]
