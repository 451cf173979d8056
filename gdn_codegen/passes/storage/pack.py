"""pack: gives each value a buffer at a byte offset. Only devices with cores (PTO) run it.

A buffer is in the space that its op fills. On an agent with several cores, a core holds its part of a tile's rows. A vector is
whole on each core, except sums along rows, of which each core has a part.

Buffers are shared:
- `valid` and accumulating products work in place.
- Elementwise ops overwrite an operand that has no later reader.
- A carried value and its next value share a buffer. A copy is added where this is not possible otherwise.

Operands of products use the slots of their space in turn. In other spaces, and if a slot is too small, buffers are packed by
lifetime. Round robin is tried first, because more ops can then overlap. After that, each buffer goes as low as possible. If
values do not fit, a ScheduleError names them.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.core import Buffer, Carry, Kernel, Loop, Op, Program, Stmt, Tile, loops, map_ops, types, walk
from ...ir.ops import OPS
from ...schedule.schedule import Schedule, ScheduleError
from ..stage import takes
from .offsets import WIDTH, Place, in_slots, lowest, round_robin
from .room import late_loads, with_copies

VIEWS = ("const", "scalar", "col", "row", "part", "block", "last")


@takes("fed", gives="placed")
def pack(p: Program, s: Schedule, device: Cores) -> Program:
    """`p` with buffers at byte offsets. Raises ScheduleError if a space is too small."""
    return p.map_kernels(lambda k: _pack(p, with_copies(k, device), s, device))


def fits(p: Program, k: Kernel, s: Schedule, device: Cores) -> bool:
    """Whether all values of a kernel fit."""
    try:
        _pack(p, with_copies(k, device), s, device)
    except ScheduleError:
        return False
    return True


def _pack(p: Program, k: Kernel, s: Schedule, device: Cores) -> Kernel:
    """The kernel with buffers. Loads stay early, so that they overlap with other ops. If that does not fit, each load moves to
    its first reader."""
    try:
        return _Kernel(p, k, s, device).run()
    except ScheduleError:
        return _Kernel(p, replace(k, body=late_loads(k.body)), s, device).run()


def by_columns(k: Kernel) -> set[str]:
    """The tiles of which each core of an agent holds its own columns, not rows."""
    out: set[str] = set()
    for o in walk(k.body):
        if o.attr("columns") or (o.kind in ("cast", "valid") and o.args[0] in out):
            out.add(o.out)
    return out


class _Kernel:
    """The buffers of one kernel: the space of each value, its shape on one core, its bytes and its lifetime."""
    def __init__(self, p: Program, k: Kernel, s: Schedule, device: Cores) -> None:
        self.p, self.k, self.s, self.device = p, k, s, device
        self.sizes = {**p.sizes, **k.sizes}
        self.type = types(k.body)
        self.token = {t.name for t in p.tensors if t.index == "token"}
        self.defs: dict[str, Op] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.depth: dict[str, int] = {}
        self.home: dict[str, Place] = {}
        self.at = 0
        self.scratch: list[Place] = []
        self.wide: set[str] = set()
        self.half: set[str] = set()
        self.columns = by_columns(k)
        self.alone_stored = {o.args[0] for o in walk(k.body) if o.kind == "store"}
        for o in walk(k.body):
            if o.kind not in ("store",):
                self.alone_stored -= set(o.args)

    def error(self, text: str) -> ScheduleError:
        return ScheduleError(f"{self.p.name}, kernel {self.k.name} on {self.device.name}: {text}")

    def run(self) -> Kernel:
        """The kernel with a buffer at a byte offset for each value. Raises ScheduleError if a space is too small."""
        self.lifetimes(self.k.body)
        self.nexts = {c.next: c.name for lp in loops(self.k.body) for c in lp.carried}
        self.nexts |= {self.defs[n].args[0]: c for n, c in self.nexts.items() if n in self.defs and self.defs[n].kind == "valid"}
        self.at = 0
        self.buffers(self.k.body)
        places: list[Place] = [*{x.name: x for x in self.home.values()}.values(), *self.scratch]
        for space, size in self.device.spaces.items():
            self.fit(space, size, sorted((x for x in places if x.space == space), key=lambda x: (x.start, x.end)))
        buffers = tuple(Buffer(x.name, x.space, x.shape, x.dtype, x.offset, x.slots, x.agent) for x in places)
        return replace(self.k, body=map_ops(self.k.body, lambda o: [self.marked(o)]), buffers=buffers)

    # --- lifetimes -----------------------------------------------------------------------------------------------
    def lifetimes(self, body: tuple[Stmt, ...], depth: int = 0) -> None:
        """Number the statements. For each value, note the first and the last statement between which it is live."""
        for s in body:
            if isinstance(s, Loop):
                for c in s.carried:
                    self.read(c.init)
                    self.first[c.name], self.depth[c.name] = self.at, depth
                start = self.at
                self.lifetimes(s.body, depth + 1)
                self.at += 1
                for c in s.carried:
                    self.read(c.next)
                    self.first[c.result], self.depth[c.result] = self.at, depth
                    self.last[c.name] = self.last[c.result] = self.at
                for name, end in list(self.last.items()):  # computed before the loop and read in it: live to the end of the loop
                    if (self.first[name] <= start < end) or name in {c.name for c in s.carried}:
                        self.last[name] = max(end, self.at)
            else:
                self.at += 1
                for a in s.args:
                    self.read(a)
                if s.out:
                    self.defs[s.out], self.first[s.out], self.last[s.out] = s, self.at, self.at
                    self.depth[s.out] = depth

    def read(self, name: str) -> None:
        """Extend the lifetime of a value to this statement. The lifetimes of values under a view are extended too."""
        self.last[name] = self.at
        o = self.defs.get(name)
        if o is not None and (o.kind in ("col", "row", "part", "block", "cast") and self.view(o)):
            self.read(o.args[0])

    def view(self, o: Op) -> bool:
        """Whether `o` has no storage: a number, a column or row of a vector, or a cast of a product that only stores read."""
        if o.kind == "cast":
            return o.agent != self.device.agents[0] and o.out in self.alone_stored
        return o.kind in VIEWS or self.type[o.out].rank == 0

    # --- buffers -------------------------------------------------------------------------------------------------
    def buffers(self, body: tuple[Stmt, ...]) -> None:
        """Give each value a place: a new one, or that of a value that it overwrites. A carried value keeps its place through
        the loop."""
        for s in body:
            if isinstance(s, Loop):
                for c in s.carried:
                    self.carry(c)
                self.buffers(s.body)
                self.at += 1
                for c in s.carried:
                    place = self.home[c.name]
                    if self.home.get(c.next) is not place:
                        raise self.error(f"{c.next} does not end where {c.name} began")
                    place.end = max(place.end, self.at, self.last.get(c.result, 0))
                    self.home[c.result] = place
            else:
                self.at += 1
                self.op(s)

    def carry(self, c: Carry) -> None:
        """Give a carried value the place of its initial value."""
        place = self.home.get(c.init)
        if place is None or self.last[c.init] > self.first[c.name]:
            raise self.error(f"{c.name} starts as {c.init}, which lives on")
        place.end, place.slots = max(place.end, self.last[c.name]), c.slots
        self.home[c.name] = place
        place.pinned = True
        for kind in (self.wide, self.half):
            kind |= {c.name} if c.init in kind else set()

    def op(self, o: Op) -> None:
        """Give the value of an op a place, and give the op scratch space if it needs some."""
        if not o.out or self.view(o):
            return
        x = o.args[0] if o.args else ""
        if (o.kind == "valid" and x in self.wide) or (o.kind == "load" and o.attr("tensor") in self.token):
            if self.type[o.out].rank == 1:
                self.wide.add(o.out)
        if self.type[o.out].rank == 1 and isinstance(self.type[o.out].dims[0], str) and (
                o.kind == "row_sum" or any(self.source(a) in self.half for a in o.args)):
            self.half.add(o.out)
        if o.kind == "expand" and any(self.source(a) in self.half and self.type[a].dims[0] == 1 for a in o.args):
            raise self.error(f"{o.out} needs all of {x}, of which each core has its own rows")
        shape, space = self.shape(o), self.space(o)
        if o.kind == "valid" or (o.kind == "matmul" and len(o.args) == 3):
            place = self.home[o.args[-1]]
        elif o.out in self.nexts:
            place = self.home[self.nexts[o.out]]
        else:
            place = self.reuse(o, space, shape) or Place(o.out, space, shape, self.type[o.out].dtype, o.agent,
                                                           self.at, self.at)
        place.end = max(place.end, self.last[o.out])
        self.home[o.out] = place
        if o.kind in ("row_sum", "transpose") or (o.kind == "move" and x in self.wide):
            source = self.home[x]
            self.scratch.append(Place(f"{o.out}_scratch", space, source.shape, source.dtype, o.agent, self.at, self.at))

    def source(self, name: str) -> str:
        """The value under a column, a row or a part."""
        o = self.defs.get(name)
        return self.source(o.args[0]) if o is not None and o.kind in ("col", "row", "part") else name

    def reuse(self, o: Op, space: str, shape: tuple[int, ...]) -> Place | None:
        """The place of an operand without later readers, if the elementwise op `o` can overwrite it. Otherwise None."""
        if not OPS[o.kind].elementwise or o.kind in ("cast", "expand"):
            return None
        for a in o.args:
            place = self.home.get(a)
            if place is not None and not place.pinned and place.end == self.at and place.space == space \
                    and (place.shape, place.dtype) == (shape, self.type[o.out].dtype) and a not in self.wide:
                return place
        return None

    def space(self, o: Op) -> str:
        """The space that `o` fills."""
        if o.kind == "move":
            return str(o.attr("space"))
        return self.device.product if o.kind == "matmul" else self.device.home[o.agent]

    def shape(self, o: Op) -> tuple[int, ...]:
        """The shape of a value on one core, in elements. A tile has this core's rows. A vector is whole, or this core's part.

        A vector that was just loaded has one number in each row of `Device.align` bytes. Raises ScheduleError if rows do not
        divide among cores, or are not a multiple of `Device.align` bytes.
        """
        t: Tile = self.type[o.out]
        shape, parts = t.shape(self.sizes), self.device.copies[o.agent]
        if o.kind == "move" and o.attr("transposed"):
            shape = shape[::-1]
        if t.rank == 2 and parts > 1 and isinstance(t.dims[0], str):  # a dim that is a number is whole on each core
            if shape[0] % (8 * parts):
                raise self.error(f"{o.out} has {shape[0]} rows, which do not make {parts} parts of whole 8-row groups")
            shape = (shape[0] // parts, shape[1]) if o.out not in self.columns else (shape[0], shape[1] // parts)
        if t.rank == 1:
            if o.out in self.wide:
                shape = (shape[0], self.device.align // WIDTH[t.dtype])
            elif o.out in self.half:
                shape = (shape[0] // parts,)
        if shape[-1] * WIDTH[t.dtype] % self.device.align:
            raise self.error(f"{o.out} has rows of {shape[-1] * WIDTH[t.dtype]} bytes, not a multiple of "
                             f"{self.device.align}")
        return shape

    # --- offsets -------------------------------------------------------------------------------------------------
    def fit(self, space: str, size: int, places: list[Place]) -> None:
        """Set the offsets of all places of a space. Raises ScheduleError if they do not fit."""
        if space in self.device.feeds and in_slots(places, size, self.s.l0_slots):
            return
        if round_robin(places, size, self.device.align) or lowest(places, size, self.device.align):
            return
        peak = max((x.start for x in places), key=lambda t: sum(x.bytes for x in places if x.start <= t <= x.end))
        live = sorted((x for x in places if x.start <= peak <= x.end), key=lambda x: -x.bytes)
        names = ", ".join(f"{x.name} {x.bytes}" for x in live)
        raise self.error(f"{space} has {size} bytes, and at the fullest point {sum(x.bytes for x in live)} are live: "
                         f"{names}; use a smaller chunk, or cut the values into more kernels")

    def marked(self, o: Op) -> Op:
        """The op with the name of its buffer."""
        return replace(o, buffer=self.home[o.out].name if o.out in self.home else "")
