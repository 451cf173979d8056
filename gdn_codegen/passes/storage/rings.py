"""rings: gives the values of warp groups buffers.

What `loader` loads and what crosses from agent to agent lies in shared memory, in a ring: each iteration of the walk takes
the next slot. Accumulators, first operands that were computed, tiles read more than once or transposed, what leaves for
shared memory, and vectors under a column or row lie in fragments. All else is an expression inside its reader, and a vector
or a number always is.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...devices import Groups
from ...ir.core import Agent, Buffer, Kernel, Op, Program, loops, types, uses, walk
from ...schedule.schedule import Schedule, ScheduleError
from ..agents.warp_groups import INVERSE
from ..common import walks
from ..stage import takes
from .pack import WIDTH
from .place import VIEWS, over, with_buffers

#: Bytes that divide the strides of what is copied as a tile.
ROW = 16
#: Bytes at multiples of which buffers in shared memory begin.
ALIGN = 1024


@takes("assigned", gives="placed")
def rings(p: Program, s: Schedule, device: Groups) -> Program:
    """`p` with buffers on the kernels that walk the chunks."""
    return p.map_kernels(lambda k: _Kernel(p, k, s, device).run() if walks(p, k) else k)


def moves(o: Op, device: Groups) -> bool:
    """Whether threads move the value of `o` to shared memory."""
    return o.kind in ("move", "transpose") and o.attr("space") == device.operand


class _Kernel:
    def __init__(self, p: Program, k: Kernel, s: Schedule, device: Groups) -> None:
        self.p, self.k, self.s, self.device = p, k, s, device
        self.sizes = {**p.sizes, **k.sizes}
        (self.loop,) = loops(k.body)
        self.type, self.count = types(k.body), uses(k.body)
        self.readers: dict[str, list[tuple[Op, int]]] = {}
        for o in walk(k.body):
            for n, a in enumerate(o.args):
                self.readers.setdefault(a, []).append((o, n))
        self.inside = list(walk(self.loop.body))
        self.solves = any(o.agent == device.solve for o in self.inside)
        self.own = device.solving if self.solves else {"registers": device.registers, "slots": device.slots}

    def run(self) -> Kernel:
        buffers: dict[str, Buffer] = {}
        owner: dict[str, str] = {}
        for c in self.loop.carried:
            buffers[c.name] = self.buffer(c.name, c.name, self.device.product)
            owner |= {c.init: c.name, c.next: c.name}
        replaced = {o.args[1] for o in self.k.body if isinstance(o, Op) and o.kind == "load" and o.args[1:]}
        for o in self.k.body:
            if isinstance(o, Op) and o.out and self.type[o.out].rank == 0:  # a number that all agents know
                buffers[o.out], owner[o.out] = Buffer(o.out, self.device.number, (), self.type[o.out].dtype), o.out
            elif isinstance(o, Op) and o.kind == "load" and o.args[1:]:  # takes the place of another
                owner[o.args[1]] = owner[o.out]
            elif isinstance(o, Op) and o.kind == "load" and o.out not in {*owner, *replaced}:  # widens before the walk
                buffers[o.out], owner[o.out] = self.buffer(o.out, o.out, self.device.product), o.out
        for o in self.inside:
            if o.out in owner:
                continue
            if over(o, self.device):
                owner[o.out] = owner[o.args[0]]
            elif o.kind == "load" or moves(o, self.device):
                buffers[o.out] = replace(self.buffer(o.out, o.out, self.device.operand), slots=self.slots(o))
                owner[o.out] = o.out
            elif o.kind == "matmul" and len(o.args) == 3 and o.args[2] in owner and self.grown(o):
                owner[o.out] = owner[o.args[2]]
            elif self.stored(o):
                buffers[o.out] = self.buffer(o.out, o.out, self.device.product)
                owner[o.out] = o.out
        out = replace(self.k, body=with_buffers(self.k.body, owner), buffers=tuple(buffers.values()), agents=self.agents(buffers))
        self.fits(out, owner, buffers)
        return out

    def agents(self, buffers: dict[str, Buffer]) -> tuple[Agent, ...]:
        d, first, out = self.device, 0, []
        groups = buffers[self.loop.carried[0].name].shape[0] // d.rows
        for a in d.groups:
            if not any(o.agent == a for o in walk(self.k.body)):
                continue
            out.append(Agent(a, first, 32 * d.warps.get(a, 4 * groups), self.own["registers"][a]))
            first += out[-1].threads
        return tuple(out)

    def slots(self, o: Op) -> int:
        """Of the ring of what `o` loads or moves. An inverse is several iterations ahead of the state."""
        return self.s.stages if o.kind == "load" else self.own["slots"][o.agent]

    def buffer(self, name: str, value: str, space: str) -> Buffer:
        t = self.type[value]
        return Buffer(name, space, t.shape(self.sizes) or (1,), t.dtype, dims=t.dims)

    def grown(self, o: Op) -> bool:
        """Whether a product may overwrite its accumulator: made in the same iteration, and read before by
        what keeps its own value."""
        order = {x: n for n, x in enumerate(self.inside)}
        made = next((x for x in self.inside if x.out == o.args[2]), None)
        kept = {c.next for c in self.loop.carried}
        return made is not None and made.out not in kept and all(r is o or (self.stored(r) and order[r] < order[o])
                                        for r, _ in self.readers[made.out])

    def stored(self, o: Op) -> bool:
        if not o.out or o.kind in VIEWS or o.kind == "last":
            return False
        if o.kind in ("matmul", "move", "transpose"):
            return True
        operand = any(r.kind == "matmul" and n < 2 for r, n in self.readers[o.out])
        copied = any(moves(r, self.device) for r, _ in self.readers[o.out])
        return self.type[o.out].rank == 2 and 1 not in self.type[o.out].dims and (operand or copied or self.count[o.out] != 1)

    def fits(self, k: Kernel, owner: dict[str, str], buffers: dict[str, Buffer]) -> None:
        """What the agents can do, and what shared memory holds."""
        d = self.device
        rows = {buffers[c.name].shape[0] for c in self.loop.carried}
        if len(rows) != 1 or min(rows) % d.rows or min(rows) > d.rows * d.most:
            raise self.error(f"carried values have {', '.join(map(str, sorted(rows)))} rows; {d.state} takes "
                             f"{', '.join(str(d.rows * n) for n in range(1, d.most + 1))}")
        height = {d.state: rows.pop(), d.aux: d.rows}
        for o in walk(k.body):
            if o.agent == d.solve and o.kind != INVERSE:  # a warp a chunk, and the other goes on
                raise self.error(f"{o.out or o.kind} would be computed by {d.solve}, which inverts and no more")
            if o.agent == d.loader and self.p.tensor(o.attr("tensor")).optional:
                raise self.error(f"{o.out} would be loaded only where it is given; {d.loader} copies tiles as they lie")
            t = self.p.tensor(o.attr("tensor")) if o.agent in (d.loader, d.store) and o.kind in ("load", "store") else None
            if t is not None and self.p.shape(t)[-1] * WIDTH[t.dtype] % ROW:
                raise self.error(f"{t.name} has rows of {self.p.shape(t)[-1] * WIDTH[t.dtype]} bytes; copies of tiles take "
                                 f"multiples of {ROW}: K and V that 8 divides")
            if o.kind == "last" and not (o.args[0] in buffers and buffers[o.args[0]].space == d.operand):
                raise self.error(f"last of {o.args[0]}, which does not lie in shared memory")
            if o.kind in ("move", "transpose") and self.type[o.out].rank == 2:
                held = self.type[o.args[0] if moves(o, d) else o.out]  # in fragments
                shape = held.shape(self.sizes)
                if WIDTH[held.dtype] != 2 or shape != (height.get(o.agent), d.rows):
                    can = " or ".join(f"{n} rows with {a}" for a, n in height.items())
                    raise self.error(f"{o.args[0]} would go between shared memory and {o.agent} as {' x '.join(map(str, shape))} "
                                     f"in {held.dtype}; tiles of {d.rows} columns in 16 bit do, of {can}")
            if o.kind != "matmul":
                continue
            a = self.type[o.args[0]]
            if WIDTH[a.dtype] != 2:
                raise self.error(f"product {o.out} has operands in {a.dtype}; float16 and bfloat16 fit")
            if buffers[owner[o.args[1]]].space != d.operand:
                raise self.error(f"product {o.out} has a second operand, {o.args[1]}, that was computed where it is read; "
                                 "form='split' with state='vk' does not")
            m, n = buffers[owner[o.out]].shape
            depth = a.shape(self.sizes)[0 if o.attr("ta") else 1]
            if m != height[o.agent] or n % 64 or n > 128 or depth % 64:
                raise self.error(f"product {o.out} is {m} x {n} over {depth}; {o.agent} takes {height[o.agent]} rows, and "
                                 "columns and depth that 64 divides: C=64, K and V of 64 or 128")
        self.room(k, buffers)

    def room(self, k: Kernel, buffers: dict[str, Buffer]) -> None:
        """Raises ScheduleError, which names the values and their bytes, where the rings need more than shared memory has."""
        d = self.device
        loaded = {o.out for o in walk(k.body) if o.kind == "load"}

        def need(stages: int) -> dict[str, int]:
            """The bytes of each ring; those of loads have `stages` slots."""
            return {b.name: (stages if b.name in loaded else b.slots) * prod(b.shape) * WIDTH[b.dtype]
                    for b in buffers.values() if b.space == d.operand}

        def total(stages: int) -> int:
            return sum(-(-n // ALIGN) * ALIGN for n in need(stages).values())

        limit = d.spaces[d.operand]
        if total(self.s.stages) <= limit:
            return
        sizes = ", ".join(f"{n} {size}" for n, size in sorted(need(self.s.stages).items(), key=lambda x: -x[1]))
        fits = next((n for n in range(self.s.stages - 1, 0, -1) if total(n) <= limit), 0)
        hint = f"stages={fits} fits" if fits else f"stages=1 needs {total(1)}; let an earlier kernel compute some of them"
        raise self.error(f"{d.operand} has {limit} bytes, {total(self.s.stages)} are needed: {sizes}; {hint}")

    def error(self, text: str) -> ScheduleError:
        return ScheduleError(f"{self.p.name}, kernel {self.k.name} on {self.device.name}: {text}")
