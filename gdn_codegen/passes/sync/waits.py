"""waits: the pairs of a signal and a wait, and the barriers, that `synchronise` adds to a kernel, by their places. Also the
state of a traversal: the signals and waits of each pair that it has executed."""
from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from .accesses import Path
from .hazards import Use
from .trace import Step, Trace

#: The place of a signal or a barrier: "after" a statement, or "before" a loop.
Place = tuple[str, Path]
#: The pipes that signal and wait, and the places of signal and wait.
Ends = tuple[int, int, Path, Path]


@dataclass(eq=False)
class Pair:
    """A signal and its wait, as places in the program.

    src, dst: the pipes that signal and wait. The signal comes after the statement `signal`, and the wait before the statement
    `wait`. iteration: the loop of which a later iteration waits, or None. loop: the index of the innermost loop around the pair.
    crosses: whether the pipes are of different agents. distance: how many iterations later the wait is. slots: those of the
    storage that the pair is about. ids: the signals use them in turn.
    """

    src: int
    dst: int
    signal: Path
    wait: Path
    iteration: Path | None
    loop: str
    why: str
    crosses: bool
    slots: int
    distance: int
    ids: tuple[int, ...] = ()

    @property
    def ends(self) -> Ends:
        """Its pipes and places, which tell it from other pairs."""
        return self.src, self.dst, self.signal, self.wait


#: A signal or a wait of a pair in a traversal: (time, number, clock or count, place). The number is that of the signal, counted
#: from the loop's first one, including those that prime the loop. Of a signal: the clock of what is complete before it, and its
#: place. Of a wait: its own number on the waiting pipe, and no place. A plain tuple, since traversals make thousands.
Event = tuple[int, int, int, "Place | None"]


#: The signals and waits of a pair in a traversal, and the clocks of the signals that no wait has taken yet.
Executed = tuple[list[Event], deque[int]]


def executed() -> Executed:
    """That of a pair without a signal so far."""
    return [], deque()


class Waits:
    """The pairs and barriers of a kernel.

    pairs: in the order in which they were found. pipe_barriers: ops of unordered pipes with a barrier of their pipe before them.
    drains: barriers over an agent, by place. after, before: the pairs by the place of their signal, and of their wait.
    initial_signals_of_loop: the pairs by the place of the loop that their first signals precede.
    """

    def __init__(self, drains: dict[Place, list[str]], pairs: list[Pair] | None = None,
                 pipe_barriers: set[Path] | None = None) -> None:
        self.drains, self.pairs, self.pipe_barriers = drains, list[Pair](), set(pipe_barriers or ())
        self.after: dict[Path, list[Pair]] = {}
        self.before: dict[Path, list[Pair]] = {}
        self.initial_signals_of_loop: dict[Path, list[Pair]] = {}
        for x in pairs or ():
            self.add(x)

    def add(self, x: Pair) -> None:
        """Add a pair."""
        self.pairs.append(x)
        self.after.setdefault(x.signal, []).append(x)
        self.before.setdefault(x.wait, []).append(x)
        if x.iteration is not None:
            self.initial_signals_of_loop.setdefault(x.iteration, []).append(x)

    def without(self, left_out: Collection[Pair | Path]) -> Waits:
        """A copy without some pairs, and without the barriers before some ops."""
        return Waits(self.drains, [x for x in self.pairs if x not in left_out], self.pipe_barriers.difference(left_out))


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
