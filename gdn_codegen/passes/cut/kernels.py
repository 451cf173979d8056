"""cut: makes one kernel of each group of the schedule. A group lists values by name or by role (`roles`). All targets run it.

A kernel is parallel over chunks unless it needs the state of each chunk and no earlier group wrote that state. Then it walks
the chunks in order. Values that later groups read are stored in workspaces, one tile a chunk slot. So is `Program.forgets`. The
first kernel stores it if that is parallel over chunks; otherwise an added kernel before it does.

A vector of `Program.scales` is stored too, if several groups read it, or if only a walk does and a kernel over chunks comes
before. Then a walk loads one number a token instead of summing rows. On cores that share no memory, an added first kernel
computes all of `scales`, because each core sums its own share of the rows.

Example: Gated DeltaNet with the groups (@gate_sum, @inverse) and (@output, @state) gets two kernels. The first is parallel over
chunks and stores G and Tinv. The second walks the chunks, loads G and Tinv, and stores o and S.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Program, Stmt
from ...ir.types import Tensor
from ...schedule.schedule import Schedule, ScheduleError
from ..stage import takes
from .roles import roles, with_names

#: The order in which a kernel loads values from workspaces, by role. Row scales come last.
READ_ORDER = ("system", "gate_sum", "state", "inverse", "solution", "offset", "weight", "gate", "")


@takes("traced", gives="cut")
def cut(p: Program, s: Schedule, sizes: dict[str, int], v_block: int = 0, apart: bool = False) -> Program:
    """The kernels that `s.kernels` describes.

    sizes: extents of C, K and V. v_block: columns of V that an instance of a walk holds where the schedule does not say, 0 for
    all. apart: whether `scales` get a kernel of their own. Raises ScheduleError for groups that do not fit the page.
    """
    (whole,) = p.kernels
    loop = next((x for x in whole.body if isinstance(x, Loop)), None)
    if loop is None:
        raise ScheduleError(f"{p.name}: the program has no walk over chunks")
    s = resolved(p, s)
    g = _Graph(p, s, whole, loop)
    g.check(apart)
    if p.forgets:
        joins = not g.slice(0).walks
        s = replace(s, kernels=((*(s.kernels[0] if joins else ()), p.forgets), *s.kernels[joins:]))
        g = _Graph(p, s, whole, loop)
    if p.scales:
        s = replace(s, kernels=(p.scales, *s.kernels) if apart else g.with_scales())
        g = _Graph(p, s, whole, loop)
    parts = [g.slice(i) for i in range(len(s.kernels))]
    kernels, tensors = [], list(p.tensors)
    for i, part in enumerate(parts):
        read_later = {n for later in parts[i + 1:] for n in later.reads} | {p.forgets}
        kernel, made = g.kernel(i, part, read_later)
        block = s.v_block or (v_block if part.walks and v_block and sizes["V"] % v_block == 0 else 0)
        split = _split(s, block, kernel, {t.name: t for t in [*tensors, *made]}, sizes)
        kernels.append(replace(kernel, split=split, dims=((split, block),) if split else ()))
        tensors += made
    return replace(p, kernels=tuple(kernels), tensors=tuple(tensors), dims=tuple(sizes.items()), scales=())


def resolved(p: Program, s: Schedule) -> Schedule:
    """`s` with values instead of roles. Values of roles that no later group reads are left out. p: traced, in the form of `s`."""
    s, came = with_names(p, s)
    while unread := _Graph(p, s, p.kernels[0], p.walk).unread() & came:
        s = replace(s, kernels=tuple(x for g in s.kernels if (x := tuple(n for n in g if n not in unread))))
    return s


def _split(s: Schedule, block: int, k: Kernel, tensors: dict[str, Tensor], sizes: dict[str, int]) -> str:
    """"V" if the kernel's grid may divide V into blocks of `block` columns, else "".

    That holds if all stored tensors have V, no tile has it twice, and no product or sum runs over V.
    """
    if not block or block >= sizes["V"]:
        return ""
    if sizes["V"] % block:
        raise ScheduleError(f"schedule {s.name}: v_block={block} does not divide V={sizes['V']}")
    ops = [o for st in k.body for o in (st.body if isinstance(st, Loop) else [st]) if isinstance(o, Op)]
    env = {o.out: o.type for o in ops if o.type} | {c.name: c.type for st in k.body if isinstance(st, Loop)
                                                   for c in st.carried}
    if any(t is not None and t.dims.count("V") > 1 for t in env.values()):
        return ""
    for o in ops:
        if o.kind == "store" and "V" not in tensors[o.attr("tensor")].dims:
            return ""
        if o.kind in ("row_sum", "row_norm") and "V" in env[o.args[0]].dims:
            return ""
        if o.kind == "matmul" and env[o.args[0]].dims[0 if o.attr("ta") else 1] == "V":
            return ""
    return "V"


class _Slice:
    """What one group computes and reads."""
    def __init__(self) -> None:
        self.ops: set[str] = set()  # values computed here
        self.reads: set[str] = set()  # values an earlier group wrote
        self.walks = False


class _Graph:
    """The graph of a walk's values.

    Raises ScheduleError if a group names an unknown value, or if no group writes an output or a state.
    """
    def __init__(self, p: Program, s: Schedule, whole: Kernel, loop: Loop) -> None:
        self.p, self.s, self.whole, self.loop = p, s, whole, loop
        self.defs = {o.out: o for o in loop.body if isinstance(o, Op) and o.out}
        self.states = {c.name: c for c in loop.carried}
        #: Stores of checkpoints. They are part of the kernel that computes the state.
        self.kept = [o for o in loop.body if isinstance(o, Op) and o.kind == "store"
                     and p.tensor(o.attr("tensor")).index == "checkpoint"]
        self.outputs = {o.args[0]: o for o in loop.body if isinstance(o, Op) and o.kind == "store" and o not in self.kept}
        self.roles = roles(p)
        names = [n for group in s.kernels for n in group]
        known = [n for n, o in self.defs.items() if o.kind not in ("const", "scalar")]
        unknown = [n for n in names if n not in known and n not in self.states]
        if unknown:
            have = [n for n in known if self.defs[n].kind != "load"]
            raise ScheduleError(f"schedule {s.name}: kernels names {', '.join(unknown)}; {p.name} has "
                                f"{', '.join([*have, *self.states])}")
        lost = [n for n in [*self.outputs, *self.states] if n not in names]
        if lost:
            raise ScheduleError(f"schedule {s.name}: no group of kernels writes {', '.join(lost)}; accepted: groups that have "
                                f"all outputs and states, as --set kernels={','.join([*self.outputs, *self.states])} or "
                                "--set kernels=@output,@state")

    def unread(self) -> set[str]:
        """The values of groups that no later group reads and that are not a result of the call."""
        parts, out = [self.slice(i) for i in range(len(self.s.kernels))], set()
        for i, group in enumerate(self.s.kernels):
            read = {n for later in parts[i + 1:] for n in later.reads}
            out |= set(group) - {*read, *self.outputs, *self.states, *self.p.scales, self.p.forgets}
        return out

    def check(self, apart: bool) -> None:
        """Raise ScheduleError for groups that write nothing, and for workspaces of numbers if cores share no memory (`apart`)."""
        unread = self.unread()
        for i, group in enumerate(self.s.kernels):
            if unread.issuperset(group):
                raise ScheduleError(f"schedule {self.s.name}: kernels has the group {','.join(group)}, of which no later group "
                                    "reads anything and no caller gets it; accepted are groups before those that read them")
            after = {n for later in self.s.kernels[i + 1:] for n in later}
            early = [f"{c.next}, which {c.name} becomes" for c in self.states.values() if c.next in group and c.name in after]
            if early:
                raise ScheduleError(f"schedule {self.s.name}: kernels names {', '.join(early)} in a group before its own; "
                                    "accepted is the state, by its name")
            numbers = [n for n in group if n in self.defs and (x := self.defs[n].type) is not None and not x.dims]
            if numbers and apart:
                raise ScheduleError(f"schedule {self.s.name}: kernels names {', '.join(numbers)}, a number a chunk; accepted "
                                    "where cores share no memory: tiles and vectors")

    def slice(self, i: int) -> _Slice:
        """What group i computes: all ops that its values depend on. It stops at values of earlier groups, which it reads."""
        out, earlier = _Slice(), {n for group in self.s.kernels[:i] for n in group}
        todo = [self.states[n].next if n in self.states else n for n in self.s.kernels[i]]
        out.walks = any(n in self.states for n in self.s.kernels[i])
        while todo:
            n = todo.pop()
            if n in out.ops or n in out.reads:
                continue
            if n in earlier:
                out.reads.add(n)
            elif n in self.states:
                out.walks = True
                todo.append(self.states[n].next)
            else:
                out.ops.add(n)
                todo += self.defs[n].args
        return out

    def with_scales(self) -> tuple[tuple[str, ...], ...]:
        """The groups, with each vector of `scales` that is stored added to the group that writes it.

        That is the first group over chunks that computes it. If only walks compute it, that is the last group over chunks
        before them.
        """
        parts, out = [self.slice(i) for i in range(len(self.s.kernels))], list(self.s.kernels)
        for n in self.p.scales:
            users = [i for i, part in enumerate(parts) if n in part.ops]
            chunks = [i for i, part in enumerate(parts) if not part.walks and (i in users or i < users[0])]
            computing = [i for i in chunks if i in users]
            if chunks and (len(users) > 1 or not computing):
                at = computing[0] if computing else chunks[-1]
                out[at] = (*out[at], n)
        return tuple(out)

    def order(self, n: str) -> tuple[int, int]:
        """The sort key of values that a kernel reads from workspaces: first the role, then the place in the program. Names do
        not matter."""
        if n in self.p.scales:
            return len(READ_ORDER), -self.p.scales.index(n)
        role = next((i for i, r in enumerate(READ_ORDER) if n in self.roles.get(r, ())), len(READ_ORDER) - 1)
        return role, list(self.states).index(n) if n in self.states else list(self.defs).index(n)

    def workspace(self, n: str) -> Tensor:
        """The workspace of a value: one tile a chunk slot."""
        t = self.states[n].type if n in self.states else self.defs[n].type
        assert t is not None
        return Tensor(f"{n}_ws", "workspace", "slot", "HV", t.dims, t.dtype)

    def kernel(self, i: int, part: _Slice, read_later: set[str]) -> tuple[Kernel, list[Tensor]]:
        """The kernel of group i, and the workspaces that it writes. read_later: the values that later groups read."""
        group = self.s.kernels[i]
        made = [self.workspace(n) for n in group if n in read_later]
        kept = {t.name[:-3] for t in made}
        body: list[Stmt] = []
        for n in sorted(part.reads, key=self.order):
            t = self.workspace(n)
            body.append(Op("load", n, (), (("tensor", t.name),), t.tile))
        body += [Op("store", "", (n,), (("tensor", f"{n}_ws"),)) for n in group if n in kept and n in self.states]
        for o in self.loop.body:
            assert isinstance(o, Op)
            if o.out in part.ops:
                body.append(o)
                if o.out in kept and o.out in group:
                    body.append(Op("store", "", (o.out,), (("tensor", f"{o.out}_ws"),)))
            elif o.kind == "store" and (o.args[0] in {self.states[n].next for n in group if n in self.states}
                                        if o in self.kept else o.args[0] in group):
                body.append(o)
        name = "_".join(group)
        if not part.walks:
            return Kernel(name, "chunks", tuple(body)), made
        walked = tuple(c for c in self.loop.carried if c.next in part.ops or c.next in part.reads)
        # A state that an earlier group wrote is loaded like any value, so it is not walked again.
        walked = tuple(c for c in walked if c.name not in part.reads)
        before = [o for o in self.whole.body if isinstance(o, Op) and o.out in {c.init for c in walked}]
        after = [o for o in self.whole.body if isinstance(o, Op) and o.kind == "store"
                 and o.args[0] in {c.result for c in walked if c.name in group}]
        return Kernel(name, "sequences", (*before, Loop(self.loop.index, walked, tuple(body)), *after)), made
