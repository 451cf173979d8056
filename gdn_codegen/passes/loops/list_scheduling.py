"""list_scheduling: orders ops by list scheduling. `arrange` calls it for devices with cores. It needs stage "fed", and keeps
it.

The pass models the pipes of the device, which run side by side, with the device's rates. Of the ops that are ready it takes the
one that can start first. Of several, it takes the one with the longest path to the end. So ops that depend neither on a state
nor on another core do not wait behind a chain of ops that do. The pass fills a space only up to its size, if that is possible.
`pack` makes the final decision. An op that works in place comes after all other readers of the value that it overwrites.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...devices import Cores
from ...ir.core import Kernel, Op, Program, Stmt, types, walk
from ..storage.offsets import WIDTH
from ..storage.pack import VIEWS

CROSSING = 40  # cycles between a signal on one core and the wait for it on another


def list_scheduling(p: Program, k: Kernel, device: Cores, share: float = 1.0) -> Kernel:
    """`k` with the ops of each body in that order. share: the fraction of each space that may be in use."""
    return replace(k, body=_body(p, k, replace(device, spaces={s: int(n * share) for s, n in device.spaces.items()}),
                                 k.body, {}))


def _body(p: Program, k: Kernel, device: Cores, body: tuple[Stmt, ...], next_of: dict[str, str]) -> tuple[Stmt, ...]:
    """The body with each run of ops between loops in list order. next_of: the next value of a carried value -> the carried
    value."""
    out: list[Stmt] = []
    run: list[Op] = []
    for s in body:
        if isinstance(s, Op):
            run.append(s)
            continue
        overwritten = {c.next: c.name for c in s.carried if c.slots == 1}
        out += [*_List(p, k, device, run, next_of).run(), replace(s, body=_body(p, k, device, s.body, overwritten))]
        run = []
    return (*out, *_List(p, k, device, run, next_of).run())


class _List:
    """A run of ops without a loop between them. next_of: the next value of a carried value -> the carried value."""

    def __init__(self, p: Program, k: Kernel, device: Cores, ops: list[Op], next_of: dict[str, str]) -> None:
        self.p, self.device, self.ops = p, device, ops
        self.sizes, self.type = {**p.sizes, **k.sizes}, types(k.body)
        here = {o.out: n for n, o in enumerate(ops) if o.out}
        self.after: list[set[int]] = [set() for _ in ops]  # ops that must come before each op
        self.root: dict[str, str] = {}  # value -> the value whose storage holds it
        readers: dict[str, list[int]] = {}
        touched: dict[str, list[int]] = {}
        self.rounded = {o.out for o in ops if o.kind == "cast" and o.agent != device.agents[0]
                        and all(r.kind == "store" for r in walk(k.body) if o.out in r.args)}
        for n, o in enumerate(ops):
            self.after[n] |= {here[a] for a in o.args if a in here}
            if o.kind in ("load", "store"):
                others = touched.setdefault(o.attr("tensor"), [])
                self.after[n] |= {m for m in others if "store" in (o.kind, ops[m].kind)}
                others.append(n)
            target = o.args[0] if o.kind == "valid" else o.args[2] if len(o.args) == 3 and o.kind == "matmul" else \
                next_of.get(o.out, "")
            if target:  # `o` overwrites it
                self.after[n] |= {m for m in readers.get(self.storage(target), []) if m != n}
            if o.out:
                view = o.kind in VIEWS or o.kind == "valid" or o.out in self.rounded
                self.root[o.out] = self.storage(o.args[0]) if view and o.args else \
                    self.storage(o.args[2]) if o.kind == "matmul" and len(o.args) == 3 else o.out
            for a in o.args:
                readers.setdefault(self.storage(a), []).append(n)
        self.left = {r: len(set(ns)) for r, ns in readers.items()}  # readers that have not run yet
        mine = set(ops)
        outside = {a for o in walk(k.body) if o not in mine for a in o.args} | set(next_of)
        self.kept = {self.storage(a) for a in outside}
        homes = {o.out: o.agent for o in walk(k.body) if o.kind == "load"}
        self.here_before = {a: (device.home[homes.get(a, device.agents[0])], self.elements(a, homes.get(a, device.agents[0]))
                                * WIDTH[self.type[a].dtype])
                            for a in {a for o in ops for a in o.args} - set(here) if self.type[a].rank}
        self.kept |= set(self.here_before)
        feeds = [n for n, o in enumerate(ops) if o.kind == "move" and o.attr("space") in device.feeds]
        self.glued = {m: [n for n in feeds if n in self.after[m]] for m in range(len(ops)) if ops[m].kind == "matmul"}
        self.follows = {n for ns in self.glued.values() for n in ns}
        #: Ops that must be done before each op and before the moves that directly precede it.
        self.before = [s.union(*(self.after[m] for m in self.glued.get(n, []))) - set(self.glued.get(n, []))
                       for n, s in enumerate(self.after)]
        self.cost = [self.cycles(o) for o in ops]
        self.way = [0.0] * len(ops)
        for n in reversed(range(len(ops))):
            self.way[n] += self.cost[n]
            for m in self.after[n]:
                self.way[m] = max(self.way[m], self.way[n])

    def storage(self, a: str) -> str:
        """The value whose storage holds `a`."""
        return self.root.get(a, a)

    def pipe(self, o: Op) -> tuple[str, str]:
        """The agent and the pipe that run `o`."""
        table = self.device.pipes[o.agent]
        return o.agent, table.get(o.kind, table.get("*", ""))

    def elements(self, a: str, agent: str) -> int:
        """The elements of `a` on one core of `agent`."""
        shape = self.type[a].shape(self.sizes)
        return prod(shape) // (self.device.copies[agent] if len(shape) == 2 else 1)

    def cycles(self, o: Op) -> float:
        """The cycles for which `o` occupies its pipe. 0 for an op without an instruction."""
        if (o.kind in VIEWS and o.kind != "last") or o.kind == "valid" or o.out in self.rounded:
            return 0
        pipe = self.pipe(o)
        if o.kind == "matmul":
            work = self.elements(o.out, o.agent) * self.type[o.args[0]].shape(self.sizes)[0 if o.attr("ta") else 1]
            return work / self.device.rates[pipe]
        value = o.out or o.args[0]
        width = max([WIDTH[self.type[x].dtype] for x in (*o.args, value)])
        return 4 + self.elements(value, o.agent) * width / self.device.rates.get(pipe, 1024)

    # --- space -----------------------------------------------------------------------------------------------------
    def need(self, o: Op) -> tuple[str, int]:
        """The space in which `o` needs a new buffer, and the buffer's bytes. "" and 0 if it needs none."""
        if not o.out or self.root[o.out] != o.out or not self.type[o.out].rank:
            return "", 0
        space = str(o.attr("space")) if o.kind == "move" else self.device.product if o.kind == "matmul" else \
            self.device.home[o.agent]
        return space, self.elements(o.out, o.agent) * WIDTH[self.type[o.out].dtype]

    def fits(self, n: int) -> bool:
        """Whether op n has room, given the values that are live and those whose last reader is n."""
        o = self.ops[n]
        space, size = self.need(o)
        if not size:
            return True
        ends = sum(self.live[r][1] for r in {self.storage(a) for a in o.args}
                   if r in self.live and self.left[r] == 1 and r not in self.kept and self.live[r] == (space, size))
        used = sum(b for s, b in self.live.values() if s == space)
        return used - min(ends, size) + size <= self.device.spaces[space]

    def occupy(self, n: int) -> None:
        """Update the live values for op n: free operands without further readers, add the result."""
        o = self.ops[n]
        space, size = self.need(o)
        for r in {self.storage(a) for a in o.args}:
            if r in self.left:
                self.left[r] -= 1
                if not self.left[r] and r not in self.kept:
                    self.live.pop(r, None)
        if size:
            self.live[o.out] = space, size

    # --- the list ------------------------------------------------------------------------------------------------------
    def run(self) -> list[Op]:
        """The ops in list order. If no ready op has room, the first ready op comes next."""
        self.live: dict[str, tuple[str, int]] = dict(self.here_before)
        self.free: dict[tuple[str, str], float] = {}
        self.issue = dict.fromkeys(self.device.agents, 0.0)
        self.done: dict[int, float] = {}
        self.pending = [len(s) for s in self.before]  # for each op: how many ops that must be done before it are not
        self.then: list[list[int]] = [[] for _ in self.ops]  # for each op: the ops that must come after it
        for n, s in enumerate(self.before):
            for m in s:
                self.then[m].append(n)
        out: list[Op] = []
        while len(self.done) < len(self.ops):
            ready = [n for n, count in enumerate(self.pending) if not count and n not in self.done and n not in self.follows]
            able = [n for n in ready if self.fits(n)]
            n = min(able, key=lambda n: (self.start(n), -self.way[n], n)) if able else min(ready)
            for m in [m for m in self.glued.get(n, []) if m not in self.done]:
                out.append(self.take(m))
            out.append(self.take(n))
        return out

    def waits(self, n: int) -> float:
        """The time at which all ops that op n depends on are done. A crossing between agents adds CROSSING cycles."""
        agent = self.ops[n].agent
        return max((self.done[m] + CROSSING * (self.ops[m].agent != agent) for m in self.before[n]), default=0.0)

    def start(self, n: int) -> float:
        """The earliest time at which op n can start. 0 for an op without an instruction."""
        o = self.ops[n]
        return max(self.waits(n), self.issue[o.agent], self.free.get(self.pipe(o), 0.0)) if self.cost[n] else 0.0

    def take(self, n: int) -> Op:
        """Issue op n, and update the times of its pipe and of its agent's issuer, and the live values."""
        o, pipe = self.ops[n], self.pipe(self.ops[n])
        at = max([self.issue[o.agent], *(self.done[m] for m in self.after[n])])
        if any(self.ops[m].agent != o.agent for m in self.after[n]) or (o.kind == "last" and self.cost[n]):
            at = self.issue[o.agent] = max(at, self.waits(n))  # the issuer is blocked
        if self.cost[n]:
            at = max(at, self.free.get(pipe, 0.0))
            self.free[pipe] = at + self.cost[n]
        self.done[n] = at + self.cost[n]
        for m in self.then[n]:
            self.pending[m] -= 1
        self.occupy(n)
        return o
