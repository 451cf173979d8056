"""list_scheduling: orders ops by list scheduling. `arrange` calls it for devices with cores. It needs stage "fed", and keeps
it.

The pass models the pipes of the device, which run side by side, with the device's rates. Of the ops that are ready it takes the
one that can start first. Of several, it takes the one with the longest path to the end. So ops that depend neither on a state
nor on another core do not wait behind a chain of ops that do. The pass fills a space only up to its size, if that is possible.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ...devices import Cores
from ...ir.core import Kernel, Op, Program
from ...ir.ops import OPS
from ..storage.core_values import pipe
from .dependences import Dependences, by_runs
from .live_values import LiveValues
from .op_costs import OpCosts

CROSSING = 40  # cycles between a signal on one core and the wait for it on another


def list_scheduling(p: Program, k: Kernel, device: Cores) -> Kernel:
    """`k` with the ops of each body in list order."""
    costs = OpCosts(p, k, device)
    return replace(k, body=by_runs(k.body, lambda ops, next_of: _List(costs, ops, next_of).run()))


class _List:
    """A run of ops without a loop between them. next_of: the next value of a carried value -> the carried value."""

    def __init__(self, costs: OpCosts, ops: list[Op], next_of: dict[str, str]) -> None:
        """Finds the pipe, the cost and the dependences of each op. No op is placed yet: all pipes are free in cycle 0."""
        self.costs, self.ops = costs, ops
        self.d = d = Dependences(ops, next_of, costs.rounded, costs.device.feeds)
        made, read = {o.out for o in ops}, Counter(a for o in ops for a in o.args)
        earlier = {a: costs.from_before(a) for a in sorted(read.keys() - made) if costs.type[a].rank}
        outside = {a for a in (*read, *made) if costs.reads.get(a, 0) > read[a]} | set(next_of)
        self.live = LiveValues(ops, d, [costs.need(o, d) for o in ops], earlier, {*map(d.storage, outside), *earlier},
                               costs.device.spaces)
        self.pipe, self.cost = [pipe(costs.device, o) for o in ops], [costs.cycles(o) for o in ops]
        self.agent, self.way = [o.agent for o in ops], d.ways(self.cost)
        self.free = dict.fromkeys(self.pipe, 0.0)  # when each pipe is free
        self.issue = dict.fromkeys(costs.device.agents, 0.0)  # when each agent can issue an op
        self.done: dict[int, float] = {}

    def run(self) -> list[Op]:
        """The ops in list order. If no ready op has room, the first ready op comes next."""
        feeds = {m for ns in self.d.feeding.values() for m in ns}
        pending = [len(s) for s in self.d.before]  # for each op: how many ops that must be done before it are not
        then: list[list[int]] = [[] for _ in self.ops]  # for each op: the ops that must come after it
        for n, s in enumerate(self.d.before):
            for m in s:
                then[m].append(n)
        ready = {n: 0.0 for n, count in enumerate(pending) if not count and n not in feeds}  # op -> when its operands are there
        out: list[Op] = []
        while ready:
            n = min(able)[-1] if (able := self.able(ready)) else min(ready)
            del ready[n]
            for x in (*(m for m in self.d.feeding.get(n, ()) if m not in self.done), n):
                out.append(self.take(x))
                for m in then[x]:
                    pending[m] -= 1
                    if not pending[m] and m not in feeds:
                        ready[m] = self.waits(m)
        return out

    def able(self, ready: dict[int, float]) -> list[tuple[float, float, int]]:
        """Those of the ready ops that have room: when each can start at the earliest, minus its way to the end, its number. An op
        without an instruction can start in cycle 0. ready: op -> when its operands are there."""
        out = []
        for n, at in ready.items():
            if self.live.fits(n):
                if not self.cost[n]:
                    at = 0.0
                else:
                    issued, free = self.issue[self.agent[n]], self.free[self.pipe[n]]
                    at = issued if issued > at else at
                    at = free if free > at else at
                out.append((at, -self.way[n], n))
        return out

    def waits(self, n: int) -> float:
        """The time at which all ops that op n depends on are done. A crossing between agents adds CROSSING cycles."""
        mine, agent, done = self.agent[n], self.agent, self.done
        return max([done[m] + CROSSING * (agent[m] != mine) for m in self.d.before[n]], default=0.0)

    def take(self, n: int) -> Op:
        """Issue op n, and update the times of its pipe and of its agent's issuer, and the live values."""
        o, cost = self.ops[n], self.cost[n]
        at = max([self.issue[o.agent], *[self.done[m] for m in self.d.after[n]]])
        if any(self.ops[m].agent != o.agent for m in self.d.after[n]) or (OPS[o.kind].entry and cost):
            at = self.issue[o.agent] = max(at, self.waits(n))  # the issuer is blocked
        if cost:
            at = max(at, self.free[self.pipe[n]])
            self.free[self.pipe[n]] = at + cost
        self.done[n] = at + cost
        self.live.run(n)
        return o
