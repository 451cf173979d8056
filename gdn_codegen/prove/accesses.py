"""accesses: the memory that ops of a placed kernel read and write, for the checkers.

passes/sync/accesses.py computes the same for the passes. The two are separate code, so that the checkers find a mistake in one.

- An instruction is an op that has a buffer, a store, or an op that reads an entry of a buffer (`OpDef.entry`). The device's table
  gives its pipe. Other ops are expressions: an instruction with such an operand reads the buffers that the expression reads.
- An instruction reads the buffers of its operands and writes its own buffer. If there is a buffer NAME_scratch for its value
  NAME, the instruction writes that, too.
- An instruction with a column as an operand also overwrites the device's scratch memory for columns.
- A channel is a workspace that both cores use. The tiles of channels, and of buffers with slots, are used in rotation.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ..devices import Cores
from ..ir.core import Buffer, Kernel, Op, Program, Stmt, loops
from ..ir.ops import OPS
from ..ir.rings import rings
from ..ir.types import BYTES

#: Index of a loop -> its current iteration; after the loop, the number of its iterations.
Iterations = dict[str, int]


class Bytes(NamedTuple):
    """The bytes [low, high) of a memory space, tiles of a channel, or of a tile in global memory the rows [low, high) and the
    columns [left, right)."""

    space: str
    low: int
    high: int
    left: int = 0
    right: int = 1

    def overlaps(self, other: Bytes) -> bool:
        """Whether both have some byte."""
        return (self.space == other.space and self.low < other.high and other.low < self.high
                and self.left < other.right and other.left < self.right)

    def covers(self, other: Bytes) -> bool:
        """Whether these bytes contain the others, which overlap them."""
        return (self.low <= other.low and other.high <= self.high
                and self.left <= other.left and other.right <= self.right)

    def common(self, other: Bytes) -> str:
        """What both have, for an error."""
        columns = f", {max(self.left, other.left)}:{min(self.right, other.right)}" if self.right > 1 else ""
        return f"{self.space}[{max(self.low, other.low)}:{min(self.high, other.high)}{columns}]"


class Range(NamedTuple):
    """Bytes that an op reads or writes. value: the value they belong to."""

    bytes: Bytes
    write: bool
    value: str


class Tiles(NamedTuple):
    """What an op reads or writes in each iteration: `ranges` in rotation, starting `ahead` of the iteration of `loop`."""

    ranges: tuple[Range, ...]
    loop: str = ""
    ahead: int = 0

    def slot(self, at: Iterations) -> int:
        """Which of the ranges an iteration uses."""
        return (at.get(self.loop, 0) + self.ahead) % len(self.ranges)


def is_instruction(o: Op) -> bool:
    """Whether `o` is an instruction, which a pipe runs."""
    return bool(o.buffer) or o.kind == "store" or OPS[o.kind].entry


def pipe(device: Cores, o: Op) -> tuple[str, str]:
    """The agent and the pipe that run an instruction."""
    if OPS[o.kind].entry:
        return o.agent, device.issuer
    pipes = device.pipes[o.agent]
    return o.agent, pipes[o.kind] if o.kind in pipes else pipes["*"]


class Memory:
    """The memory that the instructions of a kernel use."""

    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        """Finds the buffer of each value, and the bytes of each slot of a buffer."""
        self.column = device.column_scratch
        self.buffers = {b.name: b for b in k.buffers}
        self.slots = {b.name: [Bytes(b.space, b.offset + n * size, b.offset + (n + 1) * size) for n in range(b.slots)]
                      for b in k.buffers for size in [prod(b.shape) * BYTES[b.dtype]]}
        self.channels = {t.name: t.slots for t in p.tensors if t.index == "block"}
        self.made = {o.out: o for o in k.ops if o.out}
        self.home = {o.out: o.buffer for o in self.made.values() if o.buffer}
        for lp in loops(k.body):  # outer loops first, since their values may be initial values of inner loops
            for c in lp.carried:
                self.home[c.name] = self.home[c.result] = self.home[c.init]
        self.rotation = rings(k)

    def used(self, o: Op, loop: str) -> list[Tiles]:
        """What the instruction `o` uses. loop: its innermost loop."""
        out = [self.tile(self.buffers[self.home[x]], x, False) for a in o.args for x in self.parts(a)]
        if o.buffer:
            out.append(self.tile(self.buffers[o.buffer], o.out, True))
        scratch = self.buffers.get(f"{o.out}_scratch")
        if scratch is not None:
            out.append(self.tile(scratch, scratch.name, True))
        if any(a in self.made and self.made[a].kind == "col" for a in o.args):
            out.append(Tiles((Range(Bytes(*self.column), True, "scratch of a column"),)))
        tensor = o.attr("tensor") if o.kind in ("load", "store") else None
        if tensor in self.channels:
            tiles = tuple(Range(Bytes(tensor, n, n + 1), o.kind == "store", tensor) for n in range(self.channels[tensor]))
            out.append(Tiles(tiles, loop, o.attr("ahead", 0)))
        return out

    def parts(self, a: str) -> Iterator[str]:
        """The values in buffers that a read of `a` reads. There are none for an entry that an op has read from a
        buffer before."""
        if a in self.home:
            yield a
        elif a in self.made and not OPS[self.made[a].kind].entry:
            for x in self.made[a].args:
                yield from self.parts(x)

    def tile(self, b: Buffer, value: str, write: bool) -> Tiles:
        """The bytes of a buffer. If it has several slots: the bytes of the slot of `value` in each iteration."""
        slots = self.slots[b.name]
        if b.slots > 1 and value in self.rotation:
            return Tiles(tuple([Range(x, write, value) for x in slots]), *self.rotation[value])
        return Tiles((Range(slots[0], write, value),))


def run_unrolled(k: Kernel, trips: Mapping[str, Sequence[int]], each: Callable[[Op, str], Callable[[Iterations], None]]) -> None:
    """Run the ops of `k` in program order, with loops unrolled: what `each` makes of an op, with the current iterations.

    trips: index of a loop -> the number of its iterations for each execution of the loop, used in rotation. each: called once
    for each op, with the op and its innermost loop.
    """
    at: Iterations = {}
    for act in _Unrolled(trips, each).made(k.body, ""):
        act(at)


class _Unrolled:
    """The functions that run the statements of a kernel. met: index of a loop -> the number of its latest execution."""

    def __init__(self, trips: Mapping[str, Sequence[int]], each: Callable[[Op, str], Callable[[Iterations], None]]) -> None:
        self.trips, self.each = trips, each
        self.met: dict[str, int] = {}

    def made(self, body: tuple[Stmt, ...], loop: str) -> list[Callable[[Iterations], None]]:
        """What `each` makes of the ops of a body; for a loop, the function that runs it."""
        return [self.each(s, loop) if isinstance(s, Op) else self.repeated(s.index, self.made(s.body, s.index)) for s in body]

    def repeated(self, over: str, body: list[Callable[[Iterations], None]]) -> Callable[[Iterations], None]:
        """The function that runs a loop."""
        def run(at: Iterations) -> None:
            n = self.met[over] = self.met.get(over, -1) + 1
            times = self.trips[over][n % len(self.trips[over])]
            for t in range(times):
                at[over] = t
                for act in body:
                    act(at)
            at[over] = times
        return run
