"""rings: gives buffers to the values of kernels with several agents. For walks on Hopper under TileLang (sm_90a). `place` then
does so for other kernels.

Loaded values, and values that cross between agents, are in shared memory, in a ring. Each iteration of the walk uses the next
slot. Where rings do not fit, a loaded value that leads to no next carried value has one slot. It is read last, so that it is
loaded while the iteration computes the carried value. These values are in fragments: accumulators, computed first operands,
tiles that are transposed or have several readers, values that a move copies to shared memory, and vectors under a column or row.
All other values are expressions inside their readers: vectors and numbers that the loop computes, and elementwise ops with one
reader.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...ir.core import Buffer, Kernel, Op, Program, loops, types, uses, walk
from ...schedule.schedule import Schedule
from ..stage import takes
from ..uses import readers
from .buffer_names import named
from .by_rows import stored_by_rows
from .place import with_buffers
from .ring_bytes import shared_bytes
from .stored_values import is_view, over
from .used_up import used_up
from .walk_limits import SUMS, check_limits, moves


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
        self.sums = any(o.kind in SUMS for o in self.inside)

    def run(self) -> Kernel:
        """The kernel with a ring for each value that crosses between agents or is loaded, and with fragments for others."""
        buffers: dict[str, Buffer] = {}
        owner: dict[str, str] = {}
        for c in self.loop.carried:
            buffers[c.name] = self.buffer(c.name, c.name, self.device.product)
            owner |= {c.init: c.name, c.next: c.name}
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
            elif o.kind == "load" or moves(o, self.device) or o.kind in SUMS:
                buffers[o.out] = replace(self.buffer(o.out, o.out, self.device.operand), slots=self.slots(o))
                owner[o.out] = o.out
            elif o.kind == "matmul" and len(o.args) == 3 and o.args[2] in owner and self.accumulates_in_place(o):
                owner[o.out] = owner[o.args[2]]
            elif self.sums and o.kind == "matmul" and len(o.args) == 3 and (
                    old := used_up(o, self.inside, owner, self.stored, self.type)):
                owner[o.out] = owner[old]
            elif self.stored(o):
                buffers[o.out] = self.buffer(o.out, o.out, self.device.product)
                owner[o.out] = o.out
        out = replace(self.k, body=with_buffers(self.k.body, owner), buffers=tuple(buffers.values()))
        if shared_bytes(out, self.device) > self.device.spaces[self.device.operand]:
            out = self.narrowed(out)
        elif self.sums:
            out = self.widened(out)
        out = named(out)
        check_limits(self.p, out, self.device)
        return out

    def narrowed(self, k: Kernel) -> Kernel:
        """`k` with one slot in each ring of a load that leads to no next carried value."""
        first = {c.next for c in self.loop.carried}
        for o in reversed(self.inside):
            first |= set(o.args) if o.out in first else set()
        last = {o.buffer for o in k.ops if o.kind == "load" and o.out not in first}
        return replace(k, buffers=tuple(replace(b, slots=1) if b.name in last else b for b in k.buffers))

    def widened(self, k: Kernel) -> Kernel:
        """`k` with a further slot in rings of loads, as far as there is room: first in those that are read last, because the next
        iteration waits for them."""
        last = {a: n for n, o in enumerate(self.inside) for a in o.args}
        for o in sorted((o for o in self.inside if o.kind == "load"), key=lambda o: -last.get(o.out, 0)):
            wider = replace(k, buffers=tuple(replace(b, slots=b.slots + 1) if b.name == o.out else b for b in k.buffers))
            k = wider if shared_bytes(wider, self.device) <= self.device.spaces[self.device.operand] else k
        return k

    def slots(self, o: Op) -> int:
        """The slots of the ring that `o`, a load, move or sum, fills. Vectors take little room, so that agents that pass sums on
        need not wait for each other."""
        least = 2 if self.sums and self.type[o.out].rank < 2 else 1
        return max(least, self.s.stages if o.kind == "load" else self.agents[o.agent].slots)

    def buffer(self, name: str, value: str, space: str) -> Buffer:
        """A buffer for `value`."""
        t = self.type[value]
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

    def stored(self, o: Op) -> bool:
        """Whether the value of `o` has a fragment."""
        if not o.out or is_view(o):
            return False
        if o.kind in ("matmul", "move", "transpose"):
            return True
        operand = any((r.kind == "matmul" and n < 2) or r.kind in SUMS for r, n in self.readers[o.out])
        copied = any(moves(r, self.device) or stored_by_rows(self.p, r) for r, _ in self.readers[o.out])
        loaded = o.kind == "cast" and o.args[0] in self.defs and self.defs[o.args[0]].kind == "load"  # each reader casts it
        again = self.count[o.out] != 1 and not loaded
        return self.type[o.out].rank == 2 and 1 not in self.type[o.out].dims and (operand or copied or again)
