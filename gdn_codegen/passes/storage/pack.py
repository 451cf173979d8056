"""pack: gives each value a buffer at a byte offset. Only devices with cores (PTO) run it.

A buffer is in the space that its op fills, with the shape that one core holds (`core_values`).

Buffers are shared:
- `valid`, `insert`, `add_rows` and accumulating products work in place.
- Elementwise ops overwrite an operand that has no later reader.
- A carried value and its next value share a buffer. A copy is added where this is not possible otherwise.

Operands of products use the slots of their space in turn. In other spaces, and if a slot is too small, buffers are packed by
lifetime. Round robin is tried first, because more ops can then overlap. After that, each buffer goes as low as possible. If
values do not fit, a ScheduleError names them.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.core import Buffer, Carry, Kernel, Loop, Op, Program, Stmt, loops
from ...ir.ops import OPS
from ...schedule.schedule import Schedule, ScheduleError
from ..stage import takes
from .buffer_names import named
from .core_values import CoreValues
from .lifetimes import Lifetimes
from .live_ranges import late_loads, with_copies
from .offsets import NoRoom, Place, fullest, in_slots, lowest, round_robin
from .place import with_buffers


@takes("fed", gives="placed")
def pack(p: Program, s: Schedule, device: Cores) -> Program:
    """`p` with buffers at byte offsets. Raises ScheduleError if a space is too small."""
    return p.map_kernels(lambda k: _placed(p, with_copies(k, device), s, device).kernel())


def _placed(p: Program, k: Kernel, s: Schedule, device: Cores) -> KernelValues:
    """The places of a kernel's values. Loads stay early, so that they overlap with other ops. If that does not fit, each load
    moves to its first reader. Raises ScheduleError if that does not fit, either."""
    try:
        return KernelValues(p, k, s, device)
    except ScheduleError:
        return KernelValues(p, late_loads(k), s, device)


class KernelValues:
    """The buffers of one kernel: which values share one, and where it is. Raises ScheduleError if a space is too small."""

    def __init__(self, p: Program, k: Kernel, s: Schedule, device: Cores) -> None:
        """Gives each value a place, op by op, then each place an offset in its space."""
        self.k, self.s, self.device = k, s, device
        self.values = CoreValues(p, k, device)
        self.live = Lifetimes(k.body, self.values.defs, self.values.view)
        self.home: dict[str, Place] = {}
        self.scratch: list[Place] = []
        self.at = 0
        defs = self.values.defs
        self.carried = {c.next: c.name for lp in loops(k.body) for c in lp.carried}  # next value -> the carried value
        self.carried |= {defs[n].args[0]: c for n, c in self.carried.items() if n in defs and defs[n].kind == "valid"}
        self.body(k.body)
        self.places: list[Place] = [*{x.name: x for x in self.home.values()}.values(), *self.scratch]
        for space, size in device.spaces.items():
            self.fit(space, size, sorted((x for x in self.places if x.space == space), key=lambda x: (x.start, x.end)))

    def kernel(self) -> Kernel:
        """The kernel with a buffer at a byte offset for each value."""
        buffers = tuple(Buffer(x.name, x.space, x.shape, x.dtype, x.offset, x.slots, x.agent) for x in self.places)
        owner = {value: place.name for value, place in self.home.items()}
        return named(replace(self.k, body=with_buffers(self.k.body, owner), buffers=buffers))

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Give each value a place: a new one, or that of a value that it overwrites. A carried value keeps its place through
        the loop."""
        for s in body:
            if isinstance(s, Loop):
                for c in s.carried:
                    self.carry(c)
                self.body(s.body)
                self.at += 1
                for c in s.carried:
                    place = self.home[c.name]
                    if self.home.get(c.next) is not place:
                        raise self.values.error(f"carried {c.name} and its next value {c.next} have no common buffer")
                    place.end = max(place.end, self.at, self.live.last.get(c.result, 0))
                    self.home[c.result] = place
            else:
                self.at += 1
                self.op(s)

    def carry(self, c: Carry) -> None:
        """Give a carried value the place of its initial value."""
        place = self.home.get(c.init)
        if place is None or self.live.last[c.init] > self.live.first[c.name]:
            raise self.values.error(f"carried {c.name} would overwrite its first value {c.init}, which is read later")
        place.end, place.slots, place.pinned = max(place.end, self.live.last[c.name]), c.slots, True
        self.home[c.name] = place
        for kind in (self.values.spread, self.values.divided):
            kind |= {c.name} if c.init in kind else set()

    def op(self, o: Op) -> None:
        """Give the value of an op a place, and give the op scratch space if it needs some."""
        v = self.values
        if o.out:
            v.hold(o)
        if not o.out or v.view(o):
            return
        shape, space = v.shape(o), v.space(o)
        if o.kind in ("insert", "add_rows"):
            place = self.home[o.args[0]]
            if place.end > self.at:
                raise v.error(f"{o.out} would overwrite {o.args[0]}, which is read later")
        elif o.kind == "valid" or (o.kind == "matmul" and len(o.args) == 3):
            place = self.home[o.args[-1]]
        elif o.out in self.carried:
            place = self.home[self.carried[o.out]]
        else:
            place = self.reuse(o, space, shape) or Place(o.out, space, shape, v.type[o.out].dtype, o.agent, self.at, self.at)
        place.end = max(place.end, self.live.last[o.out])
        self.home[o.out] = place
        if o.kind in ("row_sum", "transpose") or (o.kind == "move" and (o.args[0] in v.spread or o.args[0] in v.columns)):
            source = self.home[o.args[0]]
            self.scratch.append(Place(f"{o.out}_scratch", space, source.shape, source.dtype, o.agent, self.at, self.at))

    def reuse(self, o: Op, space: str, shape: tuple[int, ...]) -> Place | None:
        """The place of an operand without later readers, if the elementwise op `o` can overwrite it. Otherwise None."""
        if not OPS[o.kind].elementwise or o.kind in ("cast", "expand"):
            return None
        for a in o.args:
            place = self.home.get(a)
            if place is not None and not place.pinned and place.end == self.at and place.space == space \
                    and (place.shape, place.dtype) == (shape, self.values.type[o.out].dtype) and a not in self.values.spread:
                return place
        return None

    def fit(self, space: str, size: int, places: list[Place]) -> None:
        """Set the offsets of all places of a space. Raises ScheduleError if they do not fit."""
        if space in self.device.feeds and in_slots(places, size, self.s.l0_slots):
            return
        live = fullest(places)
        if sum(x.bytes for x in live) > size or not (round_robin(places, size, self.device.align)
                                                     or lowest(places, size, self.device.align)):
            raise NoRoom(self.values.where, space, size, live)
