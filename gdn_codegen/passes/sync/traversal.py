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
from .waits import Executed, Pair, Place, Signal, Wait, Waits, pair


class Traversal:
    """One traversal of the trace. adds: whether it adds what is missing. If not, it ends there.

    needed: the barriers of unordered pipes that are the only order between two ops.
    """

    def __init__(self, trace: Trace, waits: Waits, adds: bool = True) -> None:
        self.trace, self.waits, self.adds = trace, waits, adds
        self.clocks, self.time, self.whole = Clocks(trace.pipes), 0, True
        self.done: list[list[int]] = []  # for each step so far, what is complete after its op
        self.barriers: dict[int, list[tuple[int, Path]]] = {}  # unordered pipe -> number of ops before a barrier, its place
        self.needed: set[Path] = set()
        self.of: dict[Pair, Executed] = defaultdict(Executed)

    def run(self, end: int | None = None) -> bool:
        """Traverse the steps up to number `end`. True if all their accesses are ordered without an addition."""
        each = {"op": self.op, "begin": self.begin, "end": self.end}
        for s in self.trace.steps[:end]:
            self.done.append(each[s.kind](s))
            if not (self.whole or self.adds):
                break
        return self.whole

    def op(self, s: Step) -> list[int]:
        """Execute an op. Returns what is complete after it."""
        for x in self.waits.before.get(s.path, ()):
            self.wait(x, s.current)
        if s.path in self.waits.pipe_barriers:
            for i in self.trace.pipes.unordered:
                self.clocks.barrier(i)
                self.barriers.setdefault(i, []).append((self.clocks.issued[i], s.path))
        self.order(s)
        done = self.clocks.run(s.pipe)
        self.after(s)
        return done

    def begin(self, s: Step) -> list[int]:
        """Apply the waits, the barriers over agents and the signals before a loop."""
        for x in self.waits.before.get(s.path, ()):
            self.wait(x, s.current)
        place = "before", s.path
        self.drain(place)
        for x in self.waits.initial_signals_of_loop.get(s.path, ()):
            for n in range(x.distance):
                self.signal(x, place, n)
        return []

    def end(self, s: Step) -> list[int]:
        """Apply the waits, the barriers over agents and the signals after a loop."""
        for x in self.waits.initial_signals_of_loop.get(s.path, ()):
            for n in range(x.distance):
                self.wait(x, s.times + n)
        self.after(s)
        return []

    def after(self, s: Step) -> None:
        """Apply the barriers over agents and the signals after a statement."""
        if self.waits.drains:
            self.drain(("after", s.path))
        for x in self.waits.after.get(s.path, ()):
            self.signal(x, ("after", s.path), s.current + x.distance)

    def drain(self, place: Place) -> None:
        """Apply the barriers over agents at a place."""
        for agent in self.waits.drains.get(place, ()):
            self.clocks.drain(agent)

    def signal(self, x: Pair, place: Place, number: int) -> None:
        """Record a signal of a pair, and what it says about completed ops."""
        self.time += 1
        done, of = self.clocks.snapshot(x.src), self.of[x]
        of.signals.append(Signal(self.time, number, done[x.dst], place))
        of.coming.append(done)

    def wait(self, x: Pair, number: int) -> None:
        """Record a wait of a pair. The waiting pipe learns what the signal says."""
        self.time += 1
        of = self.of[x]
        done = self.clocks.wait(x.dst, of.coming.popleft() if of.coming else None)
        of.waits.append(Wait(self.time, number, done))

    def order(self, s: Step) -> None:
        """Order all earlier ops that conflict with the op of `s` before it."""
        if s.pipe in self.barriers:
            self.note(s)
        known = self.clocks.start(s.pipe)
        for use in s.conflicts:
            if known[use.pipe] < self.done[use.step][use.pipe]:
                self.whole = False
                if not self.adds:
                    return
                self.add(use, s)
                known = self.clocks.start(s.pipe)

    def note(self, s: Step) -> None:
        """Add the last barrier of the pipe of `s` to `needed` if it alone comes between the op and one that it conflicts with."""
        barriers = self.barriers[s.pipe]
        if barriers[-1][1] not in self.needed:
            before, (last, path) = barriers[-2][0] if barriers[1:] else -1, barriers[-1]
            if any(before < self.done[n][s.pipe] <= last for n in s.own):
                self.needed.add(path)

    def add(self, use: Use, s: Step) -> None:
        """Order the op of `use` before `s`. Within an unordered pipe, that is a barrier. Otherwise, it is a pair."""
        if use.pipe == s.pipe:
            self.waits.pipe_barriers.add(s.path)
            self.clocks.barrier(s.pipe)
            return
        x = pair(self.trace, use, s)
        self.waits.add(x)
        # In this traversal the pair had no signal in earlier iterations, so apply now what it would say. The next one has all.
        self.clocks.learn(x.dst, self.done[self.last_within(x.signal, x.src)])

    def last_within(self, path: Path, pipe: int) -> int:
        """The number of the last step so far that ran an op of a pipe in the statement at `path`."""
        steps = self.trace.steps
        return next(n for n in reversed(range(len(self.done)))
                    if steps[n].pipe == pipe and steps[n].path[:len(path)] == path)
