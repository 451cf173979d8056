"""check_rings: proves that mbarriers order warp groups.

The agents of a kernel that walks the chunks run side by side, the walk unrolled. Barriers count arrivals and phases as the
device does, and a wait knows a phase by its parity alone. Vector clocks say what each agent may rely on; copies by a unit
of its own are known to be over only by the barrier that they arrive at. Refused:
- a slot is read or written by two ops, one writing, that no barrier orders; a product that was begun reads until it is drained;
- a product that was begun is read before it is drained;
- a unit reads what threads wrote without a fence between, which each did before they arrived;
- a fragment is read by an agent that does not hold it;
- a wait that a phase could pass by, or that an older phase could end; an arrival that could fall into another phase;
- a wait that nobody ends, or arrivals that do not fill a phase.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..devices import Groups
from ..ir.core import Kernel, Op, Program, loops, walk
from ..ir.ops import OWN_PART
from ..ir.printer import op_text
from .clocks import Clock, Clocks, joined
from .happens_before import RaceError

BARRIER = "barrier"  # the space of barriers: a buffer's shape is how many threads arrive
ITERATIONS = 8  # more than twice the slots of any ring
WARM_UPS = (0, 1, 2, 3, 4)  # warm-up lengths: either parity of each ring's iterations, more and less than its slots
#: An agent's threads, in program order; and what they do with rings, which threads of the same agent know by a barrier only.
THREADS, SHARED = "threads", "shared"


def check_rings(p: Program, device: Groups) -> Program:
    """`p` itself; RaceError for a kernel whose barriers do not order its agents."""
    for k in p.kernels:
        if k.agents:
            check_ring(p, k, device)
    return p


def check_ring(p: Program, k: Kernel, device: Groups) -> None:
    """Raises RaceError where the barriers of `k`, a kernel of `p` that warp groups share, do not order it."""
    warm_up = any(o.attr(OWN_PART) for o in walk(k.body))
    for n in WARM_UPS if warm_up else (0,):
        _Check(p, k, device, n).run()


def reads(k: Kernel) -> Callable[[Op], set[str]]:
    """Of each op of `k`, the values with storage that it reads. An op without any is an expression: its reader reads its
    operands."""
    under: dict[str, set[str]] = {}
    for o in walk(k.body):
        if o.out:
            under[o.out] = {o.out} if o.buffer else set().union(*(under.get(a, {a}) for a in o.args))

    def of(o: Op) -> set[str]:
        computes = o.buffer or not o.out
        return set().union(*(under.get(a, {a}) for a in o.args)) if computes else set()
    return of


def is_of_tokens(p: Program, o: Op) -> bool:
    """Whether a load or store moves rows of tokens, of which a sequence's last chunk has fewer."""
    return p.tensor(o.attr("tensor")).index == "token"


def threads_write(p: Program, o: Op) -> bool:
    """Whether threads write some of what `o` puts into a ring: all but what a unit copies whole."""
    return not (o.kind == "load" and not is_of_tokens(p, o))


def unit_reads(p: Program, o: Op) -> bool:
    """Whether a unit beside the threads reads what `o` reads from a ring: tensor cores, or the unit that copies tiles."""
    return is_of_tokens(p, o) if o.kind == "store" else o.kind == "matmul"


@dataclass
class _Phases:
    """A barrier of one slot. full[n]: what is known once phase n is complete; waits[n]: who waited for it, (pipe, number)."""

    count: int
    arrived: int = 0
    now: Clock = field(default_factory=list)
    full: list[Clock] = field(default_factory=list)
    waits: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


@dataclass
class _Write:
    op: Op
    pipe: int
    number: int
    threads: bool  # whether threads wrote some of it
    fence: int = 0  # the number of the agent's fence after it


class _Check:
    """A run of all agents of a walk, with phases of barriers and vector clocks. warm_up: iterations before the walk's own
    part.
    """
    def __init__(self, p: Program, k: Kernel, device: Groups, warm_up: int) -> None:
        self.p, self.k, self.device, self.warm_up = p, k, device, warm_up
        self.reads, self.buffers = reads(k), {b.name: b for b in k.buffers}
        self.home = {o.out: o.buffer for o in walk(k.body) if o.buffer}
        self.holder = {o.buffer: o.agent for o in walk(k.body) if o.buffer}
        (self.loop,) = loops(k.body)
        # A copy is ordered with those that arrive at the same barrier only.
        copies = dict.fromkeys((o.agent, str(o.attr("channel"))) for o in walk(k.body) if o.kind == "load" and o.attr("channel"))
        pipes = [*((a.name, x) for a in k.agents for x in (THREADS, SHARED)), *copies]
        self.clocks = Clocks(pipes, {x: (x[0], THREADS) for x in pipes}, [x for x in pipes if x[1] == SHARED])
        self.arrivals = [n for n, x in enumerate(pipes) if x[1] != SHARED]
        self.threads = {a.name: a.threads for a in k.agents}
        self.begun: dict[str, list[tuple[Op, tuple[str, int]]]] = {}  # agent -> products to be drained, with a slot they read
        self.phases = {(b.name, s): _Phases(b.shape[0]) for b in k.buffers if b.space == BARRIER for s in range(b.slots)}
        self.written: dict[tuple[str, int], _Write] = {}
        self.read: dict[tuple[str, int], list[tuple[Op, int, int]]] = {}

    def error(self, text: str) -> RaceError:
        return RaceError(f"{self.p.name}, kernel {self.k.name}: {text}")

    def run(self) -> None:
        """Run all agents, each as far as its waits allow. RaceError for a deadlock, or for a phase that arrivals do not fill."""
        todo = {a: [(i, o) for i in range(self.warm_up + ITERATIONS) for o in self.loop.body
                    if isinstance(o, Op) and o.agent == a and not (i < self.warm_up and o.attr(OWN_PART))]
                for a in self.threads}
        while any(todo.values()):
            moved = False
            for steps in todo.values():
                while steps and self.step(*steps[0]):
                    steps.pop(0)
                    moved = True
            if not moved:
                stuck = next(steps[0] for steps in todo.values() if steps)
                raise self.error(f"{op_text(stuck[1])} in iteration {stuck[0]}: nothing ends it")
        partial = [name for (name, _), x in self.phases.items() if x.arrived]
        if partial:
            raise self.error(f"arrivals do not fill a phase of {', '.join(partial)}")

    def step(self, i: int, o: Op) -> bool:
        """Run an op; False where it has to wait."""
        c = self.clocks
        pipe = c.number[o.agent, THREADS]
        if o.kind == "wait":
            return self.wait(i, o, pipe)
        if o.kind == "signal":
            self.signal(i, o, pipe)
        elif o.kind == "drain":
            shared = c.number[o.agent, SHARED]
            number = c.issue(shared)
            for x, slot in self.begun.pop(o.agent, []):
                self.read.setdefault(slot, []).append((x, shared, number))
        elif o.kind == "fence":
            number = c.issue(c.number[o.agent, SHARED])
            for w in self.written.values():
                if w.op.agent == o.agent and not w.fence:
                    w.fence = number
        else:
            self.op(i, o, pipe)
        return True

    def phase(self, i: int, o: Op) -> tuple[_Phases, int]:
        """The barrier that `o` means, and how many phases of its slot go before the iteration's."""
        x = self.buffers[o.attr("channel")]
        i -= self.warm_up * bool(o.attr(OWN_PART))
        return self.phases[x.name, i % x.slots], i // x.slots

    def wait(self, i: int, o: Op, pipe: int) -> bool:
        """Whether the wait of an op in iteration i ends. RaceError where an older phase of the same parity could end it."""
        x, before = self.phase(i, o)
        wanted = before + (not o.attr("back"))  # phases to be complete
        if len(x.full) % 2 != wanted % 2:
            return False
        known = self.clocks.known(pipe)
        if len(x.full) < wanted or (wanted > 1 and not self.covers(known, x.full[wanted - 2])):
            raise self.error(f"{op_text(o)} in iteration {i}: an older phase of the same parity could end it")
        if wanted:
            self.clocks.learn(pipe, x.full[wanted - 1])
        x.waits.setdefault(wanted, []).append((pipe, self.clocks.issue(pipe)))
        return True

    def signal(self, i: int, o: Op, pipe: int) -> None:
        """Arrivals of an agent's threads. RaceError where they could count for the phase before, or complete a phase unseen by
        a waiter.
        """
        x, before = self.phase(i, o)
        c = self.clocks
        if before and (len(x.full) < before or not self.covers(c.known(pipe), x.full[before - 1])):
            raise self.error(f"{op_text(o)} in iteration {i}: it could arrive in the phase before")
        c.issue(pipe)
        for y in (THREADS, SHARED, str(o.attr("channel"))):
            if (o.agent, y) in c.number:
                now = c.after(c.number[o.agent, y])
                x.now = joined(x.now, now) if x.now else now
        x.arrived += self.threads[o.agent]
        if x.arrived < x.count:
            return
        for who, number in x.waits.get(len(x.full), []):
            if x.now[who] < number:
                raise self.error(f"{op_text(o)} in iteration {i}: the phase before could be over unseen by a wait of "
                                 f"{c.names[who][0]}")
        x.full.append(x.now)
        x.arrived, x.now = x.arrived - x.count, []

    def covers(self, known: Clock, what: Clock) -> bool:
        """Whether every arrival of a phase, after which `what` is known, is known to be over."""
        return all(known[n] >= what[n] for n in self.arrivals)

    def op(self, i: int, o: Op, pipe: int) -> None:
        """The accesses of an op to rings, and that it reads no fragment of another agent."""
        c = self.clocks
        units = c.number.get((o.agent, str(o.attr("channel")))) if o.kind == "load" else None
        known = c.known(pipe)
        for value in self.reads(o):
            name = self.home.get(value, value)
            x = self.buffers[name]
            if any(b.out == value for b, _ in self.begun.get(o.agent, [])):
                raise self.error(f"{o.out or o.kind} of {o.agent} reads {value} in iteration {i}, a product that was begun and "
                                 "not drained")
            if x.space != self.device.operand:
                if self.holder[name] != o.agent:
                    raise self.error(f"{o.out or o.kind} of {o.agent} reads {value}, a fragment of {self.holder[name]}")
                continue
            w = self.written.get((name, i % x.slots))
            if w is None or w.op.out != value or known[w.pipe] < w.number:
                raise self.error(f"{o.out or o.kind} of {o.agent} reads {value} in iteration {i} without waiting for it")
            maker = c.number[w.op.agent, SHARED]
            if w.threads and unit_reads(self.p, o) and not 0 < w.fence <= known[maker]:
                raise self.error(f"{o.out or o.kind} of {o.agent} reads {value} by a unit of its own; threads of {w.op.agent} "
                                 "wrote it, and no fence stands between")
        c.issue(pipe)
        shared = c.number[o.agent, SHARED]
        number = c.issue(shared)
        for value in self.reads(o):
            name = self.home.get(value, value)
            x = self.buffers[name]
            if x.space == self.device.operand and o.attr("asynchronous"):
                self.begun.setdefault(o.agent, []).append((o, (name, i % x.slots)))
            elif x.space == self.device.operand:
                self.read.setdefault((name, i % x.slots), []).append((o, shared, number))
        x = self.buffers.get(o.buffer)  # type: ignore[assignment]
        if x is None or x.space != self.device.operand:
            return
        slot = (x.name, i % x.slots)
        begun = [b for agent in self.begun.values() for b, read in agent if read == slot]
        if begun:
            raise self.error(f"{o.out} of {o.agent} is written in iteration {i} while {begun[0].out} of {begun[0].agent} reads "
                             "its slot")
        before = [(r.out or r.kind, r.agent, i, n) for r, i, n in self.read.pop(slot, []) if r is not o]
        if slot in self.written:
            w = self.written[slot]
            before.append((w.op.out, w.op.agent, w.pipe, w.number))
        for what, agent, user, n in before:
            if known[user] < n:
                raise self.error(f"{o.out} of {o.agent} is written in iteration {i} before {what} of {agent} is sure to be done "
                                 "with its slot")
        if units is not None:
            shared, number = units, c.issue(units)
        self.written[slot] = _Write(o, shared, number, threads_write(self.p, o))
