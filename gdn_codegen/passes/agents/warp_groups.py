"""warp_groups: who computes each op, among warp groups.

Of a kernel that walks the chunks, what depends on a carried value and what stands outside the walk goes to the device's
`state`, loads to its `loader`, stores to tokens to its `store`, inverses and what is computed from them to `solve` (of
which `rings` takes inverses alone), all else to `aux`; a product that another accumulates onto goes where that one goes,
and a tile with the state's rows goes to `state` where it has more than one warp group holds.
Values cross by a move to shared memory, or a transpose on the way to memory; an inverse lies there by itself. A column or
row of a vector in shared memory is read from a fragment, one for columns and one for rows. A tile that is read transposed
is loaded as it lies; its reader transposes it into a fragment and widens it.

What leads to the next carried value comes first, since the next iteration waits for it; loads come in the order of need. In all
other respects the order is topological: a value stands before its readers.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...devices import Groups
from ...ir.builder import Body
from ...ir.core import Kernel, Loop, Op, Program, loops, walk
from ...ir.ops import OPS
from ...schedule.schedule import ScheduleError
from ..common import dead_code, walks
from ..stage import takes
from ..storage.place import VIEWS
from .order import Cycle, needs_in_place, topological

INVERSE = "diag_inverse"


@takes("decomposed", gives="assigned")
def warp_groups(p: Program, device: Groups) -> Program:
    """`p` with an agent on every op of the kernels that walk the chunks."""
    return p.map_kernels(lambda k: _Assign(p, k, device).run() if walks(p, k) else k)


def leads(ops: list[Op], kind: str) -> set[str]:
    """The values that lead to an op of that kind."""
    out: set[str] = set()
    for o in reversed(ops):
        if o.kind == kind or o.out in out:
            out |= set(o.args)
    return out


class _Assign:
    def __init__(self, p: Program, k: Kernel, device: Groups) -> None:
        self.p, self.k, self.device = p, k, device
        self.sizes = {**p.sizes, **k.sizes}
        (self.loop,) = loops(k.body)
        self.inside = list(walk(self.loop.body))
        self.defs = {o.out: o for o in self.inside if o.out}
        self.names: dict[tuple[str, ...], str] = {}  # what an agent, or an agent's view, reads for a value
        self.agent = self.agents()

    def transposed(self, a: str) -> bool:
        """Whether `a` is a tile that `loader` loads, to be read transposed."""
        o = self.defs.get(a)
        return o is not None and o.kind == "load" and bool(o.attr("transposed"))

    def view(self, o: Op) -> bool:
        """Whether each reader of `o` has its own."""
        return o.kind in VIEWS or (o.kind == "cast" and self.transposed(o.args[0]))

    def tall(self, o: Op) -> bool:
        """Whether `o` computes a tile with the rows of a carried value, which are more than one warp group holds."""
        if not o.out or o.kind == "load" or self.view(o) or o.type is None or o.type.rank != 2:
            return False
        carried = {c.type.dims[0] for c in self.loop.carried if c.type.rank == 2}
        return o.type.dims[0] in carried and o.type.shape(self.sizes)[0] > self.device.rows

    def agents(self) -> dict[Op, str]:
        d, out, carried = self.device, {}, {c.name for c in self.loop.carried}
        depends = set(carried)
        solved: set[str] = set()
        sums: dict[str, Op] = {}  # accumulator -> the product onto it
        for o in self.inside:
            if depends & set(o.args) or self.tall(o):
                depends.add(o.out)
            elif o.kind == INVERSE or solved & set(o.args):
                solved.add(o.out)
            if o.kind == "matmul" and len(o.args) == 3:
                sums[o.args[2]] = o
        for o in reversed(self.inside):
            if self.view(o):
                continue
            if o.kind == "load":
                out[o] = d.loader
            elif o.kind == "store" and self.p.tensor(o.attr("tensor")).index == "token":
                out[o] = d.store
            elif set(o.args) & depends or self.tall(o) or (o.kind == "matmul" and o.out in sums and out[sums[o.out]] == d.state):
                out[o] = d.state
            else:
                out[o] = d.solve if o.out in solved else d.aux
        return out

    def run(self) -> Kernel:
        b = Body({t.name: t for t in self.p.tensors})
        b.taken = {o.out for o in walk(self.k.body) if not self.view(o)}
        b.taken |= {x for c in self.loop.carried for x in (c.name, c.result)}
        for s in self.k.body:
            if isinstance(s, Loop):
                inner = Body(b.tensors, {**b.types, **{c.name: c.type for c in s.carried}})
                inner.taken = b.taken
                for o in self.order():
                    self.op(o, inner)
                body = dead_code(inner.finish(), {c.next for c in s.carried})
                b.stmts.append(replace(s, body=self.merged(self.by_need(self.begun(body)))))
                b.types.update({c.result: c.type for c in s.carried})
            else:
                b.op(s.kind, *s.args, name=s.out, line=s.line, agent=self.device.state, **dict(s.attrs))
        return replace(self.k, body=b.finish())

    def order(self) -> list[Op]:
        """Loads, what `aux` and `solve` compute, what leads to the next carried value or is made of the one that it replaces, the
        rest."""
        first = {c.next for c in self.loop.carried}
        first |= {o.out for o in self.inside if o.out and set(o.args) & {c.name for c in self.loop.carried}}
        for o in reversed(self.inside):
            if o.out in first:
                first |= set(o.args)
        d = self.device
        rank = {d.loader: 0, d.aux: 1, d.solve: 2, d.state: 3, d.store: 5}
        mine = [o for o in self.inside if o in self.agent]
        mine.sort(key=lambda o: rank[self.agent[o]] + (self.agent[o] == d.state and o.out not in first))
        return self.sorted(mine, needs_in_place(self.loop))

    def begun(self, body: tuple[Op | Loop, ...]) -> tuple[Op | Loop, ...]:
        """The body in which `aux` begins the products that lead to no inverse once it has computed what does, and reads them
        last: it moves and computes vectors meanwhile."""
        ops = [o for o in body if isinstance(o, Op)]
        early, aux = leads(ops, INVERSE), self.device.aux
        late = {o.out for o in ops if o.agent == aux and o.kind == "matmul" and o.out not in early}
        inverted = {a for o in ops if o.kind == INVERSE for a in o.args}
        given = next((o for o in ops if o.agent == aux and o.out in inverted), None)
        if given is None or not late:
            return body
        after: list[Op] = []  # what reads them
        rest: list[Op] = []
        reads = set(late)
        for o in ops:
            if o.out in late:
                continue
            if o.agent == aux and reads & set(o.args):
                reads.add(o.out)
                after.append(o)
            else:
                rest.append(o)
        last = max(n for n, o in enumerate(rest) if o.agent == aux) + 1
        rest[last:last] = after
        at = rest.index(given) + 1
        rest[at:at] = [o.with_attrs(asynchronous=True) for o in ops if o.out in late]
        return tuple(rest)

    def by_need(self, body: tuple[Op | Loop, ...]) -> tuple[Op | Loop, ...]:
        """The body with its loads in the order in which agents read them, those with the same readers together."""
        ops = [o for o in body if isinstance(o, Op)]
        place: dict[str, int] = {}
        first: dict[str, dict[str, int]] = {}
        for o in ops:
            at = place[o.agent] = place.get(o.agent, -1) + 1
            for a in o.args:
                first.setdefault(a, {}).setdefault(o.agent, at)
        loads = [o for o in ops if o.kind == "load"]

        early = leads(ops, INVERSE)

        def need(o: Op) -> tuple[bool, bool, int, tuple[str, ...], int]:
            """The place of the group of `o`: what inverses wait for, then those that `state` reads first, in its order."""
            readers = tuple(sorted(first[o.out]))
            agent = self.device.state if self.device.state in readers else readers[0]
            group = min(first[x.out][agent] for x in loads if tuple(sorted(first[x.out])) == readers)
            return o.out not in early, agent != self.device.state, group, readers, first[o.out][agent]
        return (*sorted(loads, key=need), *(o for o in ops if o.kind != "load"))

    def merged(self, body: tuple[Op | Loop, ...]) -> tuple[Op, ...]:
        """The body in an order in which each value stands before its readers; the ops of one agent stay in theirs."""
        ops = [o for o in body if isinstance(o, Op)]
        made = {o.out: o for o in ops if o.out}
        before: dict[Op, Op] = {}
        for agent in self.device.groups:
            mine = [o for o in ops if o.agent == agent]
            before |= dict(zip(mine[1:], mine, strict=False))
        return tuple(self.sorted(ops, lambda o: {made[a] for a in o.args if a in made} | ({before[o]} if o in before else set())))

    def sorted(self, ops: list[Op], needs: Callable[[Op], set[Op]]) -> list[Op]:
        try:
            return topological(ops, needs)
        except Cycle as e:
            raise self.error(f"no order of its ops serves all agents: {e}") from e

    def op(self, o: Op, b: Body) -> None:
        d, agent = self.device, self.agent[o]
        if o.kind not in ("load", "store", "matmul", "last", INVERSE) and not OPS[o.kind].elementwise:
            raise self.error(f"{o.kind} ({o.out}, line {o.line}) has no rule for warp groups; let an earlier kernel compute it")
        if o.kind == "store" and agent == d.store:
            (a,) = o.args
            maker = self.agent[self.defs[a]]
            transposed = o.attr("transposed")
            x = self.move(a, f"{a}_{d.operand}", maker, d.operand, b, "transpose" if transposed else "move")
            b.op("store", x, agent=agent, line=o.line, **{**dict(o.attrs), "transposed": None})
            return
        args = [self.read(a, agent, b) for a in o.args]
        attrs = {**dict(o.attrs), "transposed": None} if agent == d.loader else dict(o.attrs)
        b.op(o.kind, *args, name=o.out, line=o.line, agent=agent, **attrs)
        if agent == d.aux and any(o.out in x.args and self.agent.get(x) == d.solve for x in self.inside):
            self.read(o.out, d.solve, b)  # at once: `solve` has the longer way

    def read(self, a: str, agent: str, b: Body, view: str = "") -> str:
        """What `agent` reads for the value `a`, under a view of that kind."""
        o = self.defs.get(a)
        if o is None:
            return a
        key = (a, agent, view)
        if key in self.names:
            return self.names[key]
        if self.view(o):
            args = [self.read(x, agent, b, o.kind if o.kind in ("col", "row") else "") for x in o.args]
            out = b.op(o.kind, *args, line=o.line, agent=agent, **dict(o.attrs))
        else:
            out, maker, d = a, self.agent[o], self.device
            if maker not in (agent, d.loader):
                if (maker, agent) not in ((d.aux, d.state), (d.aux, d.solve), (d.solve, d.state)):
                    raise self.error(f"{a} would go from {maker} to {agent}")
                if o.kind != INVERSE:
                    there = self.names.get((a, "", ""))
                    out = self.names[a, "", ""] = there or self.move(a, f"{a}_{d.operand}", maker, d.operand, b)
            if self.transposed(a):
                out = self.move(a, f"{a}_T", agent, d.tile, b, "transpose")
            elif view and maker != agent:
                out = self.move(out, f"{a}_{view}", agent, d.tile, b)
        self.names[key] = out
        return out

    def move(self, a: str, name: str, agent: str, space: str, b: Body, kind: str = "move") -> str:
        line = next((o.line for o in self.inside if o.out == a), 0)
        return b.op(kind, a, name=b.fresh(name), line=line, agent=agent, space=space)

    def error(self, text: str) -> ScheduleError:
        return ScheduleError(f"{self.p.name}, kernel {self.k.name} on {self.device.name}: {text}")
