"""check_waits: proves that the waits order all conflicting accesses to memory.

The checker unrolls loops (TRIPS), and models flags as the device does: one queue for each id. It does not depend on
the pass that made the flags. It refuses:
- two ops that access the same bytes, at least one of them a write, without an order between them;
- a flag that is set again before the wait for the previous set;
- a wait for a flag that nothing sets;
- a flag that is still set at the end;
- a counter above its limit.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

from ..devices import Cores, Device
from ..ir.core import Kernel, Op, Program, map_ops, walk
from ..ir.printer import op_text
from .accesses import Iterations, Memory, Range, is_instruction, pipe, unrolled
from .clocks import Clocks

TRIPS = {"item": [7], "chunk": [5, 4, 0, 1, 0, 2, 3]}


class RaceError(ValueError):
    """Two conflicting accesses are not ordered, or a flag is misused."""


def check_waits(p: Program, device: Device) -> Program:
    """Returns `p`, or raises RaceError if its waits do not order it. Programs for devices with one agent are not checked."""
    if isinstance(device, Cores):
        for k in p.kernels:
            _Check(p, k, device).run()
    return p


def channels(k: Kernel) -> list[int]:
    """The numbers of a kernel's channels that have a wait. `without` takes such a number."""
    return sorted({o.attr("channel") for o in walk(k.body) if o.kind == "wait"})


def without(k: Kernel, channel: int) -> Kernel:
    """The kernel without the waits and signals of one channel, including the signals before its loop.

    Tests use it to show that the checker finds a missing wait.
    """
    def others(o: Op) -> list[Op]:
        return [] if o.kind in ("signal", "wait") and o.attr("channel") == channel else [o]

    return replace(k, body=map_ops(k.body, others))


def without_barrier(k: Kernel, n: int) -> Kernel:
    """The kernel without its n-th barrier, counted from 0. For tests."""
    numbers = count()
    return replace(k, body=map_ops(k.body, lambda o: [o] if o.kind != "barrier" or next(numbers) != n else []))


@dataclass
class _Use:
    """The latest op of a pipe that read a range, or that wrote it."""

    range: Range
    pipe: int
    number: int
    op: Op


@dataclass(frozen=True)
class _Flag:
    """A flag of the device: an event between two pipes of an agent, or a counter of an agent. setter: the pipe that sets it.
    waiter: the pipe that waits for it. limit: the most sets for which the wait has not happened."""

    name: tuple[str, ...]
    setter: int = field(compare=False)
    waiter: int
    limit: int


class _Check:
    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        self.p, self.k, self.device = p, k, device
        self.memory = Memory(p, k, device)
        pipes = [(a, x) for a in device.agents for x in dict.fromkeys([device.issuer, *device.pipes[a].values()])]
        self.clocks = Clocks(pipes, {x: (x[0], device.issuer) for x in pipes}, [x for x in pipes if x[1] in device.unordered])
        self.uses: dict[str, dict[tuple[int, int, int, bool], _Use]] = {}  # by space; then pipe, low, high, write
        self.raised: dict[_Flag, list[list[int]]] = {}  # sets without their wait so far: the clock that each carries
        self.sets: dict[_Flag, int] = {}
        self.waits: dict[_Flag, list[int]] = {}  # the numbers of the waits on the pipe that waits
        self.flags: dict[tuple[Op, object], _Flag] = {}  # flags so far, by the op and the id that it uses

    def error(self, text: str) -> RaceError:
        return RaceError(f"{self.p.name}, kernel {self.k.name}: {text}")

    def run(self) -> None:
        """Check the unrolled kernel. RaceError for an access that is not ordered, and for a flag that is still set at the end."""
        for o, loop, at in unrolled(self.k, TRIPS):
            if o.kind == "signal":
                self.signal(o, self.flag(o, at))
            elif o.kind == "wait":
                self.wait(o, self.flag(o, at))
            elif o.kind == "barrier":
                self.barrier(o)
            elif is_instruction(o):
                self.instruction(o, loop, at)
        left = [flag.name for flag, sets in self.raised.items() if sets]
        if left:
            raise self.error(f"flags are left set: {left}")

    def flag(self, o: Op, at: Iterations) -> _Flag:
        """The flag that a signal sets, or that a wait waits for, in iteration `at`."""
        n = o.attr("id")
        if isinstance(n, tuple):
            n = n[(at[o.attr("loop")] + o.attr("ahead", 0)) % len(n)]
        if (o, n) not in self.flags:
            self.flags[o, n] = self.flag_of(o, n)
        return self.flags[o, n]

    def flag_of(self, o: Op, n: object) -> _Flag:
        """The flag with the id `n` between the pipes of a signal or a wait."""
        src, dst, number = str(o.attr("src")), str(o.attr("dst")), self.clocks.number
        if "." in src:  # from a pipe of one agent to another agent
            agent, name = src.split(".")
            return _Flag(("flag", str(n), dst), number[agent, name] if o.kind == "signal" else -1,
                         number[dst, self.device.issuer], self.device.flag_limit)
        return _Flag(("event", o.agent, src, dst, str(n)), number[o.agent, src], number[o.agent, dst], 1)

    def signal(self, o: Op, flag: _Flag) -> None:
        c, n = self.clocks, self.sets.get(flag, 0)
        known, waits = c.known(flag.setter), self.waits.get(flag, [])
        due = n - flag.limit  # the number of the set whose wait must be known to be complete
        if due >= 0 and (len(waits) <= due or known[flag.waiter] < waits[due]):
            late = "the wait of the set before it" if flag.limit == 1 else "its counter is sure to have room"
            raise self.error(f"{op_text(o)}: set again before {late}")
        self.sets[flag] = n + 1
        self.raised.setdefault(flag, []).append(c.after(flag.setter))

    def wait(self, o: Op, flag: _Flag) -> None:
        c = self.clocks
        if not self.raised.get(flag):
            raise self.error(f"{op_text(o)}: nothing sets it")
        c.known(flag.waiter)
        c.learn(flag.waiter, self.raised[flag].pop(0))
        self.waits.setdefault(flag, []).append(c.issue(flag.waiter))

    def barrier(self, o: Op) -> None:
        """A barrier orders the ops of one pipe. With scope "ALL", the agent's issuer waits for all pipes of the agent."""
        c, scope = self.clocks, o.attr("scope")
        if scope != "ALL":
            c.settle(c.number[o.agent, scope])
            return
        issuer = c.number[o.agent, self.device.issuer]
        for (agent, _), n in c.number.items():
            if agent == o.agent:
                c.learn(issuer, c.after(n))

    def instruction(self, o: Op, loop: str, at: Iterations) -> None:
        """Check one instruction. RaceError if it conflicts with an earlier op that is not known to be complete."""
        c, n = self.clocks, self.clocks.number[pipe(self.device, o)]
        known, mine = c.known(n), self.memory.used(o, loop, at)
        for a in mine:
            uses = self.uses.setdefault(a.space, {})
            for key in [x for x in uses if x[1] < a.high and a.low < x[2] and (x[3] or a.write)]:
                u = uses[key]
                if known[u.pipe] < u.number:
                    raise self.error(self.race(o, n, a, u))
                if a.write and a.covers(u.range):  # an op that comes after this write comes after the earlier use, too
                    del uses[key]
        number = c.issue(n)
        for a in mine:
            self.uses[a.space].pop((n, a.low, a.high, a.write), None)
            self.uses[a.space][n, a.low, a.high, a.write] = _Use(a, n, number, o)

    def race(self, o: Op, n: int, a: Range, u: _Use) -> str:
        def said(o: Op, n: int, r: Range) -> str:
            return f"{o.out or o.kind} ({'.'.join(self.clocks.names[n])}, {'writes' if r.write else 'reads'} {r.value})"
        return (f"{said(o, n, a)} does not wait for {said(u.op, u.pipe, u.range)}; both use "
                f"{a.space}[{max(a.low, u.range.low)}:{min(a.high, u.range.high)}]")
