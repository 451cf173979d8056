"""check_rings: proves that mbarriers order the accesses of warp groups to rings.

The checker runs the agents of a walk concurrently for several iterations. It models the device's barriers: they count arrivals
and phases, and a wait tests only the parity of the phase. Vector clocks give the ops that each agent knows to be complete. An
asynchronous copy is known to be complete only through the barrier at which it arrives. The checker refuses:
- two accesses to a slot, at least one of them a write, that no barrier orders. An asynchronous product reads its operands, also
  those in registers, until a drain that does not name it (`but`);
- a read of the result of an asynchronous product before that, a write over it, or a read of a fragment of another agent. Another
  asynchronous product may add to it in the same registers: products of an agent run one after another;
- a drain that leaves out a product which began before another one that it waits for;
- an asynchronous unit that reads or overwrites a slot which threads wrote, unless these execute a fence before they arrive;
- a wait that could miss its phase or that an older phase of the same parity could end, or an arrival for another phase;
- a wait that never ends, and a phase that arrivals do not complete;
- a barrier for ragged tails that counts other threads than those of the agent which copies, or that several copies use.

In a loop over items, an agent runs several walks, some of them without chunks. The rings of the walk count its iterations in all
items; others count items. Groups of an agent's threads that take iterations in turn run side by side.
"""
from __future__ import annotations

from collections import deque

from ..devices import Groups
from ..ir.core import Kernel, Op, Program, Stmt, loops
from ..ir.ops import OWN_PART
from ..ir.printer import op_text
from .clocks import Clock, Clocks, joined
from .happens_before import RaceError
from .ring_accesses import is_filled, reads, threads_write, unit_reads
from .ring_runs import items, iterations, of_loop, warm_ups
from .slot_states import Phases, Write

BARRIER = "barrier"  # the space of barriers. The shape of such a buffer is the number of threads that arrive
#: The two pipes of an agent: its threads in program order, and their accesses to rings. Threads of the same agent are not in
#: step, so that one thread knows another's accesses to be complete only after a barrier.
THREADS, SHARED = "threads", "shared"


def check_rings(p: Program, device: Groups) -> Program:
    """Returns `p`, or raises RaceError for a kernel whose barriers do not order its agents."""
    for k in p.kernels:
        if k.agents:
            check_ring(p, k, device)
    return p


def check_ring(p: Program, k: Kernel, device: Groups, warmed_up: bool = True) -> None:
    """Raises RaceError if the barriers of `k`, a kernel with several agents, do not order its accesses.

    warmed_up: whether to check walks with a warm-up, too.
    """
    left_out = any(o.attr(OWN_PART) for o in k.ops) or any(lp.index == "before" for lp in loops(k.body))
    for n in warm_ups(k) if left_out and warmed_up else (0,):
        _Check(p, k, device, n).run()


class _Check:
    """A run of all agents of a walk, with phases of barriers and vector clocks. warm_up: the number of warm-up iterations."""
    def __init__(self, p: Program, k: Kernel, device: Groups, warm_up: int) -> None:
        """The state before the first iteration: no slot is written, no barrier has an arrival, no agent knows of another."""
        self.p, self.k, self.device, self.warm_up = p, k, device, warm_up
        self.buffers = {b.name: b for b in k.buffers}
        home, read = {o.out: o.buffer for o in k.ops if o.buffer}, reads(k)
        self.holder = {o.buffer: o.agent for o in k.ops if o.buffer}
        *before, self.loop = (lp for lp in loops(k.body) if lp.index != "item")
        self.items = next((lp for lp in loops(k.body) if lp.index == "item"), None)
        self.before = next(iter(before), self.loop)  # the loop of the iterations of the warm-up
        home |= {c.result: c.name for c in self.loop.carried}
        #: op -> the values that it reads, with their buffers
        self.sources = {o: [(x, self.buffers[home.get(x, x)]) for x in read(o)] for lp in loops(k.body)
                        for o in lp.body if isinstance(o, Op)}
        # A copy is ordered only with copies that arrive at the same barrier.
        copies = dict.fromkeys((o.agent, str(o.attr("channel"))) for o in k.ops if o.kind == "load" and o.attr("channel"))
        self.turns = {a.name: a.turns for a in k.agents}
        pipes = [*((self.who(a.name, t), x) for a in k.agents for t in range(a.turns) for x in (THREADS, SHARED)), *copies]
        self.clocks = Clocks(pipes, {x: (x[0], THREADS) for x in pipes}, [x for x in pipes if x[1] == SHARED])
        self.arrivals = [n for n, x in enumerate(pipes) if x[1] != SHARED]
        self.threads = {a.name: a.of_iteration for a in k.agents}
        self.begun: dict[str, list[tuple[Op, tuple[str, int]]]] = {}  # agent -> undrained products, and a slot they read
        self.phases = {(b.name, s): Phases(b.shape[0]) for b in k.buffers if b.space == BARRIER for s in range(b.slots)}
        self.written: dict[tuple[str, int], Write] = {}
        self.early = set[tuple[str, int]]()  # slots into which a copy was begun with another one, before its own op
        self.read: dict[tuple[str, int], list[tuple[Op, int, int]]] = {}

    def error(self, text: str) -> RaceError:
        return RaceError(f"{self.p.name}, kernel {self.k.name}: {text}")

    def run(self) -> None:
        """Run each agent as far as its waits allow, until all are done. RaceError for a deadlock, or for an incomplete phase."""
        copies = [o for o in self.loop.ops if o.attr("tail")]
        for o in copies:
            x = self.buffers[o.attr("tail")]
            if (x.shape, x.slots) != ((self.threads[o.agent],), 1) or sum(y.attr("tail") == x.name for y in copies) > 1:
                raise self.error(f"{x.name} is not of {o.out}'s ragged tail and the threads of {o.agent} alone")
        todo = {self.who(a, t): deque(x for x in self.steps(a) if x[0] % n == t) for a, n in self.turns.items() for t in range(n)}
        while any(todo.values()):
            moved = False
            for steps in todo.values():
                while steps and self.step(*steps[0]):
                    steps.popleft()
                    moved = True
            if not moved:
                i, o = next(filter(None, todo.values()))[0]
                raise self.error(f"{op_text(o)} in iteration {i}: nothing ends it")
        partial = [name for (name, _), x in self.phases.items() if x.arrived]
        if partial:
            raise self.error(f"arrivals do not fill a phase of {', '.join(partial)}")

    def who(self, agent: str, i: int) -> str:
        """The threads of an agent that run iteration i."""
        return agent if self.turns[agent] == 1 else f"{agent} {i % self.turns[agent]}"

    def steps(self, agent: str) -> list[tuple[int, Op]]:
        """The ops that an agent runs, each with its iteration. Its readers run an expression, which is an op without buffer."""
        def own(body: tuple[Stmt, ...]) -> list[Op]:
            return [o for o in body if isinstance(o, Op) and o.agent == agent and (o.buffer or not o.out)]

        part, warm_up = own(self.loop.body), [o for o in own(self.before.body) if not o.attr(OWN_PART)]
        if self.items is None:
            return [*of_loop(warm_up, 0, self.warm_up), *of_loop(part, self.warm_up, iterations(self.k))]
        at, out, done = self.items.body.index(self.loop), list[tuple[int, Op]](), 0
        for n, chunks in enumerate(items(self.k)):
            out += [(n, o) for o in own(self.items.body[:at])]
            out += of_loop(part, done, chunks)
            out += [(n, o) for o in own(self.items.body[at:])]
            done += chunks
        return out

    def step(self, i: int, o: Op) -> bool:
        """Run an op. Returns False if it has to wait."""
        c, who = self.clocks, self.who(o.agent, i)
        pipe = c.number[who, THREADS]
        if o.kind == "wait":
            return self.wait(i, o, pipe)
        if o.kind == "signal":
            self.signal(i, o, pipe)
        elif o.kind == "warp_barrier":
            if self.turns[o.agent] == 1:
                raise self.error(f"{op_text(o)} of {o.agent}, whose iterations are not run by single warps")
            c.wait(pipe, c.after(c.number[who, SHARED]))
        elif o.kind == "drain":
            shared = c.number[who, SHARED]
            number = c.issue(shared)
            begun = self.begun.pop(o.agent, [])
            self.begun[o.agent] = [x for x in begun if x[0].out in o.attr("but", ())]
            done = [x for x in begun if x not in self.begun[o.agent]]
            if begun != done + self.begun[o.agent]:
                raise self.error(f"{op_text(o)} of {o.agent} in iteration {i}: a product that began later may end first")
            for x, slot in done:
                self.read.setdefault(slot, []).append((x, shared, number))
        elif o.kind == "fence":
            number = c.issue(c.number[who, SHARED])
            for w in self.written.values():
                if w.who == who and not w.fence:
                    w.fence = number
        else:
            self.op(i, o, pipe)
        return True

    def phase(self, i: int, o: Op) -> tuple[Phases, int]:
        """The barrier of `o` in iteration i, and the number of its slot's phases before this iteration's phase."""
        x = self.buffers[o.attr("channel")]
        if x.own and i < self.warm_up:
            raise self.error(f"{op_text(o)} in iteration {i}, of the warm-up: its barrier counts the others only")
        i -= self.warm_up * x.own
        return self.phases[x.name, i % x.slots], i // x.slots

    def wait(self, i: int, o: Op, pipe: int) -> bool:
        """Whether the wait ends now. RaceError if an older phase of the same parity could end it."""
        x, before = self.phase(i, o)
        wanted = before + (not o.attr("back"))  # the number of phases that must be complete
        if len(x.full) % 2 != wanted % 2:
            return False
        known = self.clocks.known(pipe)
        if len(x.full) < wanted or (wanted > 1 and not self.covers(known, x.full[wanted - 2])):
            raise self.error(f"{op_text(o)} in iteration {i}: an older phase of the same parity could end it")
        number = self.clocks.wait(pipe, x.full[wanted - 1]) if wanted else self.clocks.issue(pipe)
        x.waits.setdefault(wanted, []).append((pipe, number))
        return True

    def signal(self, i: int, o: Op, pipe: int) -> None:
        """The arrival of an agent's threads. RaceError if it could count for the previous phase, or if it could complete a
        phase while a wait for the previous phase has not ended.
        """
        x, before = self.phase(i, o)
        c = self.clocks
        if before and (len(x.full) < before or not self.covers(c.known(pipe), x.full[before - 1])):
            raise self.error(f"{op_text(o)} in iteration {i}: it could arrive in the phase before")
        c.issue(pipe)
        for y in (THREADS, SHARED, str(o.attr("channel"))):
            if (self.who(o.agent, i), y) in c.number:
                now = c.after(c.number[self.who(o.agent, i), y])
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
        """Whether `known` shows that all arrivals of a phase are complete. what: the clock once the phase is complete."""
        return all(known[n] >= what[n] for n in self.arrivals)

    def free(self, i: int, o: Op, known: Clock) -> None:
        """RaceError if an earlier access to the slot that `o` writes in iteration i may not be complete."""
        slot = (o.buffer, i % self.buffers[o.buffer].slots)
        before = [(r.out or r.kind, r.agent, user, n) for r, user, n in self.read.get(slot, []) if r is not o]
        w = self.written.get(slot)
        before += [(w.op.out, w.op.agent, w.pipe, w.number)] if w else []
        units = o.kind == "load" and o.type is not None and o.type.rank == 2
        if w and units and w.op.kind != "load" and not 0 < w.fence <= known[self.clocks.number[w.who, SHARED]]:
            raise self.error(f"{o.out} of {o.agent} is copied in iteration {i} by a unit of its own over {w.op.out}; threads of "
                             f"{w.op.agent} wrote it, and no fence stands between")
        for what, agent, user, n in before:
            if known[user] < n:
                raise self.error(f"{o.out} of {o.agent} is written in iteration {i} before {what} of {agent} is sure to be done "
                                 "with its slot")

    def begin(self, i: int, load: Op, known: Clock) -> None:
        """Note that the copy of `load` is begun with another one, so that nothing may read the slot before its own op."""
        self.free(i, load, known)
        slot, pipe = (load.buffer, i % self.buffers[load.buffer].slots), self.clocks.number[load.agent, str(load.attr("channel"))]
        self.early.add(slot)
        self.read.pop(slot, None)
        self.written[slot] = Write(load, load.agent, pipe, self.clocks.issue(pipe), threads_write(self.p, load))

    def added(self, o: Op) -> str:
        """The product under way to which the product `o` adds in the same registers, without a wait; "" if there is none. Both
        have the same shape, as PTX asks for."""
        begun = (b for b, _ in self.begun.get(o.agent, ()) if (b.buffer, b.type) == (o.buffer, o.type))
        return next((b.out for b in begun if o.attr("asynchronous") and (b.out,) == o.args[2:]), "")

    def op(self, i: int, o: Op, pipe: int) -> None:
        """Check the accesses of an op to rings, and that it reads no fragment of another agent."""
        c = self.clocks
        units = c.number.get((o.agent, str(o.attr("channel")))) if o.kind == "load" else None
        known = c.known(pipe)
        tails = self.loop.step < 0 or i >= self.warm_up  # a walk back begins with the sequence's last chunk
        whole = units is not None and tails and not o.attr("tail")
        if whole and is_filled(self.p, o) and o.type is not None and o.type.rank == 2:
            raise self.error(f"{o.out} of {o.agent} is copied in whole tiles in iteration {i}, where a chunk may have fewer rows")
        begun, sources, added = {b.out for b, _ in self.begun.get(o.agent, ())}, self.sources[o], self.added(o)
        sums = {b.buffer for b, _ in self.begun.get(o.agent, ())}  # a carried value has another name than the one before
        for value, x in sources:
            if value != added and (value in begun or (x.space != self.device.operand and x.name in sums)):
                raise self.error(f"{o.out or o.kind} of {o.agent} reads {value} in iteration {i}, a product that was begun and "
                                 "not drained")
            if x.space != self.device.operand:
                if self.holder[x.name] != o.agent:
                    raise self.error(f"{o.out or o.kind} of {o.agent} reads {value}, a fragment of {self.holder[x.name]}")
                continue
            w = self.written.get((x.name, i % x.slots))
            if w is None or w.op.out != value or known[w.pipe] < w.number:
                raise self.error(f"{o.out or o.kind} of {o.agent} reads {value} in iteration {i} without waiting for it")
            maker = c.number[w.who, SHARED]
            if w.threads and unit_reads(self.p, o) and not 0 < w.fence <= known[maker]:
                raise self.error(f"{o.out or o.kind} of {o.agent} reads {value} by a unit of its own; threads of {w.op.agent} "
                                 "wrote it, and no fence stands between")
        c.issue(pipe)
        who = self.who(o.agent, i)
        shared = c.number[who, SHARED]
        number = c.issue(shared)
        for _, x in sources:
            if o.attr("asynchronous") and x.name != o.buffer:  # `over` tells of writes to what it adds to
                self.begun.setdefault(o.agent, []).append((o, (x.name, i % x.slots)))
            elif not o.attr("asynchronous") and x.space == self.device.operand:
                self.read.setdefault((x.name, i % x.slots), []).append((o, shared, number))
        if not o.buffer:
            return
        over = next((b for b, _ in self.begun.get(o.agent, ()) if b.buffer == o.buffer and b is not o), None)
        if over is not None and not added:
            raise self.error(f"{o.out} of {o.agent} is written in iteration {i} over {over.out}, a product that was begun and "
                             "not drained")
        slot = (o.buffer, i % self.buffers[o.buffer].slots)
        reading = [b for agent in self.begun.values() for b, read in agent if read == slot and b is not o]
        if reading:
            raise self.error(f"{o.out} of {o.agent} is written in iteration {i} while {reading[0].out} of {reading[0].agent} "
                             "reads its slot")
        if self.buffers[o.buffer].space != self.device.operand:
            return
        if not o.attr("begun"):
            self.free(i, o, known)
        elif slot not in self.early:
            raise self.error(f"{o.out} of {o.agent} waits in iteration {i} for a copy that {o.attr('begun')} did not begin")
        self.early.discard(slot)
        for y in self.loop.ops if o.attr("tail") else ():  # a warm-up has no tails
            if y.attr("begun") == o.out:
                self.begin(i, y, known)
        self.read.pop(slot, None)
        if units is not None:
            shared, number = units, c.issue(units)
        self.written[slot] = Write(o, who, shared, number, threads_write(self.p, o))
