"""traversal: finds what orders the accesses of a kernel.

A traversal of the trace keeps vector clocks of the pipes. If an op conflicts with an earlier op that is not known to be complete,
the traversal adds a pair of a signal and a wait, or a barrier.
"""
from __future__ import annotations

from collections import defaultdict

from .accesses import Path
from .clocks import Clocks
from .hazards import Use
from .trace import Step, Trace
from .waits import Ends, Executed, Pair, Place, Waits, executed, pair


class Traversal:
    """One traversal of the trace. adds: whether it adds what is missing. If not, it ends there.

    needed: the barriers of unordered pipes that are the only order between two ops. missing: if it ended, the place of the
    barrier, or the ends of the pair, that it would have added.
    """

    def __init__(self, trace: Trace, waits: Waits, adds: bool = True) -> None:
        """Nothing has been executed yet. before, after: the pairs of `waits` by the number of a place."""
        self.trace, self.waits, self.adds = trace, waits, adds
        self.clocks, self.time, self.whole = Clocks(trace.pipes), 0, True
        self.known: list[int] = []  # for each step so far, what its pipe knows after its op
        self.numbers: list[int] = []  # for each step so far, the clock with one entry, the number of its op on its pipe
        self.barriers: dict[int, list[tuple[int, Path]]] = {}  # unordered pipe -> number of ops before a barrier, its place
        self.needed: set[Path] = set()
        self.missing: Path | Ends = ()
        self.before, self.after = ([pairs.get(path, ()) for path in trace.number] for pairs in (waits.before, waits.after))
        self.of: dict[Pair, Executed] = defaultdict(executed)

    def run(self, end: int | None = None) -> bool:
        """Traverse the steps up to number `end`. True if all their accesses are ordered without an addition."""
        clocks, pipes, before, after, knew, numbers = (
            self.clocks, self.trace.pipes, self.before, self.after, self.known, self.numbers)
        known, heard, issued = clocks.known, clocks.heard, clocks.issued
        one, free, issuer, unordered = pipes.one, pipes.free, pipes.issuer, pipes.unordered
        for s in self.trace.steps[:end]:  # most of the time of lowering goes by here: nothing is called that need not be
            kind, path, at, current, pipe, earlier = s[:6]
            if kind != "op":
                self.begin(s) if kind == "begin" else self.end(s)
                knew.append(0)
                numbers.append(0)
                continue
            for x in before[at]:
                self.wait(x, current)
            if pipe in unordered:
                if path in self.waits.pipe_barriers:
                    self.barrier(path)
                if pipe in self.barriers:
                    self.note(s)
            if known[issuer[pipe]] != heard[pipe]:
                clocks.start(pipe)
            if earlier and (known[pipe] | free) - sum([numbers[n] for n in earlier]) & free != free:
                self.order(s)
                if not self.adds:
                    break
                clocks.start(pipe)
            issued[pipe] += 1
            if pipe not in unordered:
                known[pipe] += one[pipe]
            knew.append(known[pipe])
            numbers.append(issued[pipe] * one[pipe])
            if self.waits.drains:
                self.drain(("after", path))
            for x in after[at]:
                self.signal(x, ("after", path), current + x.distance)
        return self.whole

    def begin(self, s: Step) -> None:
        """Apply the waits, the barriers over agents and the signals before a loop."""
        for x in self.before[s.at]:
            self.wait(x, s.current)
        self.drain(("before", s.path))
        for x in self.waits.initial_signals_of_loop.get(s.path, ()):
            for n in range(x.distance):
                self.signal(x, ("before", s.path), n)

    def end(self, s: Step) -> None:
        """Apply the waits after a loop that its initial signals need, and the barriers over agents and signals after it."""
        for x in self.waits.initial_signals_of_loop.get(s.path, ()):
            for n in range(x.distance):
                self.wait(x, s.times + n)
        self.drain(("after", s.path))
        for x in self.after[s.at]:
            self.signal(x, ("after", s.path), s.current + x.distance)

    def drain(self, place: Place) -> None:
        """Apply the barriers over agents at a place."""
        for agent in self.waits.drains.get(place, ()):
            self.clocks.drain(agent)

    def barrier(self, path: Path) -> None:
        """Apply the barrier of unordered pipes before the op at `path`."""
        for i in self.trace.pipes.unordered:
            self.clocks.barrier(i)
            self.barriers.setdefault(i, []).append((self.clocks.issued[i], path))

    def signal(self, x: Pair, place: Place, number: int) -> None:
        """Record a signal of a pair, and what it says about completed ops."""
        self.time += 1
        done, (events, coming) = self.clocks.snapshot(x.src), self.of[x]
        events.append((self.time, number, done, place))
        coming.append(done)

    def wait(self, x: Pair, number: int) -> None:
        """Record a wait of a pair. The waiting pipe learns what the signal says."""
        self.time += 1
        events, coming = self.of[x]
        events.append((self.time, number, self.clocks.wait(x.dst, coming.popleft() if coming else 0), None))

    def order(self, s: Step) -> None:
        """Add what orders earlier ops that conflict with the op of `s` before it, or note what is missing first."""
        self.whole = False
        for use in s.conflicts:
            if not self.trace.pipes.covers(self.clocks.start(s.pipe), self.numbers[use.step]):
                if not self.adds:
                    self.missing = s.path if use.pipe == s.pipe else pair(self.trace, use, s).ends
                    break
                self.add(use, s)

    def note(self, s: Step) -> None:
        """Add the last barrier of the pipe of `s` to `needed` if it alone comes between the op and one that it conflicts with."""
        barriers = self.barriers[s.pipe]
        before, (last, path) = barriers[-2][0] if barriers[1:] else -1, barriers[-1]
        if path not in self.needed and any(before < self.trace.pipes.entry(self.numbers[n], s.pipe) <= last for n in s.own):
            self.needed.add(path)

    def add(self, use: Use, s: Step) -> None:
        """Order the op of `use` before `s`. Within an unordered pipe, that is a barrier. Otherwise, it is a pair."""
        if use.pipe == s.pipe:
            self.waits.pipe_barriers.add(s.path)
            self.clocks.barrier(s.pipe)
            return
        x = pair(self.trace, use, s)
        self.waits.add(x)
        self.before[self.trace.number[x.wait]] = self.waits.before[x.wait]
        self.after[self.trace.number[x.signal]] = self.waits.after[x.signal]
        # In this traversal the pair had no signal in earlier iterations, so apply now what it would say. The next one has all.
        self.clocks.learn(x.dst, self.after_last(x.signal, x.src))

    def after_last(self, path: Path, pipe: int) -> int:
        """What is complete after the last op so far of a pipe in the statement at `path`."""
        steps = self.trace.steps
        n = next(n for n in reversed(range(len(self.known))) if steps[n].pipe == pipe and steps[n].path[:len(path)] == path)
        return self.trace.pipes.join(self.known[n], self.numbers[n])
