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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from ..devices import Cores, Device
from ..ir.core import Kernel, Op, Program, map_ops, walk
from ..ir.printer import op_text
from .accesses import Bytes, Iterations, Memory, Range, is_instruction, pipe, run_unrolled
from .clocks import Clock, Clocks

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


class _Use(NamedTuple):
    """The latest op of a pipe that read a range, or that wrote it."""

    range: Range
    pipe: int
    number: int
    op: Op


class _Region:
    """Bytes that ops use. reads, writes: their uses that a later op may conflict with, by pipe. near: the regions that overlap
    these bytes, with this one, and whether these bytes cover each."""

    def __init__(self, bytes: Bytes, others: Iterable[_Region]) -> None:
        self.bytes = bytes
        self.reads: dict[int, _Use] = {}
        self.writes: dict[int, _Use] = {}
        self.near = [(self, True)]
        for x in others:
            if x.bytes.overlaps(bytes):
                self.near.append((x, bytes.covers(x.bytes)))
                x.near.append((self, x.bytes.covers(bytes)))


@dataclass
class _Flag:
    """A flag of the device: an event between two pipes of an agent, or a counter of an agent. waiter: the pipe that waits for
    it. limit: the most sets for which the wait has not happened.

    sets: how many there were. raised: the clock that each set without its wait so far carries. waits: the numbers of the waits
    on the pipe that waits.
    """

    name: tuple[str, ...]
    waiter: int
    limit: int
    sets: int = 0
    raised: list[Clock] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)


class _Check:
    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        self.p, self.k, self.device = p, k, device
        self.memory = Memory(p, k, device)
        pipes = [(a, x) for a in device.agents for x in dict.fromkeys([device.issuer, *device.pipes[a].values()])]
        self.clocks = Clocks(pipes, {x: (x[0], device.issuer) for x in pipes}, [x for x in pipes if x[1] in device.unordered])
        self.regions: dict[Bytes, _Region] = {}
        self.flags: dict[tuple[str, ...], _Flag] = {}

    def error(self, text: str) -> RaceError:
        return RaceError(f"{self.p.name}, kernel {self.k.name}: {text}")

    def run(self) -> None:
        """Check the unrolled kernel. RaceError for an access that is not ordered, and for a flag that is still set at the end."""
        run_unrolled(self.k, TRIPS, self.act)
        left = [flag.name for flag in self.flags.values() if flag.raised]
        if left:
            raise self.error(f"flags are left set: {left}")

    def act(self, o: Op, loop: str) -> Callable[[Iterations], None]:
        """The function that executes `o`, of the innermost loop `loop`, in an iteration."""
        if o.kind == "barrier":
            return lambda at: self.barrier(o)
        if o.kind in ("signal", "wait"):
            return self.flagged(o)
        if not is_instruction(o):
            return lambda at: None
        n = self.clocks.number[pipe(self.device, o)]
        tiles = [(x, [(r, self.region(r.bytes)) for r in x.ranges]) for x in self.memory.used(o, loop)]
        if all(len(ranges) == 1 for _, ranges in tiles):
            same = [ranges[0] for _, ranges in tiles]  # in each iteration
            return lambda at: self.instruction(o, n, same)
        return lambda at: self.instruction(o, n, [ranges[x.slot(at)] for x, ranges in tiles])

    def region(self, bytes: Bytes) -> _Region:
        """The region of these bytes."""
        if bytes not in self.regions:
            self.regions[bytes] = _Region(bytes, self.regions.values())
        return self.regions[bytes]

    def flagged(self, o: Op) -> Callable[[Iterations], None]:
        """The function that executes a signal or a wait. One with several ids uses them in rotation."""
        ids, index, ahead = o.attr("id"), o.attr("loop"), o.attr("ahead", 0)
        flags = [self.flag(o, n) for n in (ids if isinstance(ids, tuple) else [ids])]
        agent, _, name = str(o.attr("src")).rpartition(".")
        rotates, signals = isinstance(ids, tuple), o.kind == "signal"
        setter = self.clocks.number[agent or o.agent, name] if signals else -1

        def act(at: Iterations) -> None:
            flag = flags[(at[index] + ahead) % len(flags)] if rotates else flags[0]
            if signals:
                self.signal(o, flag, setter)
            else:
                self.wait(o, flag)
        return act

    def flag(self, o: Op, n: object) -> _Flag:
        """The flag with the id `n` between the pipes of a signal or a wait."""
        src, dst, number = str(o.attr("src")), str(o.attr("dst")), self.clocks.number
        if "." in src:  # from a pipe of one agent to another agent
            flag = _Flag(("flag", str(n), dst), number[dst, self.device.issuer], self.device.flag_limit)
        else:
            flag = _Flag(("event", o.agent, src, dst, str(n)), number[o.agent, dst], 1)
        return self.flags.setdefault(flag.name, flag)

    def signal(self, o: Op, flag: _Flag, setter: int) -> None:
        """Set a flag. RaceError if it may have as many sets as it can hold."""
        known, waits = self.clocks.known(setter), flag.waits
        due = flag.sets - flag.limit  # the number of the set whose wait must be known to be complete
        if due >= 0 and (len(waits) <= due or known[flag.waiter] < waits[due]):
            late = "the wait of the set before it" if flag.limit == 1 else "its counter is sure to have room"
            raise self.error(f"{op_text(o)}: set again before {late}")
        flag.sets += 1
        flag.raised.append(self.clocks.after(setter))

    def wait(self, o: Op, flag: _Flag) -> None:
        """Wait for a flag, which learns what the set says. RaceError if nothing sets it."""
        c = self.clocks
        if not flag.raised:
            raise self.error(f"{op_text(o)}: nothing sets it")
        c.known(flag.waiter)
        c.learn(flag.waiter, flag.raised.pop(0))
        flag.waits.append(c.issue(flag.waiter))

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

    def instruction(self, o: Op, n: int, mine: list[tuple[Range, _Region]]) -> None:
        """Check one instruction on pipe n, which uses these ranges. RaceError if it conflicts with an earlier op that is not
        known to be complete."""
        known = self.clocks.known(n)
        for a, region in mine:
            for other, covered in region.near:
                for uses in (other.writes, other.reads) if a.write else (other.writes,):
                    if not uses:
                        continue
                    for u in uses.values():
                        if known[u.pipe] < u.number:
                            raise self.error(self.race(o, n, a, u))
                    if a.write and covered:  # an op that comes after this write comes after the earlier uses, too
                        uses.clear()
        number = self.clocks.issue(n)
        for a, region in mine:
            (region.writes if a.write else region.reads)[n] = _Use(a, n, number, o)

    def race(self, o: Op, n: int, a: Range, u: _Use) -> str:
        x, y = a.bytes, u.range.bytes

        def said(o: Op, n: int, r: Range) -> str:
            return f"{o.out or o.kind} ({'.'.join(self.clocks.names[n])}, {'writes' if r.write else 'reads'} {r.value})"
        return (f"{said(o, n, a)} does not wait for {said(u.op, u.pipe, u.range)}; both use "
                f"{x.space}[{max(x.low, y.low)}:{min(x.high, y.high)}]")
