"""check_waits: proves that the waits order everything.

Loops are unrolled five times and more. Flags are queues by id, as the device has them, whatever pass wrote them. What is
refused: two ops on the same bytes, one writing, that no flag orders; a set before the wait of the set before it; a wait
without a set; a flag left set; a counter past its limit.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from ..devices import Cores, Device
from ..ir.core import Kernel, Op, Program, map_ops, walk
from ..ir.printer import op_text
from ..passes.stage import takes
from ..passes.sync.accesses import Access, Clocks, Counts, Step, accesses, pipe_of, trace

TRIPS = {"item": [7], "chunk": [5, 4, 0, 1, 0, 2, 3]}


class RaceError(ValueError):
    """Two ops that meet are not ordered, or a flag is misused."""


@takes("synchronised", "checked", gives="checked")
def check_waits(p: Program, device: Device) -> Program:
    """`p` itself."""
    if isinstance(device, Cores):
        for k in p.kernels:
            _Check(p, k, device).run()
    return p


def channels(k: Kernel) -> list[int]:
    """The waits of a kernel: numbers that `without` takes."""
    return sorted({o.attr("channel") for o in walk(k.body) if o.kind == "wait"})


def without(k: Kernel, channel: int) -> Kernel:
    """The kernel less one wait and its signals, primes included: for tests that show that `check` sees it."""
    def others(o: Op) -> list[Op]:
        return [] if o.kind in ("signal", "wait") and o.attr("channel") == channel else [o]

    return replace(k, body=map_ops(k.body, others))


def without_barrier(k: Kernel, n: int) -> Kernel:
    """The kernel less its n-th barrier."""
    numbers = count()
    return replace(k, body=map_ops(k.body, lambda o: [o] if o.kind != "barrier" or next(numbers) != n else []))


@dataclass
class _Last:
    """The latest op of a pipe that touched some bytes in one way."""

    access: Access
    pipe: int
    number: int
    op: Op


class _Check:
    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        self.p, self.k, self.device = p, k, device
        self.access = accesses(p, k, device)

    def error(self, text: str) -> RaceError:
        return RaceError(f"{self.p.name}, kernel {self.k.name}: {text}")

    def run(self) -> None:
        """Walk the unrolled kernel. RaceError for an access that is not ordered, and for a flag that is left set."""
        c = self.clocks = Clocks(self.device)
        self.seen: dict[str, dict[tuple[int, int, int, bool], _Last]] = {}
        self.flags: dict[tuple[str, ...], list[list[int]]] = {}
        self.waited: dict[tuple[str, ...], list[int]] = {}
        self.sets: dict[tuple[str, ...], int] = {}
        for step in trace(self.k, TRIPS):
            o = step.op
            if o is None:
                continue
            if o.kind == "signal":
                self.signal(o, step.counts)
            elif o.kind == "wait":
                self.wait(o, step.counts)
            elif o.kind == "barrier":
                if o.attr("scope") == "ALL":
                    c.drain(o.agent)
                else:
                    c.barrier(c.number[o.agent, o.attr("scope")])
            else:
                pipe = pipe_of(self.device, o)
                if pipe is not None:
                    self.op(o, c.number[pipe], step)
        left = [key for key, queue in self.flags.items() if queue]
        if left:
            raise self.error(f"flags are left set: {left}")

    def key(self, o: Op, counts: Counts) -> tuple[tuple[str, ...], int, bool]:
        """The flag, the pipe that acts on it, and whether it is a counter between agents."""
        src, dst, flag = str(o.attr("src")), str(o.attr("dst")), o.attr("id")
        c = self.clocks
        if isinstance(flag, tuple):
            flag = flag[(counts[o.attr("loop")] + o.attr("ahead", 0)) % len(flag)]
        if "." in src:
            agent, pipe = src.split(".")
            acts = c.number[agent, pipe] if o.kind == "signal" else c.number[dst, self.device.issuer]
            return ("flag", str(flag), dst), acts, True
        acts = c.number[o.agent, src if o.kind == "signal" else dst]
        return ("event", o.agent, src, dst, str(flag)), acts, False

    def signal(self, o: Op, counts: Counts) -> None:
        """A signal: RaceError where it may be set before the wait for the set before it, or more often than the counter
        counts.
        """
        key, pipe, crosses = self.key(o, counts)
        c, queue = self.clocks, self.flags.setdefault(key, [])
        known = c.start(pipe)
        waits = self.waited.setdefault(key, [])
        n = self.sets.get(key, 0)  # sets so far
        behind = n - (self.device.flag_limit if crosses else 1)
        if behind >= 0:  # the wait of that set must surely be over
            if len(waits) <= behind or known[self.waiter(key)] < waits[behind]:
                late = "its counter is sure to have room" if crosses else "the wait of the set before it"
                raise self.error(f"{op_text(o)}: set again before {late}")
        self.sets[key] = n + 1
        queue.append(c.snapshot(pipe))

    def waiter(self, key: tuple[str, ...]) -> int:
        c = self.clocks
        return c.number[key[2], self.device.issuer] if key[0] == "flag" else c.number[key[1], key[3]]

    def wait(self, o: Op, counts: Counts) -> None:
        key, pipe, _ = self.key(o, counts)
        queue = self.flags.get(key)
        if not queue:
            raise self.error(f"{op_text(o)}: nothing sets it")
        c = self.clocks
        c.start(pipe)
        c.learn(pipe, queue.pop(0))
        self.waited.setdefault(key, []).append(c.run(pipe))

    def op(self, o: Op, pipe: int, step: Step) -> None:
        """An op: RaceError names an earlier op on common bytes that it does not wait for."""
        c = self.clocks
        known = c.start(pipe)
        mine = [a.at(step.counts) for a in self.access[step.path]]
        for a in mine:
            seen = self.seen.get(a.space, {})
            for key, r in list(seen.items()):
                if not r.access.meets(a):
                    continue
                if known[r.pipe] < r.number:
                    names = c.names
                    raise self.error(
                        f"{o.out or o.kind} ({'.'.join(names[pipe])}, {'writes' if a.write else 'reads'} {a.value}) does not "
                        f"wait for {r.op.out or r.op.kind} ({'.'.join(names[r.pipe])}, "
                        f"{'writes' if r.access.write else 'reads'} {r.access.value}); both use "
                        f"{a.space}[{max(a.low, r.access.low)}:{min(a.high, r.access.high)}]")
                if a.write and a.low <= r.access.low and r.access.high <= a.high:
                    del seen[key]  # whoever comes after `o` comes after it
        n = c.run(pipe)
        for a in mine:
            self.seen.setdefault(a.space, {})[a.low, a.high, pipe, a.write] = _Last(a, pipe, n, o)
