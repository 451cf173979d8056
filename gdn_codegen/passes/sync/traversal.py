"""traversal: finds what orders the accesses of a kernel.

A traversal of the trace keeps vector clocks of the pipes. If an op conflicts with an earlier op that is not known to be complete,
the traversal adds a pair of a signal and a wait, or a barrier.
"""
from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .accesses import Path
from .clocks import Clocks
from .hazards import Use
from .trace import Step, Trace
from .waits import Pair, Place, Waits


class Set(NamedTuple):
    """A signal in a traversal. number: counted from the loop's first signal, including those that prime the loop. known: the
    clock that the signal carries."""

    time: int
    number: int
    known: list[int]
    place: Place


class Wait(NamedTuple):
    """A wait in a traversal. number: of the signal that it takes. done: its own number on the waiting pipe."""

    time: int
    number: int
    done: int


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
        self.sets: dict[Pair, list[Set]] = {}
        self.taken: dict[Pair, list[Wait]] = {}
        self.queue: dict[Pair, deque[list[int]]] = {}  # what the signals say that no wait has taken yet

    def run(self) -> bool:
        """Traverse. True if all accesses are ordered without an addition."""
        for s in self.trace.steps:
            if s.kind != "end":
                self.before(s)
            if s.kind == "begin":
                self.begin(s.path)
            elif s.kind == "end":
                for x in self.waits.initial_signals_of_loop.get(s.path, ()):
                    for n in range(x.distance):
                        self.wait(x, s.times + n)
            else:
                self.order(s)
                if not (self.whole or self.adds):
                    return False
            self.done.append(self.clocks.run(s.pipe) if s.kind == "op" else [])
            if s.kind != "begin":
                self.after(s)
        return self.whole

    def begin(self, loop: Path) -> None:
        """Apply the barriers over agents and the signals before a loop."""
        place = "before", loop
        self.drain(place)
        for x in self.waits.initial_signals_of_loop.get(loop, ()):
            for n in range(x.distance):
                self.signal(x, place, n)

    def before(self, s: Step) -> None:
        """Apply the waits and the barriers of unordered pipes before a statement."""
        for x in self.waits.before.get(s.path, ()):
            self.wait(x, s.current)
        if s.path in self.waits.pipe_barriers:
            for i in self.trace.pipes.unordered:
                self.clocks.barrier(i)
                self.barriers.setdefault(i, []).append((self.clocks.issued[i], s.path))

    def after(self, s: Step) -> None:
        """Apply the barriers over agents and the signals after a statement."""
        place = "after", s.path
        self.drain(place)
        for x in self.waits.after.get(s.path, ()):
            self.signal(x, place, s.current + x.distance)

    def drain(self, place: Place) -> None:
        """Apply the barriers over agents at a place."""
        for agent in self.waits.drains.get(place, ()):
            self.clocks.drain(agent)

    def signal(self, x: Pair, place: Place, number: int) -> None:
        """Record a signal of a pair, and what it says about completed ops."""
        self.time += 1
        done = self.clocks.snapshot(x.src)
        self.sets.setdefault(x, []).append(Set(self.time, number, done, place))
        self.queue.setdefault(x, deque()).append(done)

    def wait(self, x: Pair, number: int) -> None:
        """Record a wait of a pair. The waiting pipe learns what the signal says."""
        self.time += 1
        if self.queue.get(x):
            self.clocks.learn(x.dst, self.queue[x].popleft())
        self.taken.setdefault(x, []).append(Wait(self.time, number, self.clocks.run(x.dst)[x.dst]))

    def order(self, s: Step) -> None:
        """Order all earlier ops that conflict with the op of `s` before it."""
        self.note(s)
        for use in s.conflicts:
            if self.clocks.start(s.pipe)[use.pipe] < self.done[use.step][use.pipe]:
                self.whole = False
                if not self.adds:
                    return
                self.add(use, s)

    def note(self, s: Step) -> None:
        """Add the last barrier of the pipe of `s` to `needed` if it alone comes between the op and one that it conflicts with."""
        barriers = self.barriers.get(s.pipe, [])
        if barriers and barriers[-1][1] not in self.needed:
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


def pair(trace: Trace, use: Use, s: Step) -> Pair:
    """The pair that orders the op of `use` before `s`, in the innermost body that contains both."""
    r = trace.steps[use.step]
    iteration: Path | None = None
    depth = distance = 0  # depth: of that body
    x, y = r.path, s.path
    while x[depth] == y[depth] and depth < len(x) - 1 and depth < len(y) - 1:
        distance = s.iteration[depth] - r.iteration[depth]
        depth += 1
        if distance:
            iteration = x[:depth]  # the two ops are in different iterations of this loop
            break
    signal, pipes, o = x[:depth + 1], trace.pipes, s.op
    crosses = pipes.names[r.pipe][0] != pipes.names[s.pipe][0]
    loop = trace.loop(signal)
    slots = use.access.slots if loop == use.access.loop else 1
    why = f"{use.access.value} -> {o.out or o.kind}" if o else ""
    return Pair(r.pipe, pipes.issuer[s.pipe] if crosses else s.pipe, signal, y[:depth + 1], iteration, loop, why, crosses,
                slots, min(distance, slots))
