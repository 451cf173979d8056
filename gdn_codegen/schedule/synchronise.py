"""synchronise: derives every wait. Requires stage "placed"; produces stage "synchronised".

Two ops that touch the same bytes, one of them writing, must run in program order. Where the pipes and the waits so far
do not see to it, a signal goes after the first and a wait before the second:
- in the innermost body that holds both; an op inside a loop is represented there by its loop;
- where the second is in a later turn of a loop than the first, the wait takes the signal of the turn before: one signal
  before the loop primes it, one wait after the loop takes the last;
- ops of one unordered pipe are parted by a barrier.
The latest of several sources is waited for first, since it often covers the others (vector clocks, `machine`).

Within an agent a signal goes from pipe to pipe by an event id. Between agents it goes from a pipe to an agent, whose
issuer waits, through a counter. Ids are shared only where a set is sure to come after the wait before it; where no id is
free, a barrier over the agent makes one. On a device of one agent, whose compiler orders memory, nothing is inserted.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..devices import Cores, Device
from ..ir.core import Kernel, Loop, Op, Program, Stmt
from .machine import Access, Clocks, Path, Step, Turn, accesses, pipe_of, trace
from .schedule import ScheduleError

#: Where signals stand: "after" a statement, or primed "before" a loop.
_Place = tuple[str, Path]
#: Turns that show every kind of neighbour: two turns, none, one.
TRIPS = {"item": [4], "chunk": [2, 2, 0, 1]}


def synchronise(p: Program, device: Device) -> Program:
    """`p` with signals, waits and barriers."""
    if not isinstance(device, Cores):
        return replace(p, stage="synchronised")
    return replace(p, stage="synchronised", kernels=tuple(_kernel(p, k, device) for k in p.kernels))


def _kernel(p: Program, k: Kernel, device: Cores) -> Kernel:
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
    """One signal with its wait, as places in the program. turn: the loop whose next turn waits, or None."""

    src: int  # pipe that signals
    dst: int  # pipe that waits
    signal: Path  # after this statement
    wait: Path  # before this statement
    turn: Path | None
    why: str
    crosses: bool
    id: int = -1
    queue: list[list[int]] = field(default_factory=list)
    sets: list[tuple[int, list[int], _Place]] = field(default_factory=list)  # time, what the signaller knew, place
    waits: list[tuple[int, int]] = field(default_factory=list)  # time, number on the waiting pipe


@dataclass(frozen=True)
class _Record:
    access: Access
    pipe: int
    number: int
    time: int
    step: Step


class _Derive:
    def __init__(self, p: Program, k: Kernel, device: Cores, drains: set[tuple[_Place, str]]) -> None:
        self.p, self.k, self.device, self.drains = p, k, device, drains
        self.access = accesses(p, k, device)
        self.pairs: list[_Pair] = []
        self.parted: set[Path] = set()  # ops with a barrier of their pipe before them
        self.places()

    def places(self) -> None:
        """Which pairs act where."""
        self.after: dict[Path, list[_Pair]] = {}
        self.before: dict[Path, list[_Pair]] = {}
        self.primed: dict[Path, list[_Pair]] = {}
        for x in self.pairs:
            self.file(x)

    def file(self, x: _Pair) -> None:
        self.after.setdefault(x.signal, []).append(x)
        self.before.setdefault(x.wait, []).append(x)
        if x.turn is not None:
            self.primed.setdefault(x.turn, []).append(x)

    def run(self) -> None:
        while self.once():
            pass

    def once(self) -> bool:
        """Walk the unrolled kernel; True if a pair or a barrier was added."""
        self.clocks = c = Clocks(self.device)
        self.records: dict[str, list[_Record]] = {}
        self.saved: dict[tuple[int, int], list[int]] = {}
        self.time = 0
        self.loops: dict[Path, tuple[int, list[int]]] = {}
        for x in self.pairs:
            x.queue, x.sets, x.waits = [], [], []
        added = False
        entered: set[tuple[Path, Turn]] = set()
        for step in trace(self.k, TRIPS):
            for depth in range(1, len(step.path) + (step.op is None)):  # loops met on the way: their waits and primes
                loop, turn = step.path[:depth], step.turn[:depth - 1]
                if (loop, turn) not in entered:
                    entered.add((loop, turn))
                    self.wait_before(loop)
                    self.drain(("before", loop))
                    for x in self.primed.get(loop, []):
                        self.signal(x, ("before", loop))
            if step.op is None:
                for x in self.primed.get(step.path, []):
                    self.wait(x)
                self.signal_after(step.path)
                continue
            self.wait_before(step.path)
            pipe = pipe_of(self.device, step.op)
            if pipe is not None:
                i = c.number[pipe]
                added = self.order(step, i) or added
                n = c.run(i)
                self.time += 1
                self.saved[i, n] = c.snapshot(i)
                for a in self.access[id(step.op)]:
                    self.records.setdefault(a.space, []).append(_Record(a, i, n, self.time, step))
            self.signal_after(step.path)
        return added

    def drain(self, place: _Place) -> None:
        for at, agent in self.drains:
            if at == place:
                self.clocks.drain(agent)

    def wait_before(self, path: Path) -> None:
        for x in self.before.get(path, []):
            self.wait(x)
        if path in self.parted:
            for i in self.clocks.loose:
                self.clocks.barrier(i)

    def signal_after(self, path: Path) -> None:
        self.drain(("after", path))
        for x in self.after.get(path, []):
            self.signal(x, ("after", path))

    def signal(self, x: _Pair, place: _Place) -> None:
        self.time += 1
        x.sets.append((self.time, list(self.clocks.start(x.src)), place))
        x.queue.append(self.clocks.snapshot(x.src))

    def wait(self, x: _Pair) -> None:
        self.time += 1
        self.clocks.start(x.dst)
        if x.queue:
            self.clocks.learn(x.dst, x.queue.pop(0))
        x.waits.append((self.time, self.clocks.run(x.dst)))

    # --- order -------------------------------------------------------------------------------------------------------
    def order(self, step: Step, i: int) -> bool:
        """Make every earlier conflicting op known to pipe `i`, which is about to run `step`."""
        c, added = self.clocks, False
        assert step.op is not None
        while True:
            known = c.start(i)
            open_: _Record | None = None
            for a in self.access[id(step.op)]:
                keep = []
                for r in self.records.get(a.space, []):
                    if r.access.meets(a) and known[r.pipe] < r.number and (open_ is None or r.time > open_.time):
                        open_ = r
                    if not (a.write and a.low <= r.access.low and r.access.high <= a.high and known[r.pipe] >= r.number):
                        keep.append(r)
                self.records[a.space] = keep
            if open_ is None:
                return added
            self.add(open_, step, i)
            added = True

    def add(self, r: _Record, step: Step, i: int) -> None:
        c = self.clocks
        if r.pipe == i:
            self.parted.add(step.path)
            c.barrier(i)
            return
        depth = 0  # the innermost body that holds both
        x, y = r.step.path, step.path
        turn: Path | None = None
        while x[depth] == y[depth] and depth < len(x) - 1 and depth < len(y) - 1:
            if r.step.turn[depth] != step.turn[depth]:
                turn = x[:depth + 1]  # from turn to turn of this loop
                depth += 1
                break
            depth += 1
        crosses = c.names[r.pipe][0] != c.names[i][0]
        dst = c.boss[i] if crosses else i
        signal, wait = x[:depth + 1], y[:depth + 1]
        pair = _Pair(r.pipe, dst, signal, wait, turn, f"{r.access.value} -> {step.op.out or step.op.kind}"
                     if step.op else "", crosses)
        self.pairs.append(pair)
        self.file(pair)
        # Its earlier turns did not happen in this walk: join what the signal would have said. The next walk does it all.
        last = r.number
        if len(signal) < len(x):
            last = max(q.number for v in self.records.values() for q in v if q.pipe == r.pipe and
                       q.step.path[:len(signal)] == signal) if self.records else r.number
        c.learn(dst, self.saved[r.pipe, last])
        c.start(i)

    # --- ids ---------------------------------------------------------------------------------------------------------
    def number(self) -> tuple[_Place, str] | None:
        """Give every pair an id; or say where a barrier over which agent is needed for that."""
        c = self.clocks
        lanes: dict[tuple[int, int], list[_Pair]] = {}
        counters: dict[tuple[object, ...], int] = {}
        for x in self.pairs:
            if x.crosses:
                key = (x.src, x.dst) if x.turn is None else (id(x),)
                x.id = counters.setdefault(key, len(counters))
                if x.id >= self.device.flags:
                    raise ScheduleError(f"{self.p.name}, kernel {self.k.name}: more than {self.device.flags} flags "
                                        "between agents")
            else:
                lanes.setdefault((x.src, x.dst), []).append(x)
        for (_, dst), pairs in lanes.items():
            used: list[list[_Pair]] = [[] for _ in range(self.device.events)]
            for x in sorted(pairs, key=lambda x: x.sets[0][0]):
                clash: _Place | None = None
                for e in sorted(range(self.device.events), key=lambda e: (len(used[e]), e)):
                    clash = self.clash([*used[e], x], dst)
                    if clash is None:
                        used[e].append(x)
                        x.id = e
                        break
                if x.id < 0:
                    assert clash is not None
                    return clash, c.names[x.src][0]
        return None

    def clash(self, pairs: list[_Pair], dst: int) -> _Place | None:
        """Where a set may come before the wait of the set before it."""
        events = sorted([(t, 0, known, place) for x in pairs for t, known, place in x.sets]
                        + [(t, 1, n, ("", ())) for x in pairs for t, n in x.waits], key=lambda e: e[0])
        waited, open_ = 0, 0
        for _, is_wait, what, place in events:
            if is_wait:
                waited, open_ = what, open_ - 1  # type: ignore[assignment]
            else:
                if open_ or what[dst] < waited:  # type: ignore[index]
                    return place
                open_ += 1
        return None

    # --- text --------------------------------------------------------------------------------------------------------
    def op(self, kind: str, x: _Pair) -> Op:
        src, dst = self.clocks.names[x.src], self.clocks.names[x.dst]
        attrs = {"channel": self.pairs.index(x), "id": x.id, "src": src[1], "dst": dst[0] if x.crosses else dst[1],
                 "why": x.why}
        if x.crosses:
            attrs["src"] = f"{src[0]}.{src[1]}"
        return Op(kind, "", (), tuple(sorted(attrs.items())), agent=(src if kind == "signal" else dst)[0])

    def insert(self, body: tuple[Stmt, ...], path: Path) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for i, s in enumerate(body):
            at = (*path, i)
            out += [self.op("wait", x) for x in self.before.get(at, [])]
            if at in self.parted:
                assert isinstance(s, Op)
                pipe = pipe_of(self.device, s)
                assert pipe is not None
                out.append(Op("barrier", "", (), (("scope", pipe[1]),), agent=s.agent))
            if isinstance(s, Loop):
                out += self.barriers(("before", at))
                out += [self.op("signal", x) for x in self.primed.get(at, [])]
                out.append(replace(s, body=self.insert(s.body, at)))
                out += [self.op("wait", x) for x in self.primed.get(at, [])]
            else:
                out.append(s)
            out += self.barriers(("after", at))
            out += [self.op("signal", x) for x in self.after.get(at, [])]
        return tuple(out)

    def barriers(self, place: _Place) -> list[Stmt]:
        return [Op("barrier", "", (), (("scope", "ALL"),), agent=agent) for at, agent in sorted(self.drains)
                if at == place]
