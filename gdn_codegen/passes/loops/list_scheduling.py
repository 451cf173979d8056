"""list_scheduling: list scheduling. Requires a kernel of stage "fed"; keeps the stage.

Each body's ops are put in the order in which pipes that run side by side would start them, by the device's rates: the op
that can start first, and of several the one with the longest way to the end. What depends on neither a state nor another
core then no longer waits behind the chain. A space is filled only up to its size as far as that is possible; `pack` has
the last word. Ops that work in place come after the other readers of what they overwrite.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...devices import Cores
from ...ir.core import Kernel, Op, Program, Stmt, types, walk
from ..storage.offsets import WIDTH
from ..storage.pack import VIEWS

CROSSING = 40  # cycles from a signal on one core to the wait of another


def list_scheduling(p: Program, k: Kernel, device: Cores, share: float = 1.0) -> Kernel:
    """`k` with the ops of each body in that order. share: of each space, how much may be in use."""
    return replace(k, body=_body(p, k, replace(device, spaces={s: int(n * share) for s, n in device.spaces.items()}),
                                 k.body, {}))


def _body(p: Program, k: Kernel, device: Cores, body: tuple[Stmt, ...], next_of: dict[str, str]) -> tuple[Stmt, ...]:
    """The body with each run of ops between loops in list order. next_of: what a carried value becomes -> the carried value."""
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
    """One run of ops without a loop between them. next_of: what a carried value becomes -> the carried value."""

    def __init__(self, p: Program, k: Kernel, device: Cores, ops: list[Op], next_of: dict[str, str]) -> None:
        self.p, self.device, self.ops = p, device, ops
        self.sizes, self.type = {**p.sizes, **k.sizes}, types(k.body)
        here = {o.out: n for n, o in enumerate(ops) if o.out}
        self.after: list[set[int]] = [set() for _ in ops]  # what comes before each op
        self.root: dict[str, str] = {}  # value -> the value whose storage it lies in
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
            if target:  # overwritten here
                self.after[n] |= {m for m in readers.get(self.storage(target), []) if m != n}
            if o.out:
                view = o.kind in VIEWS or o.kind == "valid" or o.out in self.rounded
                self.root[o.out] = self.storage(o.args[0]) if view and o.args else \
                    self.storage(o.args[2]) if o.kind == "matmul" and len(o.args) == 3 else o.out
            for a in o.args:
                readers.setdefault(self.storage(a), []).append(n)
        self.left = {r: len(set(ns)) for r, ns in readers.items()}  # readers to come
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
        #: what must be done before each op, with the moves that go right before it
        self.before = [s.union(*(self.after[m] for m in self.glued.get(n, []))) - set(self.glued.get(n, []))
                       for n, s in enumerate(self.after)]
        self.cost = [self.cycles(o) for o in ops]
        self.way = [0.0] * len(ops)
        for n in reversed(range(len(ops))):
            self.way[n] += self.cost[n]
            for m in self.after[n]:
                self.way[m] = max(self.way[m], self.way[n])

    def storage(self, a: str) -> str:
        return self.root.get(a, a)

    def pipe(self, o: Op) -> tuple[str, str]:
        table = self.device.pipes[o.agent]
        return o.agent, table.get(o.kind, table.get("*", ""))

    def elements(self, a: str, agent: str) -> int:
        shape = self.type[a].shape(self.sizes)
        return prod(shape) // (self.device.copies[agent] if len(shape) == 2 else 1)

    def cycles(self, o: Op) -> float:
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
        """The space that `o` fills, and its bytes."""
        if not o.out or self.root[o.out] != o.out or not self.type[o.out].rank:
            return "", 0
        space = str(o.attr("space")) if o.kind == "move" else self.device.product if o.kind == "matmul" else \
            self.device.home[o.agent]
        return space, self.elements(o.out, o.agent) * WIDTH[self.type[o.out].dtype]

    def fits(self, n: int) -> bool:
        o = self.ops[n]
        space, size = self.need(o)
        if not size:
            return True
        ends = sum(self.live[r][1] for r in {self.storage(a) for a in o.args}
                   if r in self.live and self.left[r] == 1 and r not in self.kept and self.live[r] == (space, size))
        used = sum(b for s, b in self.live.values() if s == space)
        return used - min(ends, size) + size <= self.device.spaces[space]

    def occupy(self, n: int) -> None:
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
        """The ops in order: of those that are ready and have room, the one that can start first; of several the one with the
        longest way.
        """
        self.live: dict[str, tuple[str, int]] = dict(self.here_before)
        self.free: dict[tuple[str, str], float] = {}
        self.issue = dict.fromkeys(self.device.agents, 0.0)
        self.done: dict[int, float] = {}
        self.pending = [len(s) for s in self.before]  # of what must be done before each op, how many are not
        self.then: list[list[int]] = [[] for _ in self.ops]  # the ops that each op must be done before
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
        """When what `n` waits for is done."""
        agent = self.ops[n].agent
        return max((self.done[m] + CROSSING * (self.ops[m].agent != agent) for m in self.before[n]), default=0.0)

    def start(self, n: int) -> float:
        o = self.ops[n]
        return max(self.waits(n), self.issue[o.agent], self.free.get(self.pipe(o), 0.0)) if self.cost[n] else 0.0

    def take(self, n: int) -> Op:
        """Issue op n: account for its pipe, its issuer and the space that it fills or frees."""
        o, pipe = self.ops[n], self.pipe(self.ops[n])
        at = max([self.issue[o.agent], *(self.done[m] for m in self.after[n])])
        if any(self.ops[m].agent != o.agent for m in self.after[n]) or (o.kind == "last" and self.cost[n]):
            at = self.issue[o.agent] = max(at, self.waits(n))  # the issuer stands still
        if self.cost[n]:
            at = max(at, self.free.get(pipe, 0.0))
            self.free[pipe] = at + self.cost[n]
        self.done[n] = at + self.cost[n]
        for m in self.then[n]:
            self.pending[m] -= 1
        self.occupy(n)
        return o
