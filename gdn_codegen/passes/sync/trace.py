"""trace: a kernel's instructions in program order, with loops unrolled, for `synchronise`. Each step has the earlier ops that its
op conflicts with in that iteration. All traversals share it.
"""
from __future__ import annotations

from typing import NamedTuple

from ...devices import Cores
from ...ir.core import Kernel, Loop, Op, Stmt, loops
from .accesses import Access, Counts, Path, pipe_of
from .clocks import Pipes
from .hazards import Memory, Near, Use

#: For each loop, its numbers of iterations, which are used in turn. They cover all cases: three (the first of two slots is used
#: again), two (the second slot is used last), none, one.
NESTED = {"item": [5], "chunk": [3, 2, 2, 0, 1]}
#: The same for a kernel with at most one loop. With two slots, an op conflicts with ops of the two iterations before.
FLAT = {"item": [3], "chunk": [3]}
Iteration = tuple[int, ...]  # the iteration of each loop around a statement, outermost first


class Step(NamedTuple):
    """An instruction, or the begin or the end of a loop. kind: "op", "begin" or "end".

    at: the number of its place. current: the iteration of the innermost loop around the statement. pipe: the number of the pipe
    that runs the op. conflicts: the latest use of each pipe that must come before the op, latest first. earlier: their steps.
    own: if the op's own pipe is unordered, the steps of all such ops of it. times: at the end of a loop, the number of its
    iterations.
    """

    kind: str
    path: Path
    at: int
    current: int
    pipe: int = -1
    earlier: tuple[int, ...] = ()
    iteration: Iteration = ()
    op: Op | None = None
    conflicts: tuple[Use, ...] = ()
    own: tuple[int, ...] = ()
    times: int = 0


class Trace:
    """The steps of a kernel. first_steps: how many of them the first two iterations of outer loops have, where nearly all
    conflicts occur. loops: the index of each loop, by its place. number: a number for each place."""

    def __init__(self, k: Kernel, device: Cores, accesses: dict[Path, list[Access]]) -> None:
        """Unroll the kernel. accesses: of each op, by its place."""
        used = {pipe for o in k.ops if (pipe := pipe_of(device, o)) is not None}
        self.kernel, self.device, self.pipes = k, device, Pipes(device, used)
        self.loops: dict[Path, str] = {}
        self.number: dict[Path, int] = {}
        self.steps: list[Step] = []
        self.first_steps = 0
        self._accesses, self._memory = accesses, Memory(self.pipes.unordered)
        self._trips = NESTED if len(list(loops(k.body))) > 1 else FLAT
        self._same: dict[Path, list[tuple[Access, Near]]] = {}  # by place, the accesses that are the same in each iteration
        self._pipe: dict[Path, int] = {}
        self._met: dict[str, int] = {}
        self._counts: Counts = {}
        self._body(k.body, (), ())

    def loop(self, path: Path) -> str:
        """The index of the innermost loop around a statement. "" if there is none."""
        return self.loops.get(path[:-1], "")

    def _body(self, body: tuple[Stmt, ...], path: Path, iteration: Iteration) -> None:
        """Add the steps of a body in one iteration of the loops around it."""
        current = iteration[-1] if iteration else 0
        for i, s in enumerate(body):
            at = (*path, i)
            if isinstance(s, Loop):
                self._loop(s, at, iteration)
                continue
            n = self._number(at, s)
            if n < 0:  # no instruction
                continue
            conflicts, own = self._memory.access(self._used(at), len(self.steps), n)
            earlier = tuple([u.step for u in conflicts])
            self.steps.append(Step("op", at, self.number.setdefault(at, len(self.number)), current, n, earlier, iteration, s,
                                   conflicts, own))

    def _number(self, at: Path, o: Op) -> int:
        """The number of the pipe that runs the op at a place. -1 if it is no instruction."""
        if at not in self._pipe:
            pipe = pipe_of(self.device, o)
            self._pipe[at] = -1 if pipe is None else self.pipes.number[pipe]
        return self._pipe[at]

    def _used(self, at: Path) -> list[tuple[Access, Near]]:
        """The accesses of the op at a place in this iteration, with the regions that they overlap."""
        if at in self._same:
            return self._same[at]
        each = self._accesses[at]
        found = [(x, self._memory.regions(x)) for x in [x.at(self._counts) for x in each]]
        if all(x.slots == 1 for x in each):
            self._same[at] = found
        return found

    def _loop(self, s: Loop, at: Path, iteration: Iteration) -> None:
        """Add the steps of a loop."""
        self.loops[at] = s.index
        n = self._met[s.index] = self._met.get(s.index, -1) + 1
        times = self._trips[s.index][n % len(self._trips[s.index])]
        current, number = iteration[-1] if iteration else 0, self.number.setdefault(at, len(self.number))
        self.steps.append(Step("begin", at, number, current, iteration=iteration))
        for t in range(times):
            self._counts[s.index] = t
            self._body(s.body, at, (*iteration, t))
            if not iteration and t < 2:
                self.first_steps = len(self.steps)
        self._counts[s.index] = times
        self.steps.append(Step("end", at, number, current, iteration=iteration, times=times))
