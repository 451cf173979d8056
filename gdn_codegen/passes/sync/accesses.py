"""accesses: what `synchronise` knows of a kernel: the memory that ops access, the unrolled trace, and vector clocks of pipes.
The checker has its own model (prove/accesses.py).

A pipe is (agent, name). `known[a][b]` is the number of ops of pipe b that are surely complete before the next op of pipe a
starts. The ops of a pipe run in order, unless the device lists the pipe as unordered. The issuing pipe of an agent issues the
ops of all its pipes. So all of them know what the issuing pipe knows.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...devices import Cores
from ...ir.core import Kernel, Loop, Op, Program, Stmt, rings, walk
from ..storage.offsets import WIDTH

Pipe = tuple[str, str]
Path = tuple[int, ...]  # the place of a statement: its index in each body around it, outermost first
Iteration = tuple[int, ...]  # the iteration of each loop around a statement, outermost first
Counts = dict[str, int]  # index of a loop -> its current iteration, or after its end, its number of iterations


def pipe_of(device: Cores, o: Op) -> Pipe | None:
    """The pipe that runs `o`. None if `o` is no instruction."""
    if o.kind in ("const", "scalar", "col", "row", "part", "signal", "wait", "barrier"):
        return None
    table = device.pipes[o.agent]
    if o.out and not o.buffer and o.kind != "last":
        return None
    return o.agent, table.get(o.kind, table.get("*", ""))


@dataclass(frozen=True)
class Access:
    """Bytes that an op reads or writes. space: a memory space, or the name of a workspace that a core group shares.

    slots: the number of such ranges, which the iterations of `loop` use in turn. ahead: how many iterations ahead of the
    current one the op works.
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
        """Whether the two accesses have a byte in common, and at least one of them writes."""
        return self.space == other.space and self.low < other.high and other.low < self.high \
            and (self.write or other.write)


def accesses(p: Program, k: Kernel, device: Cores) -> dict[Path, list[Access]]:
    """The accesses of each op, by the op's place. k: a kernel with buffers."""
    buffers = {b.name: b for b in k.buffers}
    shared = {t.name: t.slots for t in p.tensors if t.index == "block"}
    defs = {o.out: o for o in walk(k.body) if o.out}
    ring = rings(k)

    def memory(name: str, write: bool, value: str, stored: str = "") -> Access:
        """The access to a buffer."""
        b = buffers[name]
        n = WIDTH[b.dtype]
        for d in b.shape:
            n *= d
        return Access(b.space, b.offset, b.offset + n, write, value, b.slots, *ring.get(stored, ()))

    where: dict[str, str] = {o.out: o.buffer for o in walk(k.body) if o.buffer}
    _carried(k.body, where)

    def source(name: str) -> str | None:
        """The value with a buffer from which `name` is read."""
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
    """Add to `where` the buffers of carried values, which are those of their initial values."""
    for s in body:
        if isinstance(s, Loop):
            for c in s.carried:
                where[c.name] = where[c.result] = where[c.init]
            _carried(s.body, where)


@dataclass(frozen=True)
class Step:
    """An op of the trace. With op None, the end of a loop."""

    op: Op | None
    path: Path
    iteration: Iteration
    counts: Counts


def trace(k: Kernel, trips: dict[str, list[int]]) -> Iterator[Step]:
    """The kernel's ops in program order, with loops unrolled. trips: for each loop, its numbers of iterations, which are used
    in turn."""
    met: dict[str, int] = {}
    counts: Counts = {}

    def each(body: tuple[Stmt, ...], path: Path, iteration: Iteration) -> Iterator[Step]:
        """The steps of a body."""
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
        """Let the next op of `pipe` rely on the completion of the ops that `what` counts."""
        mine = self.known[pipe]
        for i, n in enumerate(what):
            if n > mine[i]:
                mine[i] = n

    def start(self, pipe: int) -> list[int]:
        """The counts of ops that the next op of `pipe` may rely on."""
        if self.boss[pipe] != pipe:
            self.learn(pipe, self.known[self.boss[pipe]])
        return self.known[pipe]

    def run(self, pipe: int) -> int:
        """Issue an op. Returns its number on its pipe."""
        self.start(pipe)
        self.issued[pipe] += 1
        if pipe not in self.loose:
            self.known[pipe][pipe] = self.issued[pipe]
        return self.issued[pipe]

    def snapshot(self, pipe: int) -> list[int]:
        """The counts of ops that are complete once all ops of `pipe` so far are."""
        out = list(self.start(pipe))
        out[pipe] = self.issued[pipe]
        return out

    def barrier(self, pipe: int) -> None:
        """Let the next op of `pipe` rely on all ops of the pipe so far."""
        self.known[pipe][pipe] = self.issued[pipe]

    def drain(self, agent: str) -> None:
        """Let the issuer of an agent wait for all pipes of the agent."""
        boss = self.number[agent, self.device.issuer]
        for p, i in self.number.items():
            if p[0] == agent:
                self.learn(boss, self.snapshot(i))
