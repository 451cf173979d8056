"""parts: what the kernels over parts of sequences have in common. `partition` makes the walks, and `summaries` the kernels before
them.
"""
from __future__ import annotations

from typing import Any

from ...ir.body import Body
from ...ir.core import Kernel, Loop, Op, Program, types
from ...ir.types import Tensor
from ...schedule.schedule import Schedule, ScheduleError
from ..common import dead_code


def scales_rows(loop: Loop) -> bool:
    """Whether the next state of a walk is the state with each row times a number, plus terms that do not depend on the state."""
    (c,) = loop.carried
    of, defs, depends = types(loop.body), dict[str, Op](), {c.name}
    for o in dead_code(tuple(o for o in loop.body if isinstance(o, Op) and o.kind != "store"), {c.next}):
        assert isinstance(o, Op)
        defs[o.out] = o
        others = [a for a in o.args if a not in depends]
        if len(others) == len(o.args):
            continue
        rows = all(not of[a].dims or defs[a].kind == "col" for a in others)
        if o.kind not in ("add", "sub", "neg") and not (o.kind == "mul" and len(others) == 1 and rows):
            return False
        depends.add(o.out)
    return True


def counter(p: Program, state: str) -> Tensor:
    """The counter that is not zero if the first of two builds has declined a call. state: the name of the state."""
    return Tensor(Body({t.name: t for t in p.tensors}).fresh(f"{state}_declined"), "workspace", "counter", "HV", (), "int32")


class Parts:
    """The walk `k` over sequences that becomes one over parts, and the workspaces of the kernels that are made from it.

    forgets: attributes of the warm-up length, none without warm-ups. side_by_side: whether a kernel may run beside the one before
    it. ScheduleError where the walk carries something else than a state [K, V].

    warm_up: the length of each part. n, m: its summaries. scales: m is diagonal, and a vector. start: the state before it. end:
    the last state of a sequence, where that overwrites the initial one. declined: with short warm-ups, the counter by which
    walks end at once; there are no summaries then.
    """

    def __init__(self, p: Program, s: Schedule, k: Kernel, loop: Loop, forgets: dict[str, Any], side_by_side: bool) -> None:
        """Makes the workspaces of the parts, one tile for each part and value head. k: the kernel with the walk `loop`."""
        self.p, self.k, self.loop = p, k, loop
        (self.c,) = loop.carried
        self.where = f"schedule {s.name}: partition={s.partition!r}"
        self.rows = self.c.type.dims[0]
        if self.c.type.dims[1:] != ("V",) or self.rows == "V":
            raise ScheduleError(f"{self.where} needs a state [K, V], and {self.c.name} is {self.c.type}")
        name = self.c.name
        self.forgets, self.side_by_side = forgets, side_by_side
        self.warm_up = Tensor(f"{name}_warm_up", "workspace", "part", "HV", ())
        self.n = Tensor(f"{name}_offset", "workspace", "part", "HV", self.c.type.dims)
        self.scales = scales_rows(loop)
        self.m = Tensor(f"{name}_factor", "workspace", "part", "HV", (self.rows,) if self.scales else (self.rows, self.rows))
        self.start = Tensor(f"{name}_start", "workspace", "part", "HV", self.c.type.dims)
        self.end = Tensor(f"{name}_end", "workspace", "sequence", "HV", self.c.type.dims)
        self.over = {t.name for t in p.tensors if t.over}
        self.declined = counter(p, name) if s.partition == "short" else None
        summed = (*([self.warm_up] if self.forgets else []), self.n, self.m, self.start)
        self.made = (*((self.declined,) if self.declined else summed), *([self.end] if self.over else []))
        self.blocks = {"blocked_dim": k.blocked_dim, "dims": k.dims}

    def body(self, k: Kernel) -> Body:
        """An empty body for a kernel made from `k`. The names of `k` are taken in it."""
        b = Body({t.name: t for t in (*self.p.tensors, *self.made)})
        b.taken |= set(types(k.body))
        return b

    def longer(self, b: Body, here: str, following: str) -> str:
        """The longer of the warm-ups of two parts, negative if neither has one."""
        return b.op("maximum", here, following, name=b.fresh("longer_warm_up"))

    def length(self, b: Body, parts_ahead: int = 0) -> str:
        """The warm-up length of this part, or of the part `parts_ahead` of it. Where kernels may run side by side it is computed
        anew, so that an instance need not wait for the first kernel to know whether it has anything to do."""
        if not self.side_by_side:
            return self.number(b, parts_ahead)
        name = b.fresh("warm_up_next" if parts_ahead else "warm_up")
        return b.op("warm_up_length", name=name, parts_ahead=parts_ahead or None, **self.forgets)

    def number(self, b: Body, parts_ahead: int = 0, of: str = "") -> str:
        """The warm-up length of this part, or of the part `parts_ahead` of it. of: a prefix for its name.

        It is read from where the first kernel wrote it, except for the first part of a sequence.
        """
        name = b.fresh("warm_up_next" if parts_ahead else f"{of}warm_up")
        if not self.forgets:
            return b.op("warm_up_length", name=name, parts_ahead=parts_ahead or None)
        where = () if parts_ahead else (b.op("warm_up_length", name=b.fresh(f"{of}follows")),)
        return b.op("load", *where, name=name, tensor=self.warm_up.name, parts_ahead=parts_ahead or None)

    def initial(self, b: Body) -> str:
        """The state before the sequence. Zeros for a part that is not the first."""
        o = next(o for o in self.k.body if isinstance(o, Op) and o.out == self.c.init)
        return b.op(o.kind, name=o.out, **dict(o.attrs))
