"""synchronise: derives every wait. For devices with cores (PTO).

Two ops that access the same bytes must run in program order if one of them writes. Where neither pipes nor earlier waits
guarantee this, the pass adds a signal after the first op and a wait before the second:
- They go into the innermost body that contains both ops. An op inside an inner loop is represented there by that loop.
- If the second op is in a later iteration than the first, the wait takes the signal of an earlier iteration. That is the
  previous one, or with storage of several slots the one that used the same slot. As many signals come before the loop, to prime
  it. As many waits come after the loop, to take the last signals.
- Two ops of one unordered pipe have a barrier between them instead.

Of several earlier ops, the pass waits for the latest first, because this wait often covers the others (vector clocks). A wait
in a loop for an op before the loop may be covered by waits that later iterations need. A barrier may be covered by one that is
found later. The pass removes such waits and barriers at the end.

Within an agent, a signal goes from pipe to pipe and has an event id. Between agents, it goes from a pipe to an agent, whose
issuer waits, and uses a counter. Signals share an id only if each is set after the wait for the one before. If a pair for
storage with several slots sets its id before that wait, it uses as many ids in turn as there are slots. If no id is free, a
barrier over the agent makes one free.

On a device with one agent, the target's compiler orders memory. There the pass adds nothing.

Example, with a load on the pipe MTE2 and an exp on the pipe V:
    before:  x = load; y = exp(x)
    after:   x = load; signal from MTE2 to V; wait on V for MTE2; y = exp(x)
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...devices import Cores, Device
from ...ir.core import Kernel, Loop, Op, Program, Stmt
from ...schedule.schedule import ScheduleError
from ..stage import takes
from .accesses import Access, Clocks, Iteration, Path, Step, accesses, pipe_of, trace

#: The place of a signal: "after" a statement, or "before" a loop that it primes.
_Place = tuple[str, Path]
#: Numbers of iterations to unroll. They cover all cases: three (the first of two slots is used again), two (the second slot is
#: used last), none, one.
TRIPS = {"item": [5], "chunk": [3, 2, 2, 0, 1]}


@takes("placed", gives="synchronised")
def synchronise(p: Program, device: Device) -> Program:
    """`p` with signals, waits and barriers. Raises ScheduleError if flags or event ids do not suffice."""
    if not isinstance(device, Cores):
        return p
    return p.map_kernels(lambda k: _kernel(p, k, device))


def _kernel(p: Program, k: Kernel, device: Cores) -> Kernel:
    """The kernel with its waits. Barriers over an agent are added until event ids suffice."""
    drains: set[tuple[_Place, str]] = set()
    for _ in range(64):
        d = _Derive(p, k, device, drains)
        d.run()
        tight = d.number()
        if tight is None:
            return replace(k, body=d.insert(k.body, ()))
        drains.add(tight)
    raise ScheduleError(f"{p.name}, kernel {k.name}: no assignment of event ids was found")


@dataclass
class _Pair:
    """A signal and its wait, as places in the program.

    iteration: the loop of which a later iteration waits, or None. distance: how many iterations later. slots: those of the
    storage that the pair is about. ids: the signals use them in turn.
    """

    src: int  # pipe that signals
    dst: int  # pipe that waits
    signal: Path  # after this statement
    wait: Path  # before this statement
    iteration: Path | None
    why: str
    crosses: bool
    distance: int = 0
    slots: int = 1
    ids: tuple[int, ...] = ()
    queue: list[list[int]] = field(default_factory=list)
    sets: list[_Set] = field(default_factory=list)
    waits: list[_Wait] = field(default_factory=list)


#: The signals of a pair that use one of its ids: the pair, the number of its ids, the index of this one.
_Part = tuple[_Pair, int, int]


@dataclass(frozen=True)
class _Set:
    time: int
    number: int  # counted from the loop's first signal, including those that prime the loop
    known: list[int]  # the clock of the signalling pipe
    place: _Place


@dataclass(frozen=True)
class _Wait:
    time: int
    number: int  # the number of the signal that it takes
    done: int  # its own number on the waiting pipe


#: low, high, write, pipe: bytes of a space, whether they are written, and the pipe that accesses them.
_Range = tuple[int, int, bool, int]


@dataclass(frozen=True)
class _Record:
    access: Access
    pipe: int
    number: int
    time: int
    step: Step


class _Derive:
    """Derives the waits of one kernel. drains: barriers over an agent, by place."""
    def __init__(self, p: Program, k: Kernel, device: Cores, drains: set[tuple[_Place, str]]) -> None:
        self.p, self.k, self.device, self.drains = p, k, device, drains
        self.access = accesses(p, k, device)
        self.steps = [(s, pipe_of(device, s.op) if s.op else None) for s in trace(k, TRIPS)]
        self.pairs: list[_Pair] = []
        self.parted: set[Path] = set()  # ops with a barrier of their pipe before them
        self.places()

    def places(self) -> None:
        """Index the pairs by the places of their signals and waits."""
        self.after: dict[Path, list[_Pair]] = {}
        self.before: dict[Path, list[_Pair]] = {}
        self.primed: dict[Path, list[_Pair]] = {}
        for x in self.pairs:
            self.file(x)

    def file(self, x: _Pair) -> None:
        """Add a pair to the index."""
        self.after.setdefault(x.signal, []).append(x)
        self.before.setdefault(x.wait, []).append(x)
        if x.iteration is not None:
            self.primed.setdefault(x.iteration, []).append(x)

    def run(self) -> None:
        """Add pairs and barriers until all accesses are ordered. Then remove those that others cover."""
        while self.once():
            pass
        for x in [x for x in self.pairs if isinstance(self.statement(x.wait), Loop)]:
            self.without([y for y in self.pairs if y is not x], self.parted)
        for path in sorted(self.parted - self.needed):
            self.without(self.pairs, self.parted - {path})

    def without(self, pairs: list[_Pair], parted: set[Path]) -> None:
        """Keep only these pairs and barriers, if they order all accesses."""
        kept = self.pairs, self.parted
        self.pairs, self.parted = list(pairs), set(parted)
        self.places()
        if self.once():
            self.pairs, self.parted = kept
            self.places()
            self.once()

    def statement(self, path: Path) -> Stmt:
        """The statement at a place."""
        body, s = self.k.body, self.k.body[path[0]]
        for i in path:
            s = body[i]
            body = s.body if isinstance(s, Loop) else ()
        return s

    def once(self) -> bool:
        """Walk the unrolled kernel. True if a pair or a barrier was added."""
        self.clocks = c = Clocks(self.device)
        self.records: dict[str, dict[_Range, list[_Record]]] = {}  # by space and range; most ranges overlap few others
        self.saved: dict[tuple[int, int], list[int]] = {}
        self.time = 0
        #: unordered pipe -> its barriers: the number of ops before each barrier, and its place
        self.cuts: dict[int, list[tuple[int, Path]]] = {i: [] for i in c.loose}
        self.needed: set[Path] = set()  # barriers that are the only order between two ops
        for x in self.pairs:
            x.queue, x.sets, x.waits = [], [], []
        added = False
        entered: set[tuple[Path, Iteration]] = set()
        for step, pipe in self.steps:
            self.counts = step.counts
            for depth in range(1, len(step.path) + (step.op is None)):  # loops entered: their waits and priming signals
                loop, iteration = step.path[:depth], step.iteration[:depth - 1]
                if (loop, iteration) not in entered:
                    entered.add((loop, iteration))
                    self.wait_before(loop)
                    self.drain(("before", loop))
                    for x in self.primed.get(loop, []):
                        for n in range(x.distance):
                            self.signal(x, ("before", loop), n)
            if step.op is None:
                for x in self.primed.get(step.path, []):
                    for n in range(x.distance):
                        self.wait(x, self.iteration(x) + n)
                self.signal_after(step.path)
                continue
            self.wait_before(step.path)
            if pipe is not None:
                i = c.number[pipe]
                added = self.order(step, i) or added
                n = c.run(i)
                self.time += 1
                self.saved[i, n] = c.snapshot(i)
                for a in self.access[step.path]:
                    at = a.at(step.counts)
                    records = self.records.setdefault(a.space, {}).setdefault((at.low, at.high, at.write, i), [])
                    if not records or records[-1].time < self.time:  # an op may read a value twice
                        records.append(_Record(at, i, n, self.time, step))
            self.signal_after(step.path)
        return added

    def drain(self, place: _Place) -> None:
        """Apply the barriers over agents that are at `place`."""
        for at, agent in self.drains:
            if at == place:
                self.clocks.drain(agent)

    def wait_before(self, path: Path) -> None:
        """Apply the waits and the barriers of unordered pipes before a statement."""
        for x in self.before.get(path, []):
            self.wait(x, self.iteration(x))
        if path in self.parted:
            for i in self.clocks.loose:
                self.clocks.barrier(i)
                self.cuts[i].append((self.clocks.issued[i], path))

    def signal_after(self, path: Path) -> None:
        """Apply the barriers over agents and the signals after a statement."""
        self.drain(("after", path))
        for x in self.after.get(path, []):
            self.signal(x, ("after", path), self.iteration(x) + x.distance)

    def signal(self, x: _Pair, place: _Place, number: int) -> None:
        """Record a signal of a pair, and what it says about completed ops."""
        self.time += 1
        x.sets.append(_Set(self.time, number, list(self.clocks.start(x.src)), place))
        x.queue.append(self.clocks.snapshot(x.src))

    def wait(self, x: _Pair, number: int) -> None:
        """Record a wait of a pair. The waiting pipe learns what the signal says."""
        self.time += 1
        self.clocks.start(x.dst)
        if x.queue:
            self.clocks.learn(x.dst, x.queue.pop(0))
        x.waits.append(_Wait(self.time, number, self.clocks.run(x.dst)))

    def iteration(self, x: _Pair) -> int:
        """The current iteration of the loop that contains the pair."""
        return self.counts.get(self.loop(x), 0)

    def loop(self, x: _Pair) -> str:
        """The index of the loop that contains the pair. "" if there is none."""
        s = self.statement(x.signal[:-1]) if len(x.signal) > 1 else None
        return s.index if isinstance(s, Loop) else ""

    # --- order -------------------------------------------------------------------------------------------------------
    def order(self, step: Step, i: int) -> bool:
        """Order all earlier ops that conflict with `step` before it. i: the pipe that runs `step`. True if a pair or a barrier
        was added."""
        c, added = self.clocks, False
        assert step.op is not None
        here = [a.at(step.counts) for a in self.access[step.path]]
        while True:
            known = c.start(i)
            open_: _Record | None = None
            for a in here:
                open_ = self.latest(a, i, known, open_)
            if open_ is None:
                return added
            self.add(open_, step, i)
            added = True

    def latest(self, a: Access, i: int, known: list[int], latest: _Record | None) -> _Record | None:
        """The latest op that conflicts with `a` and is not known to be complete on pipe `i`. latest: the result so far.

        Records that `a` overwrites and that are complete are dropped, because every later conflict with them is also one with
        `a`.
        """
        ranges, cuts = self.records.get(a.space, {}), self.cuts.get(i, [])
        for at in [x for x in ranges if x[0] < a.high and a.low < x[1] and (x[2] or a.write)]:
            low, high, _, pipe = at
            records = ranges[at]
            if pipe == i and cuts and cuts[-1][1] not in self.needed:
                before, (last, path) = cuts[-2][0] if cuts[1:] else -1, cuts[-1]
                if any(before < r.number <= last for r in records):
                    self.needed.add(path)
            if known[pipe] < records[-1].number and (latest is None or records[-1].time > latest.time):
                latest = records[-1]
            if a.write and a.low <= low and high <= a.high:
                ranges[at] = [r for r in records if known[pipe] < r.number]
                if not ranges[at]:
                    del ranges[at]
        return latest

    def add(self, r: _Record, step: Step, i: int) -> None:
        """Order the op of `r` before `step` on pipe i. Within an unordered pipe, that is a barrier. Otherwise, it is a signal
        and a wait in the innermost body that contains both."""
        c = self.clocks
        if r.pipe == i:
            self.parted.add(step.path)
            c.barrier(i)
            return
        depth = 0  # depth of the innermost body that contains both ops
        x, y = r.step.path, step.path
        iteration: Path | None = None
        distance = 0
        while x[depth] == y[depth] and depth < len(x) - 1 and depth < len(y) - 1:
            if r.step.iteration[depth] != step.iteration[depth]:
                iteration = x[:depth + 1]  # the two ops are in different iterations of this loop
                distance = step.iteration[depth] - r.step.iteration[depth]
                depth += 1
                break
            depth += 1
        crosses = c.names[r.pipe][0] != c.names[i][0]
        dst = c.boss[i] if crosses else i
        signal, wait = x[:depth + 1], y[:depth + 1]
        why = f"{r.access.value} -> {step.op.out or step.op.kind}" if step.op else ""
        pair = _Pair(r.pipe, dst, signal, wait, iteration, why, crosses)
        pair.slots = r.access.slots if self.loop(pair) == r.access.loop else 1
        pair.distance = min(distance, pair.slots)
        self.pairs.append(pair)
        self.file(pair)
        # In this walk the pair had no signal in earlier iterations, so apply now what it would say. The next walk applies all.
        last = r.number
        if len(signal) < len(x):
            last = max(q.number for ranges in self.records.values() for v in ranges.values() for q in v if q.pipe == r.pipe and
                       q.step.path[:len(signal)] == signal) if self.records else r.number
        c.learn(dst, self.saved[r.pipe, last])
        c.start(i)

    # --- ids ---------------------------------------------------------------------------------------------------------
    def number(self) -> tuple[_Place, str] | None:
        """Give every pair an id. If ids do not suffice, returns the place and the agent of a barrier that makes one free."""
        c = self.clocks
        within: dict[tuple[int, int], list[_Pair]] = {}
        counters: list[list[_Part]] = []
        #: (signalling pipe, waiting pipe) -> a counter that pairs within an iteration share
        shared: dict[tuple[int, int], int] = {}
        for x in self.pairs:
            if x.crosses:
                n = shared.get((x.src, x.dst), -1) if x.iteration is None else -1
                if n < 0 or self.clash([*counters[n], (x, 1, 0)], x.dst, self.device.flag_limit):
                    n = len(counters)
                    counters.append([])
                counters[n].append((x, 1, 0))
                x.ids = (n,)
                if x.iteration is None:
                    shared[x.src, x.dst] = n
                if n >= self.device.flags:
                    heads = self.k.batch.heads
                    fewer = f"; accepted is a value_heads below {heads}, which needs fewer" if heads > 1 else ""
                    raise ScheduleError(f"{self.p.name}, kernel {self.k.name}: more than {self.device.flags} flags "
                                        f"between agents{fewer}")
            else:
                within.setdefault((x.src, x.dst), []).append(x)
        for (_, dst), pairs in within.items():
            used: list[list[_Part]] = [[] for _ in range(self.device.events)]
            for x in sorted(pairs, key=lambda x: x.sets[0].time):
                ways = x.slots if self.clash([(x, 1, 0)], dst) else 1
                for iteration in range(ways):
                    part, clash = (x, ways, iteration), None
                    for e in sorted(range(self.device.events), key=lambda e: (len(used[e]), e)):
                        clash = self.clash([*used[e], part], dst)
                        if clash is None:
                            used[e].append(part)
                            x.ids = (*x.ids, e)
                            break
                    if clash is not None:
                        return clash, c.names[x.src][0]
        return None

    def clash(self, parts: list[_Part], dst: int, limit: int = 1) -> _Place | None:
        """The place of the first signal that could leave more than `limit` signals of one id without a wait. None if there is
        none."""
        events: list[_Set | _Wait] = [s for x, ways, iteration in parts for s in x.sets if s.number % ways == iteration]
        events += [w for x, ways, iteration in parts for w in x.waits if w.number % ways == iteration]
        done: list[int] = []
        sets = 0
        for e in sorted(events, key=lambda e: e.time):
            if isinstance(e, _Wait):
                done.append(e.done)
                continue
            behind = sets - limit
            if behind >= 0 and (len(done) <= behind or e.known[dst] < done[behind]):
                return e.place
            sets += 1
        return None

    # --- text --------------------------------------------------------------------------------------------------------
    def op(self, kind: str, x: _Pair, number: int, iterations: bool = True) -> Op:
        """A signal or a wait. number: the number of iterations ahead; without `iterations`, the number of this signal or wait."""
        src, dst = self.clocks.names[x.src], self.clocks.names[x.dst]
        attrs: dict[str, object] = {"channel": self.pairs.index(x), "src": src[1], "dst": dst[0] if x.crosses else dst[1],
                                    "why": x.why}
        if iterations and len(x.ids) > 1:
            attrs |= {"id": x.ids, "loop": self.loop(x), **({"ahead": number} if number else {})}
        else:
            attrs["id"] = x.ids[number % len(x.ids)]
        if x.crosses:
            attrs["src"] = f"{src[0]}.{src[1]}"
        return Op(kind, "", (), tuple(sorted(attrs.items())), agent=(src if kind == "signal" else dst)[0])

    def insert(self, body: tuple[Stmt, ...], path: Path) -> tuple[Stmt, ...]:
        """The body with signals, waits and barriers as ops. path: the place of the body."""
        out: list[Stmt] = []
        for i, s in enumerate(body):
            at = (*path, i)
            out += [self.op("wait", x, 0) for x in self.before.get(at, [])]
            if at in self.parted:
                assert isinstance(s, Op)
                pipe = pipe_of(self.device, s)
                assert pipe is not None
                out.append(Op("barrier", "", (), (("scope", pipe[1]),), agent=s.agent))
            if isinstance(s, Loop):
                primed = [(x, n) for x in self.primed.get(at, []) for n in range(x.distance)]
                out += self.barriers(("before", at))
                out += [self.op("signal", x, n, iterations=False) for x, n in primed]
                out.append(replace(s, body=self.insert(s.body, at)))
                out += [self.op("wait", x, n) for x, n in primed]
            else:
                out.append(s)
            out += self.barriers(("after", at))
            out += [self.op("signal", x, x.distance) for x in self.after.get(at, [])]
        return tuple(out)

    def barriers(self, place: _Place) -> list[Stmt]:
        """The barriers over agents at a place."""
        return [Op("barrier", "", (), (("scope", "ALL"),), agent=agent) for at, agent in sorted(self.drains)
                if at == place]
