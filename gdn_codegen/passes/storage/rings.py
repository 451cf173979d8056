"""rings: gives buffers to the values of kernels with several agents. For walks on Hopper under TileLang (sm_90a). `place` then
does so for other kernels.

Loaded values, and values that cross between agents, are in shared memory, in a ring. Each iteration of the walk uses the next
slot (`ring_slots`). These values are in fragments: accumulators, computed first operands, tiles that are transposed or have
several readers, values that a move copies to shared memory, and vectors under a column or row. All other values are expressions
inside their readers: vectors and numbers that the loop computes, and elementwise ops with one reader.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...ir.core import Buffer, Kernel, Op, Program, loops, types, uses, walk
from ...ir.ops import BY_COLUMNS
from ...schedule.schedule import Schedule
from ..stage import takes
from ..uses import readers
from .buffer_names import named
from .by_rows import stored_by_rows
from .place import with_buffers
from .ring_slots import with_room
from .stored_values import is_view, over
from .summed import is_sum
from .used_up import begins_sum, summed_in_place, used_up
from .walk_limits import check_limits, moves


@takes("assigned")
def rings(p: Program, s: Schedule, device: Groups) -> Program:
    """`p` with buffers on the kernels with several agents. Raises ScheduleError if they do not fit (`walk_limits`)."""
    return p.map_kernels(lambda k: _Kernel(p, k, s, device).run() if k.agents else k)


class _Kernel:
    """The buffers of one walk that agents share."""
    def __init__(self, p: Program, k: Kernel, s: Schedule, device: Groups) -> None:
        self.p, self.k, self.s, self.device = p, k, s, device
        self.sizes = {**p.sizes, **k.sizes}
        (self.loop,) = loops(k.body)
        self.type, self.count = types(k.body), uses(k.body)
        self.readers = readers(k.body)
        self.defs = {o.out: o for o in k.ops if o.out}
        self.inside = list(walk(self.loop.body))
        self.agents = {a.name: a for a in k.agents}
        self.sums = any(map(is_sum, self.inside))

    def run(self) -> Kernel:
        """The kernel with a ring for each value that crosses between agents or is loaded, and with fragments for others."""
        buffers: dict[str, Buffer] = {}
        owner: dict[str, str] = {}
        for c in self.loop.carried:
            buffers[c.name] = self.buffer(c.name, c.name, self.device.product)
            owner |= {c.init: c.name, c.next: c.name}
        carried, sums = {c.name: c.name for c in self.loop.carried}, self.device.product
        replaced = {o.args[1] for o in self.k.body if isinstance(o, Op) and o.kind == "load" and o.args[1:]}
        for o in self.k.body:
            if isinstance(o, Op) and o.out and self.type[o.out].rank == 0:  # a number, which all agents have
                buffers[o.out], owner[o.out] = Buffer(o.out, self.device.number, (), self.type[o.out].dtype), o.out
            elif isinstance(o, Op) and o.kind == "load" and o.args[1:]:  # it overwrites another value
                owner[o.args[1]] = owner[o.out]
            elif isinstance(o, Op) and o.kind == "load" and o.out not in {*owner, *replaced}:  # cast before the walk
                buffers[o.out], owner[o.out] = self.buffer(o.out, o.out, self.device.product), o.out
        for o in self.inside:
            if o.out in owner:
                continue
            if over(o, self.device):
                owner[o.out] = owner[o.args[0]]
            elif summed := summed_in_place(o, self.defs, self.count, self.type):
                owner[o.out] = owner[summed]
            elif o.kind in ("load", "diag_inverse", "diagonal") or moves(o, self.device) or is_sum(o) or o.kind == "cumsum":
                buffers[o.out] = replace(self.buffer(o.out, o.out, self.device.operand), slots=self.slots(o))
                owner[o.out] = o.out
            elif o.kind == "matmul" and len(o.args) == 3 and o.args[2] in owner and self.accumulates_in_place(o):
                owner[o.out] = owner[o.args[2]]
            elif self.sums and o.kind == "matmul" and len(o.args) == 3 and (
                    old := used_up(o, self.inside, owner, self.stored, self.type)):
                owner[o.out] = owner[old]
            elif begins_sum(o, self.readers) and (old := used_up(
                    o, self.inside, home := {**carried, **owner}, self.stored, self.type)) and buffers[home[old]].space == sums:
                owner[o.out] = home[old]
            elif self.stored(o):
                buffers[o.out] = self.buffer(o.out, o.out, self.device.product)
                owner[o.out] = o.out
        out = replace(self.k, body=with_buffers(self.k.body, owner), buffers=tuple(buffers.values()))
        out = named(with_room(out, self.loop, self.sums, self.device))
        check_limits(self.p, out, self.device)
        return out

    def slots(self, o: Op) -> int:
        """The slots of the ring that `o`, a load, move or sum, fills. Vectors take little room, so that agents that pass sums on
        need not wait for each other."""
        turns = self.agents[o.agent].turns
        if turns > 1 and all(r.agent == o.agent for r, _ in self.all_readers(o.out)):  # a warp uses its own slot again
            return turns
        least = 2 if self.sums and self.type[o.out].rank < 2 else 1
        return max(least, self.s.stages if o.kind == "load" else self.agents[o.agent].slots)

    def buffer(self, name: str, value: str, space: str) -> Buffer:
        """A buffer for `value`."""
        t, made = self.type[value], self.defs.get(value)
        if made is not None and made.attr(BY_COLUMNS) and made.kind != "matmul" and space != self.device.operand:
            t = replace(t, dims=(*t.dims[:-1], made.attr(BY_COLUMNS)))
        return Buffer(name, space, t.shape(self.sizes) or (1,), t.dtype, dims=t.dims)

    def accumulates_in_place(self, o: Op) -> bool:
        """Whether a product may overwrite its accumulator.

        The accumulator must be computed in the same iteration, and all other ops with storage that read it, directly or through
        expressions, must come before.
        """
        order = {x: n for n, x in enumerate(self.inside)}
        made = next((x for x in self.inside if x.out == o.args[2]), None)
        kept = {c.next for c in self.loop.carried}

        def done(r: Op) -> bool:
            """Whether `r` is `o`, or all that reads by `r` comes before it."""
            if r is o or self.stored(r):
                return r is o or order[r] < order[o]
            return bool(r.out) and r.out not in kept and all(done(x) for x, _ in self.readers[r.out])

        return made is not None and made.out not in kept and all(done(r) for r, _ in self.readers[made.out])

    def all_readers(self, name: str) -> list[tuple[Op, int]]:
        """The ops with storage that read `name`. Readers that are expressions are replaced by their own readers."""
        out = []
        for r, n in self.readers.get(name, []):
            last = r.out not in self.readers or self.stored(r) or r.kind in ("load", "diag_inverse", "diagonal")
            out += [(r, n)] if last else self.all_readers(r.out)
        return out

    def stored(self, o: Op) -> bool:
        """Whether the value of `o` has a fragment."""
        if not o.out or is_view(o):
            return False
        if o.kind in ("matmul", "move", "transpose"):
            return True
        operand = any((r.kind == "matmul" and n < 2) or is_sum(r) for r, n in self.readers[o.out])
        copied = any(moves(r, self.device) or stored_by_rows(self.p, r) for r, _ in self.readers[o.out])
        loaded = o.kind == "cast" and o.args[0] in self.defs and self.is_loaded(self.defs[o.args[0]])  # each reader casts it
        again = self.count[o.out] != 1 and not loaded
        return self.type[o.out].rank == 2 and 1 not in self.type[o.out].dims and (operand or copied or again)

    def is_loaded(self, o: Op) -> bool:
        """Whether `o` loads a tile, or moves a loaded one to the registers of a warp."""
        moved = o.kind == "move" and o.args[0] in self.defs and self.agents[o.agent].turns > 1
        return o.kind == "load" or (moved and self.is_loaded(self.defs[o.args[0]]))
