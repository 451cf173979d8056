"""check_waits: proves that the waits order all conflicting accesses to memory.

The checker unrolls loops (TRIPS), and models flags as the device does: one queue for each id. It does not depend on
the pass that made the flags. It refuses:
- two ops that access the same bytes, at least one of them a write, without an order between them;
- the same of two cores of an agent, which run the same ops, in global memory (`global_memory`);
- a flag that is set again before the wait for the previous set;
- a wait for a flag that nothing sets;
- a flag that is still set at the end;
- a counter above its limit, or one that another pipe sets while a set is left;
- kernels in one launch without a barrier over the device between them.

Where cores of one agent use the same global memory, each has pipes and flags of its own. A signal of such an agent counts once
all its cores have sent it, and a signal to it reaches each of them. Their memory on the chip is checked for the first core alone,
since the others do the same.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from ..devices import Cores, Device
from ..ir.core import Kernel, Op, Program, map_ops
from ..ir.printer import op_text
from .accesses import Bytes, Iterations, Memory, Range, Tiles, is_instruction, pipe, run_unrolled
from .clocks import Clock, Clocks, joined
from .global_memory import GlobalMemory

TRIPS = {"item": [7], "chunk": [5, 4, 0, 1, 0, 2, 3]}
DEVICE_FLAGS = 3  # of a barrier over the device: core group to cube cores, all cube cores, cube cores to core group


class RaceError(ValueError):
    """Two conflicting accesses are not ordered, or a flag is misused."""


def check_waits(p: Program, device: Device) -> Program:
    """Returns `p`, or raises RaceError if its waits do not order it. Programs for devices with one agent are not checked."""
    if isinstance(device, Cores):
        for k in p.kernels:
            _Check(p, k, device).run()
        check_launch(p, device)
    return p


def check_launch(p: Program, device: Cores) -> None:
    """Raises RaceError if kernels run in one launch, and one may begin before all cores have ended the one before."""
    for k in p.kernels[:-1] if p.launch == "single" else ():
        end = [s for s in k.body[-len(device.agents):] if isinstance(s, Op) and s.kind == "barrier"]
        ids = {s.attr("ids") for s in end if s.attr("scope") == "device"}
        own = len(ids) == 1 and len(set(*ids)) == DEVICE_FLAGS and min(*ids) >= device.flags  # no kernel counts on them
        if {s.agent for s in end} != set(device.agents) or not own:
            raise RaceError(f"{p.name}, kernel {k.name}: it has no barrier over the device at its end, and kernels follow it in "
                            "the same launch")


def channels(k: Kernel) -> list[int]:
    """The numbers of a kernel's channels that have a wait. `without` takes such a number."""
    return sorted({o.attr("channel") for o in k.ops if o.kind == "wait"})


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


class _Region:
    """Bytes that ops use. reads, writes: their uses that a later op may conflict with: pipe -> the number of its latest such
    op."""

    def __init__(self) -> None:
        self.reads: dict[int, int] = {}
        self.writes: dict[int, int] = {}


#: The regions that overlap some bytes, first that of the bytes themselves, and whether these bytes cover each.
_Near = list[tuple[_Region, bool]]


class _Used(NamedTuple):
    """A range that an op uses, and the regions that it overlaps."""

    range: Range
    near: _Near
    write: bool


@dataclass
class _Flag:
    """A flag of the device: an event between two pipes of an agent, or a counter of an agent. waiter: the pipe that waits for
    it. limit: the most sets for which the wait has not happened.

    sets: how many there were. raised: the clock that each set without its wait so far carries. waits: the numbers of the waits
    on the pipe that waits. setters: the pipes of the last set.
    """

    name: tuple[str, ...]
    waiter: int
    limit: int
    sets: int = 0
    raised: list[Clock] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    setters: list[int] = field(default_factory=list)


class _Check:
    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        """Nothing has run. Agents have several cores only where these share global memory."""
        self.p, self.k, self.device = p, k, device
        self.memory = Memory(p, k, device)
        self.outside = GlobalMemory(p, k, device, self.memory)
        self.cores = {a: [f"{a} {n}" for n in range(device.copies[a])] if a in self.outside.exposed else [a]
                      for a in device.agents}
        pipes = [(c, x) for a in device.agents for c in self.cores[a]
                 for x in dict.fromkeys([device.issuer, *device.pipes[a].values()])]
        self.clocks = Clocks(pipes, {x: (x[0], device.issuer) for x in pipes}, [x for x in pipes if x[1] in device.unordered])
        self.near: dict[str, dict[Bytes, _Near]] = {}  # memory space -> the ranges of it that ops use
        self.ran: dict[tuple[int, int], tuple[Op, list[_Used]]] = {}  # pipe and number of an instruction -> what it was
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
        tiles = [(x, [self.use(r) for r in x.ranges]) for x in self.memory.used(o, loop)]
        n = self.clocks.number[self.cores[o.agent][0], pipe(self.device, o)[1]]
        if len(self.cores[o.agent]) > 1 or o.attr("tensor") in self.outside.used:
            return self.on_each_core(o, tiles, loop)
        if all(len(ranges) == 1 for _, ranges in tiles):
            same = [ranges[0] for _, ranges in tiles]  # in each iteration
            return lambda at: self.instruction(o, n, same)
        return lambda at: self.instruction(o, n, [ranges[x.slot(at)] for x, ranges in tiles])

    def on_each_core(self, o: Op, tiles: list[tuple[Tiles, list[_Used]]], loop: str) -> Callable[[Iterations], None]:
        """The function that executes an instruction on the cores of its agent. tiles: what the first one uses on the chip."""
        name = pipe(self.device, o)[1]
        each = [(self.clocks.number[c, name], self.outside.range(o, n, loop)) for n, c in enumerate(self.cores[o.agent])]

        def act(at: Iterations) -> None:
            on_chip = [ranges[x.slot(at)] for x, ranges in tiles]
            for n, outside in each:
                self.instruction(o, n, on_chip + ([self.use(outside(at))] if outside else []))
                on_chip = []
        return act

    def use(self, r: Range) -> _Used:
        """A range with the regions that it overlaps."""
        return _Used(r, self.regions(r.bytes), r.write)

    def regions(self, bytes: Bytes) -> _Near:
        """The regions that these bytes overlap."""
        near = self.near.setdefault(bytes.space, {})
        if bytes not in near:
            own = _Region()
            found = [(own, True)]
            for other, others in near.items():
                if other.overlaps(bytes):
                    found.append((others[0][0], bytes.covers(other)))
                    others.append((own, other.covers(bytes)))
            near[bytes] = found
        return near[bytes]

    def flagged(self, o: Op) -> Callable[[Iterations], None]:
        """The function that executes a signal or a wait. One with several ids uses them in rotation."""
        attrs = dict(o.attrs)
        ids, index, ahead, src = attrs.get("id"), str(attrs.get("loop")), attrs.get("ahead", 0), str(attrs.get("src"))
        each = ids if isinstance(ids, tuple) else (ids,)
        agent, _, name = src.rpartition(".")
        if agent:  # from a pipe of one agent to another agent: all cores of the one signal, each of the other waits
            setters = [self.clocks.number[c, name] for c in self.cores[agent]]
            pairs = [([self.flag("", src, to, n) for n in each], setters) for to in self.cores[str(attrs.get("dst"))]]
        else:
            pairs = [([self.flag(c, src, str(attrs.get("dst")), n) for n in each], [self.clocks.number[c, src]])
                     for c in self.cores[o.agent]]

        def act(at: Iterations) -> None:
            for flags, setters in pairs:
                flag = flags[(at[index] + ahead) % len(flags)] if len(flags) > 1 else flags[0]
                if o.kind == "signal":
                    self.signal(o, flag, setters)
                else:
                    self.wait(o, flag)
        return act

    def flag(self, core: str, src: str, dst: str, n: object) -> _Flag:
        """The flag with the id `n` between two pipes of a core. Without `core`: from an agent to the core `dst`."""
        number = self.clocks.number
        if not core:
            name: tuple[str, ...] = ("flag", str(n), dst)
            waiter, limit = number[dst, self.device.issuer], self.device.flag_limit
        else:
            name, waiter, limit = ("event", core, src, dst, str(n)), number[core, dst], 1
        if name not in self.flags:
            self.flags[name] = _Flag(name, waiter, limit)
        return self.flags[name]

    def signal(self, o: Op, flag: _Flag, setters: list[int]) -> None:
        """Set a flag, by pipes that all must. RaceError if it may have as many sets as it can hold, or if a set by other pipes
        may still be there, as nothing says which of the two comes first."""
        limit = flag.limit if flag.setters in ([], setters) else 1
        waits, due = flag.waits, flag.sets - limit  # due: the number of the set whose wait must be known to be complete
        if due >= 0 and any(len(waits) <= due or self.clocks.known(n)[flag.waiter] < waits[due] for n in setters):
            late = "the wait of the set before it" if limit == 1 else "its counter is sure to have room"
            raise self.error(f"{op_text(o)}: set again before {late}")
        flag.sets += 1
        flag.setters = setters
        flag.raised.append(self.after(setters))

    def after(self, pipes: list[int]) -> Clock:
        """The clock once all that these pipes have issued is complete."""
        clock = self.clocks.after(pipes[0])
        for n in pipes[1:]:
            clock = joined(clock, self.clocks.after(n))
        return clock

    def wait(self, o: Op, flag: _Flag) -> None:
        """Wait for a flag, which learns what the set says. RaceError if nothing sets it."""
        if not flag.raised:
            raise self.error(f"{op_text(o)}: nothing sets it")
        flag.waits.append(self.clocks.wait(flag.waiter, flag.raised.pop(0)))

    def barrier(self, o: Op) -> None:
        """A barrier orders the ops of one pipe. With scope "ALL", a core's issuer waits for all its pipes; with "cores", the
        issuers of all cores of the agent wait for the pipe `src` of each. One over the device ends a kernel (`check_launch`)."""
        c, scope, cores = self.clocks, o.attr("scope"), self.cores[o.agent]
        if scope == "cores":
            clock = self.after([c.number[core, str(o.attr("src"))] for core in cores])
            for core in cores:
                c.learn(c.number[core, self.device.issuer], clock)
        elif scope == "ALL":
            for core in cores:
                issuer = c.number[core, self.device.issuer]
                for (owner, _), n in c.number.items():
                    if owner == core:
                        c.learn(issuer, c.after(n))
        elif scope != "device":
            for core in cores:
                c.settle(c.number[core, scope])

    def instruction(self, o: Op, n: int, mine: list[_Used]) -> None:
        """Check one instruction on pipe n, which uses these ranges. RaceError if it conflicts with an earlier op that is not
        known to be complete."""
        known = self.clocks.known(n)
        for _, near, write in mine:
            for other, covered in near:
                for at, number in other.writes.items():
                    if known[at] < number:
                        raise self.race(o, n, mine, (at, number))
                if write:
                    for at, number in other.reads.items():
                        if known[at] < number:
                            raise self.race(o, n, mine, (at, number))
                    if covered:  # an op that comes after this write comes after the earlier uses, too
                        other.writes.clear()
                        other.reads.clear()
        number = self.clocks.issue(n)
        self.ran[n, number] = o, mine
        for _, near, write in mine:
            (near[0][0].writes if write else near[0][0].reads)[n] = number

    def race(self, o: Op, n: int, mine: list[_Used], earlier: tuple[int, int]) -> RaceError:
        """The error for an op that does not wait for an earlier one. earlier: pipe and number of that."""
        other, its = self.ran[earlier]
        a, b = next((x.range, y.range) for x in mine for y in its
                    if x.range.bytes.overlaps(y.range.bytes) and (x.write or y.write))

        def said(o: Op, n: int, r: Range) -> str:
            return f"{o.out or o.kind} ({'.'.join(self.clocks.names[n])}, {'writes' if r.write else 'reads'} {r.value})"
        return self.error(f"{said(o, n, a)} does not wait for {said(other, earlier[0], b)}; both use {a.bytes.common(b.bytes)}")
