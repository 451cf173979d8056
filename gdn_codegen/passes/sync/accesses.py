"""What `synchronise` knows of a kernel: the ops' accesses to memory, the unrolled trace, and vector clocks over pipes. The
checker has a model of its own (prove/accesses.py).

A pipe is (agent, name). `known[a][b]` counts the ops of pipe b that are surely complete before the next op of pipe a
starts. A pipe is ordered with itself unless the device lists it as unordered. What the issuing pipe of an agent knows,
all pipes of that agent know from then on, because it issues their ops.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...devices import Cores
from ...ir.core import Kernel, Loop, Op, Program, Stmt, rings, walk
from ..storage.offsets import WIDTH

Pipe = tuple[str, str]
Path = tuple[int, ...]  # a statement's place: its index in each body on the way to it
Iteration = tuple[int, ...]  # the iteration of each loop on the way to it
Counts = dict[str, int]  # by index of a loop: iterations that it made before the one it is in, or before it ended


def pipe_of(device: Cores, o: Op) -> Pipe | None:
    """The pipe that runs `o`; None for what is no instruction."""
    if o.kind in ("const", "scalar", "col", "row", "part", "signal", "wait", "barrier"):
        return None
    table = device.pipes[o.agent]
    if o.out and not o.buffer and o.kind != "last":
        return None
    return o.agent, table.get(o.kind, table.get("*", ""))


@dataclass(frozen=True)
class Access:
    """Bytes that an op reads or writes. space: a memory space, or the name of a workspace that a core group shares.

    slots: how many such ranges the iterations of `loop` take one after the other; ahead: iterations ahead of the current one.
    """

    space: str
    low: int
    high: int
    write: bool
    value: str
    slots: int = 1
    loop: str = ""
    ahead: int = 0

    def at(self, counts: Counts) -> Access:
        """The range in an iteration."""
        if self.slots == 1:
            return self
        shift = (counts.get(self.loop, 0) + self.ahead) % self.slots * (self.high - self.low)
        return replace(self, low=self.low + shift, high=self.high + shift)

    def meets(self, other: Access) -> bool:
        """Whether the two touch a common byte, and one of them writes it."""
        return self.space == other.space and self.low < other.high and other.low < self.high \
            and (self.write or other.write)


def accesses(p: Program, k: Kernel, device: Cores) -> dict[Path, list[Access]]:
    """What each op of a placed kernel reads and writes, by the op's place."""
    buffers = {b.name: b for b in k.buffers}
    shared = {t.name: t.slots for t in p.tensors if t.index == "block"}
    defs = {o.out: o for o in walk(k.body) if o.out}
    ring = rings(k)

    def memory(name: str, write: bool, value: str, stored: str = "") -> Access:
        b = buffers[name]
        n = WIDTH[b.dtype]
        for d in b.shape:
            n *= d
        return Access(b.space, b.offset, b.offset + n, write, value, b.slots, *ring.get(stored, ()))

    where: dict[str, str] = {o.out: o.buffer for o in walk(k.body) if o.buffer}
    _carried(k.body, where)

    def source(name: str) -> str | None:
        """The value with a buffer that `name` is read from."""
        if name in where:
            return name
        o = defs.get(name)
        if o is None or o.kind in ("const", "scalar", "last"):
            return None
        return source(o.args[0])

    out: dict[Path, list[Access]] = {}
    for path, loop, o in _places(k.body):
        if pipe_of(device, o) is None:
            continue
        found = [memory(where[s], False, a, s) for a in o.args if (s := source(a))]
        if o.buffer:
            found.append(memory(o.buffer, True, o.out, o.out))
        if f"{o.out}_scratch" in buffers:
            found.append(memory(f"{o.out}_scratch", True, f"{o.out}_scratch"))
        if any(a in defs and defs[a].kind == "col" for a in o.args):
            space, low, high = device.column_scratch
            found.append(Access(space, low, high, True, "scratch of a column"))
        if o.kind in ("load", "store") and o.attr("tensor") in shared:
            tensor = o.attr("tensor")
            found.append(Access(tensor, 0, 1, o.kind == "store", tensor, shared[tensor], loop, o.attr("ahead", 0)))
        out[path] = found
    return out


def _places(body: tuple[Stmt, ...], path: Path = (), loop: str = "") -> Iterator[tuple[Path, str, Op]]:
    """Every op in program order, with its place and the index of the innermost loop around it."""
    for i, s in enumerate(body):
        if isinstance(s, Loop):
            yield from _places(s.body, (*path, i), s.index)
        else:
            yield (*path, i), loop, s


def _carried(body: tuple[Stmt, ...], where: dict[str, str]) -> None:
    for s in body:
        if isinstance(s, Loop):
            for c in s.carried:
                where[c.name] = where[c.result] = where[c.init]
            _carried(s.body, where)


@dataclass(frozen=True)
class Step:
    """One op of the trace; or, with op None, the end of a loop."""

    op: Op | None
    path: Path
    iteration: Iteration
    counts: Counts


def trace(k: Kernel, trips: dict[str, list[int]]) -> Iterator[Step]:
    """The kernel's ops in program order, loops unrolled. trips: how often a loop runs, each time that it is met."""
    met: dict[str, int] = {}
    counts: Counts = {}

    def each(body: tuple[Stmt, ...], path: Path, iteration: Iteration) -> Iterator[Step]:
        """The steps of a body, loops entered."""
        nonlocal counts
        for i, s in enumerate(body):
            if isinstance(s, Loop):
                n = met[s.index] = met.get(s.index, -1) + 1
                times = trips[s.index][n % len(trips[s.index])]
                for t in range(times):
                    counts = {**counts, s.index: t}
                    yield from each(s.body, (*path, i), (*iteration, t))
                counts = {**counts, s.index: times}
                yield Step(None, (*path, i), iteration, counts)
            else:
                yield Step(s, (*path, i), iteration, counts)
    return each(k.body, (), ())


class Clocks:
    """Vector clocks of all pipes."""

    def __init__(self, device: Cores) -> None:
        names = [(a, n) for a in device.agents for n in dict.fromkeys([device.issuer, *device.pipes[a].values()])]
        self.device = device
        self.number = {p: i for i, p in enumerate(names)}
        self.names = names
        self.issued = [0] * len(names)
        self.known = [[0] * len(names) for _ in names]
        self.loose = {self.number[p] for p in names if p[1] in device.unordered}
        self.boss = [self.number[a, device.issuer] for a, _ in names]

    def learn(self, pipe: int, what: list[int]) -> None:
        """Let the next op of `pipe` rely on what is complete according to `what`."""
        mine = self.known[pipe]
        for i, n in enumerate(what):
            if n > mine[i]:
                mine[i] = n

    def start(self, pipe: int) -> list[int]:
        """What the next op of `pipe` may rely on."""
        if self.boss[pipe] != pipe:
            self.learn(pipe, self.known[self.boss[pipe]])
        return self.known[pipe]

    def run(self, pipe: int) -> int:
        """Issue an op; its number on its pipe."""
        self.start(pipe)
        self.issued[pipe] += 1
        if pipe not in self.loose:
            self.known[pipe][pipe] = self.issued[pipe]
        return self.issued[pipe]

    def snapshot(self, pipe: int) -> list[int]:
        """What is complete once all of `pipe`'s ops so far are."""
        out = list(self.start(pipe))
        out[pipe] = self.issued[pipe]
        return out

    def barrier(self, pipe: int) -> None:
        """Let the next op of `pipe` rely on all ops of the pipe so far."""
        self.known[pipe][pipe] = self.issued[pipe]

    def drain(self, agent: str) -> None:
        """The issuer waits for all pipes of its agent."""
        boss = self.number[agent, self.device.issuer]
        for p, i in self.number.items():
            if p[0] == agent:
                self.learn(boss, self.snapshot(i))
