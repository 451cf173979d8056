"""accesses: what ops of a placed kernel read and write, as the checkers see it.

This is written apart from what the passes know (passes/sync/accesses.py), so that a mistake in one of the two shows.

- An instruction is an op that fills a buffer, stores, or takes a number out of memory (`last`). Its pipe is in the device's
  table. Other ops compute nothing by themselves: an instruction that reads one reads what the op is made of.
- It reads the buffers of its operands and writes its own. A buffer of its name and "_scratch" is written, too.
- With a column as an operand it writes the device's scratch for columns.
- A workspace between cores is memory that both use. Its tiles, and those of buffers with slots, are used in rotation.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..devices import Cores
from ..ir.core import Buffer, Kernel, Op, Program, Stmt, loops, rings, walk

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
#: The iteration of each loop, by index; after a loop the number of its iterations.
Iterations = dict[str, int]


@dataclass(frozen=True)
class Range:
    """Bytes low to high of a space, or tiles of a workspace, that an op reads or writes. value: whose they are."""

    space: str
    low: int
    high: int
    write: bool
    value: str

    def covers(self, other: Range) -> bool:
        """Whether the other's bytes are all among these."""
        return self.low <= other.low and other.high <= self.high


def is_instruction(o: Op) -> bool:
    """Whether a pipe runs `o`."""
    return bool(o.buffer) or o.kind in ("store", "last")


def pipe(device: Cores, o: Op) -> tuple[str, str]:
    """The agent and the pipe that run an instruction."""
    pipes = device.pipes[o.agent]
    return o.agent, pipes[o.kind] if o.kind in pipes else pipes["*"]


class Memory:
    """What instructions of a kernel use."""

    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        self.column = device.column_scratch
        self.buffers = {b.name: b for b in k.buffers}
        self.channels = {t.name: t.slots for t in p.tensors if t.index == "block"}
        self.made = {o.out: o for o in walk(k.body) if o.out}
        self.home = {o.out: o.buffer for o in self.made.values() if o.buffer}
        for lp in loops(k.body):  # outer loops first, whose values the inner ones start as
            for c in lp.carried:
                self.home[c.name] = self.home[c.result] = self.home[c.init]
        self.rotation = rings(k)

    def used(self, o: Op, loop: str, at: Iterations) -> list[Range]:
        """What the instruction `o`, in the innermost loop `loop`, uses in that iteration."""
        out = [self.tile(self.buffers[self.home[x]], x, at, False) for a in o.args for x in self.parts(a)]
        if o.buffer:
            out.append(self.tile(self.buffers[o.buffer], o.out, at, True))
        scratch = self.buffers.get(f"{o.out}_scratch")
        if scratch is not None:
            out.append(self.tile(scratch, scratch.name, at, True))
        if any(a in self.made and self.made[a].kind == "col" for a in o.args):
            out.append(Range(*self.column, write=True, value="scratch of a column"))
        tensor = o.attr("tensor") if o.kind in ("load", "store") else None
        if tensor in self.channels:
            slot = (at.get(loop, 0) + o.attr("ahead", 0)) % self.channels[tensor]
            out.append(Range(tensor, slot, slot + 1, o.kind == "store", tensor))
        return out

    def parts(self, a: str) -> Iterator[str]:
        """The values in buffers that reading `a` reads; none for a number that a core has taken out of memory."""
        if a in self.home:
            yield a
        elif a in self.made and self.made[a].kind != "last":
            for x in self.made[a].args:
                yield from self.parts(x)

    def tile(self, b: Buffer, value: str, at: Iterations, write: bool) -> Range:
        """The bytes of a buffer; of one with several slots, those of the slot that `value` has in this iteration."""
        size, low = prod(b.shape) * BYTES[b.dtype], b.offset
        if b.slots > 1 and value in self.rotation:
            loop, ahead = self.rotation[value]
            low += (at.get(loop, 0) + ahead) % b.slots * size
        return Range(b.space, low, low + size, write, value)


def unrolled(k: Kernel, trips: Mapping[str, Sequence[int]]) -> Iterator[tuple[Op, str, Iterations]]:
    """The ops of `k` in program order with their innermost loop and the iterations. trips: how often a loop runs, by index, each
    time that it is met."""
    met: dict[str, int] = {}
    at: Iterations = {}

    def each(body: tuple[Stmt, ...], loop: str) -> Iterator[tuple[Op, str, Iterations]]:
        """The ops of a body, loops entered."""
        for s in body:
            if isinstance(s, Op):
                yield s, loop, at
                continue
            n = met[s.index] = met.get(s.index, -1) + 1
            times = trips[s.index][n % len(trips[s.index])]
            for t in range(times):
                at[s.index] = t
                yield from each(s.body, s.index)
            at[s.index] = times
    return each(k.body, "")



