"""partition: divides a sequence into parts that run side by side. For devices with thread blocks; it refuses devices with
cores.

The state after a part is affine in the state before it: S' = M S + N. Kernels that walk sequences become kernels over parts.
Three kernels come before the first of them. All are made from its walk:
- N: the walk for the state alone, from a zero state. It stores the last state. The first part of a sequence starts from the
  initial state. If the part's walk has a warm-up, N has it too, and is then the state after the part itself.
- M: the same, without terms that do not depend on S, with K columns in place of V, from the identity.
- The fold: S <- M S + N over the parts before this one. The result is the state from which the part's walk starts.

"exact": the walk of a part begins at its first chunk, with the state of the fold. "decay": the walk has a warm-up. It starts
some chunks before the part, from a zero state, and stores nothing for them. The op `warm_up_length` finds how many chunks the
gates need to forget the state before. If the warm-up would take longer than the summaries, the part starts from the fold.
Summaries are computed only where a part needs them.

The warm-up length tells the two cases apart. It is a number of chunks, or -1 for the state of the fold. The summary N of a part
is needed if the next part's length is -1. M is needed if the part's own length is -1 too.

A final state that overwrites the initial one is stored by a kernel of its own, after the walks. Otherwise the last part could
overwrite the initial state before another part has read it.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...devices import Cores, Device
from ...ir.builder import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program, Stmt, loops, types
from ...ir.ops import TypeRuleError
from ...ir.types import Tensor
from ...schedule.schedule import Schedule, ScheduleError
from ..common import dead_code
from ..stage import takes

#: log(1 / f), where f is the fraction of the state that may be lost at a part's start: 1/32 of the dtype's rounding.
BOUND = {"float16": 16 * 0.6931471805599453, "bfloat16": 13 * 0.6931471805599453, "float32": 29 * 0.6931471805599453}


@takes("cut")
def partition(p: Program, s: Schedule, device: Device, dtype: str) -> Program:
    """`p` in parts, or `p` itself if the schedule has no partition.

    Raises ScheduleError on a device with cores, and for pages without exactly one state [K, V] that is affine in the state
    before.
    """
    if not s.partition:
        return p
    if isinstance(device, Cores):
        raise ScheduleError(f"schedule {s.name}: partition={s.partition!r}; accepted for {device.target} is None")
    first = next((k for k in p.kernels if k.grid == "sequences"), None)
    walks = [x for k in p.kernels if k.grid == "sequences" for x in loops(k.body)]
    states = {c.name for x in walks for c in x.carried}  # all walks start from the summaries of the first walk
    if first is None or len(states) != 1:
        raise ScheduleError(f"schedule {s.name}: partition={s.partition!r} needs one carried state, which {p.name} has not")
    parts = _Parts(p, s, first, walks[0], begins(f"{p.forgets}_ws", device, dtype) if p.forgets else {})
    longest_first = s.longest_first and device.splits_warm_up
    kernels: list[Kernel] = []
    for k in p.kernels:
        if k is first:
            kernels += [parts.offset(), parts.factor(), parts.fold()]
        kernels += parts.walk(k, longest_first) if k.grid == "sequences" else [k]
    return replace(p, kernels=tuple(kernels), tensors=(*p.tensors, *parts.made), forgets="")


def begins(tensor: str, device: Device, dtype: str) -> dict[str, Any]:
    """Attributes of `warm_up_length`: the tensor that it sums, the bound to reach, and the longest warm-up in parts."""
    return {"tensor": tensor, "bound": round(BOUND[dtype], 6), "most": _most(device)}


def _most(device: Device) -> int:
    """The longest warm-up, in lengths of a part. It takes as long as the two summaries that it saves."""
    assert device.part_cost is not None
    return round(2 * device.part_cost.summary_us / device.part_cost.chunk_us)


class _Parts:
    """The kernels that replace a walk over sequences by walks over parts.

    ScheduleError where the walk carries something else than a state [K, V]. forgets: attributes of the warm-up length.
    """
    def __init__(self, p: Program, s: Schedule, k: Kernel, loop: Loop, forgets: dict[str, Any]) -> None:
        self.p, self.k, self.loop = p, k, loop
        (self.c,) = loop.carried
        self.where = f"schedule {s.name}: partition={s.partition!r}"
        self.rows = self.c.type.dims[0]
        if self.c.type.dims[1:] != ("V",) or self.rows == "V":
            raise ScheduleError(f"{self.where} needs a state [K, V], and {self.c.name} is {self.c.type}")
        name = self.c.name
        self.forgets = forgets
        self.warm_up = Tensor(f"{name}_warm_up", "workspace", "part", "HV", ())
        self.n = Tensor(f"{name}_offset", "workspace", "part", "HV", self.c.type.dims)
        self.m = Tensor(f"{name}_factor", "workspace", "part", "HV", (self.rows, self.rows))
        self.start = Tensor(f"{name}_start", "workspace", "part", "HV", self.c.type.dims)
        self.end = Tensor(f"{name}_end", "workspace", "sequence", "HV", self.c.type.dims)
        self.over = {t.name for t in p.tensors if t.over}
        self.made = (*([self.warm_up] if self.forgets else []), self.n, self.m, self.start, *([self.end] if self.over else []))
        self.split = {"split": k.split, "dims": k.dims}

    def body(self, k: Kernel) -> Body:
        """An empty body for a kernel made from `k`. The names of `k` are taken in it."""
        b = Body({t.name: t for t in (*self.p.tensors, *self.made)})
        b.taken |= set(types(k.body))
        return b

    def number(self, b: Body, parts_ahead: int = 0) -> str:
        """The warm-up length of this part, or of the part `parts_ahead` of it.

        It is read from where the first kernel wrote it, except for the first part of a sequence.
        """
        name = b.fresh("warm_up_next" if parts_ahead else "warm_up")
        if not self.forgets:
            return b.op("warm_up_length", name=name, parts_ahead=parts_ahead or None)
        where = () if parts_ahead else (b.op("warm_up_length", name=b.fresh("follows")),)
        return b.op("load", *where, name=name, tensor=self.warm_up.name, parts_ahead=parts_ahead or None)

    def looped(self, b: Body, body: tuple[Stmt, ...], init: str, new: str, warm_up: str, to: str) -> None:
        """Append the walk of the state alone, and the store of the last state to the tensor `to`."""
        c = Carry(self.c.name, init, new, self.c.result, b.types[init])
        kept = dead_code(tuple(o for o in body if isinstance(o, Op) and o.kind != "store"), {new})
        b.stmts.append(Loop(self.loop.index, (c,), kept, warm_up))
        b.types[c.result] = c.type
        b.op("store", c.result, tensor=to)

    def initial(self, b: Body) -> str:
        """The state before the sequence. Zeros for a part that is not the first."""
        o = next(o for o in self.k.body if isinstance(o, Op) and o.out == self.c.init)
        return b.op(o.kind, name=o.out, **dict(o.attrs))

    def offset(self) -> Kernel:
        """The kernel that computes N of each part, and stores the next part's warm-up length."""
        b = self.body(self.k)
        following = b.op("warm_up_length", name=b.fresh("warm_up_next"), parts_ahead=1, **self.forgets)
        if self.forgets:
            b.op("store", following, tensor=self.warm_up.name, parts_ahead=1)
        b.op("return_unless_negative", following)
        warm_up = b.op("warm_up_length", name=b.fresh("warm_up"), **self.forgets) if self.forgets else ""
        self.looped(b, self.loop.body, self.initial(b), self.c.next, warm_up, self.n.name)
        return Kernel(self.n.name, "parts", b.finish(), **self.split)  # type: ignore[arg-type]

    def factor(self) -> Kernel:
        """The kernel that computes M of each part."""
        b = self.body(self.k)
        b.op("return_unless_negative", b.op("maximum", self.number(b), self.number(b, 1)))
        within = self.rows if self.rows in dict(self.p.extents) else None
        init = b.op("eye", name=self.c.init, dims=(self.rows, self.rows), within=within)
        inner = Body(b.tensors, {self.c.name: b.types[init]})
        new = self.homogeneous(inner)
        self.looped(b, inner.finish(), init, new, "", self.m.name)
        return Kernel(self.m.name, "parts", b.finish())

    def homogeneous(self, b: Body) -> str:
        """Append the walk's body without terms that do not depend on the state. Returns the name of the state's next value."""
        linear = {self.c.name: self.c.name}  # a value that depends on the state -> its linear part
        for o in self.loop.body:
            assert isinstance(o, Op)
            depends = [a in linear for a in o.args]
            if o.kind == "store":
                continue
            if not any(depends):
                b.copy(o)
                continue
            args = [linear.get(a, a) for a in o.args]
            if o.kind in ("add", "sub") and not all(depends):
                x = args[depends.index(True)]
                linear[o.out] = b.op("neg", x, name=o.out, line=o.line) if o.kind == "sub" and depends[1] else x
            elif o.kind in ("add", "sub", "neg") or (o.kind == "mul" and not all(depends)) or (
                    o.kind == "matmul" and depends == [False, True] and not o.attr("tb")):
                try:
                    linear[o.out] = b.op(o.kind, *args, name=o.out, line=o.line, **dict(o.attrs))
                except TypeRuleError as e:
                    raise self.other(o) from e
            else:
                raise self.other(o)
            if b.types[linear[o.out]].dims[1:] != (self.rows,):
                raise self.other(o)
        if self.c.next not in linear:
            raise ScheduleError(f"{self.where} needs a state made of the one before, and "
                                f"{self.c.name} of {self.p.name} is not")
        if linear[self.c.next] == self.c.name:  # an empty loop body has no text
            return b.op("mul", b.op("const", value=1.0), self.c.name)
        return linear[self.c.next]

    def other(self, o: Op) -> ScheduleError:
        return ScheduleError(f"{self.where} needs a state whose columns are apart and affine in what they were; {o.out} "
                             f"({o.kind}, line {o.line}) of {self.p.name} is not")

    def fold(self) -> Kernel:
        """The kernel that computes the state at each part's start: S <- M S + N over the parts before it. It returns at once
        for a part that starts with a warm-up."""
        b = self.body(self.k)
        b.op("return_unless_negative", self.number(b))
        init = b.op("full", name=self.c.init, dims=self.c.type.dims, value=0.0)
        inner = Body(b.tensors, {self.c.name: self.c.type})
        inner.taken = b.taken
        here, following = self.number(inner), self.number(inner, 1)
        m = inner.op("load", inner.op("maximum", here, following), name=b.fresh("M"), tensor=self.m.name)
        n = inner.op("load", following, name=b.fresh("N"), tensor=self.n.name)
        new = inner.op("add", inner.op("matmul", m, self.c.name), n, name=self.c.next)
        c = Carry(self.c.name, init, new, self.c.result, self.c.type)
        b.stmts.append(Loop("part", (c,), inner.finish()))
        b.types[c.result] = c.type
        b.op("store", c.result, tensor=self.start.name)
        return Kernel(self.start.name, "parts", b.finish(), **self.split)  # type: ignore[arg-type]

    def walk(self, k: Kernel, longest_first: bool) -> list[Kernel]:
        """The walk over a part's chunks, and kernels that copy a final state over the initial one."""
        b = self.body(k)
        if self.forgets:
            # without summaries, no kernel before this one has computed the length
            warm_up = b.op("warm_up_length", name=b.fresh("warm_up"), **self.forgets, kept=self.warm_up.name)
        else:
            warm_up = self.number(b)
        if longest_first and self.forgets:
            b.op("claim_part", warm_up)
        before = self.initial(b)
        init = b.op("load", warm_up, before, name=b.fresh(f"{self.c.name}_part"), tensor=self.start.name)
        body, moves = [], []
        for x in k.body:
            if isinstance(x, Loop):
                x = replace(x, carried=tuple(replace(c, init=init) for c in x.carried), warm_up=warm_up if self.forgets else "")
            elif x.out == self.c.init:
                continue
            elif x.attr("tensor") in self.over:
                last = self.body(k)
                last.op("store", last.op("load", name=self.c.result, tensor=self.end.name), **dict(x.attrs))
                moves.append(Kernel(self.end.name, "sequences", last.finish(), **self.split))  # type: ignore[arg-type]
                x = replace(x, attrs=()).with_attrs(tensor=self.end.name)
            body.append(x)
        return [replace(k, grid="parts", body=(*b.finish(), *body)), *moves]
