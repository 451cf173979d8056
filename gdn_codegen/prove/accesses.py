"""accesses: the memory that ops of a placed kernel read and write, for the checkers.

passes/sync/accesses.py computes the same for the passes. The two are separate code, so that the checkers find a mistake in one.

- An instruction is an op that has a buffer, a store, or an op that reads a number from a buffer (`last`). The device's table
  gives its pipe. Other ops are expressions: an instruction with such an operand reads the buffers that the expression reads.
- An instruction reads the buffers of its operands and writes its own buffer. If there is a buffer NAME_scratch for its value
  NAME, the instruction writes that, too.
- An instruction with a column as an operand also overwrites the device's scratch memory for columns.
- A channel is a workspace that both cores use. The tiles of channels, and of buffers with slots, are used in rotation.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..devices import Cores
from ..ir.core import Buffer, Kernel, Op, Program, Stmt, loops, rings, walk
from ..ir.types import BYTES

#: Index of a loop -> its current iteration; after the loop, the number of its iterations.
Iterations = dict[str, int]


@dataclass(frozen=True)
class Range:
    """The bytes [low, high) of a memory space, or tiles of a channel, that an op reads or writes. value: the value they belong
    to."""

    space: str
    low: int
    high: int
    write: bool
    value: str

    def covers(self, other: Range) -> bool:
        """Whether this range contains the other range."""
        return self.low <= other.low and other.high <= self.high


def is_instruction(o: Op) -> bool:
    """Whether `o` is an instruction, which a pipe runs."""
    return bool(o.buffer) or o.kind in ("store", "last")


def pipe(device: Cores, o: Op) -> tuple[str, str]:
    """The agent and the pipe that run an instruction."""
    pipes = device.pipes[o.agent]
    return o.agent, pipes[o.kind] if o.kind in pipes else pipes["*"]


class Memory:
    """The memory that the instructions of a kernel use."""

    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        self.column = device.column_scratch
        self.buffers = {b.name: b for b in k.buffers}
        self.channels = {t.name: t.slots for t in p.tensors if t.index == "block"}
        self.made = {o.out: o for o in walk(k.body) if o.out}
        self.home = {o.out: o.buffer for o in self.made.values() if o.buffer}
        for lp in loops(k.body):  # outer loops first, since their values may be initial values of inner loops
            for c in lp.carried:
                self.home[c.name] = self.home[c.result] = self.home[c.init]
        self.rotation = rings(k)
        self.fixed: dict[Op, list[Range]] = {}  # what ops use that use the same in every iteration

    def used(self, o: Op, loop: str, at: Iterations) -> list[Range]:
        """The ranges that the instruction `o` uses in iteration `at`. loop: its innermost loop."""
        if o in self.fixed:
            return self.fixed[o]
        rotates = o.out in self.rotation or any(x in self.rotation for a in o.args for x in self.parts(a))
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
        elif not rotates:
            self.fixed[o] = out
        return out

    def parts(self, a: str) -> Iterator[str]:
        """The values in buffers that a read of `a` reads. There are none for a number that `last` has read from a buffer
        before."""
        if a in self.home:
            yield a
        elif a in self.made and self.made[a].kind != "last":
            for x in self.made[a].args:
                yield from self.parts(x)

    def tile(self, b: Buffer, value: str, at: Iterations, write: bool) -> Range:
        """The bytes of a buffer. If it has several slots: the bytes of the slot of `value` in this iteration."""
        size, low = prod(b.shape) * BYTES[b.dtype], b.offset
        if b.slots > 1 and value in self.rotation:
            loop, ahead = self.rotation[value]
            low += (at.get(loop, 0) + ahead) % b.slots * size
        return Range(b.space, low, low + size, write, value)


def unrolled(k: Kernel, trips: Mapping[str, Sequence[int]]) -> Iterator[tuple[Op, str, Iterations]]:
    """The ops of `k` in program order, with loops unrolled: (op, innermost loop, iterations).

    trips: index of a loop -> the number of its iterations for each execution of the loop, used in rotation.
    """
    met: dict[str, int] = {}
    at: Iterations = {}

    def each(body: tuple[Stmt, ...], loop: str) -> Iterator[tuple[Op, str, Iterations]]:
        """The ops of a body, including those in loops."""
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



