"""warp_groups: divides walks among the warp groups of a block. For Hopper under TileLang (sm_90a).

`assign` has given each op to the block. In a kernel that walks the chunks, an assignment (schedule/agents.py) gives each task to
an agent (`block_agents`) instead. Ops outside the walk belong to the agent of the state. The order of ops is topological
(walk_order.py).

Values cross between agents through shared memory, by a move or by a transpose. An inverse is in shared memory already. Products
read their second operand from shared memory, and inverses read theirs there. So a computed operand of these moves even if its
reader computed it. A column or row of a vector in shared memory is read from a fragment; columns and rows have one each. A tile
that is read transposed is loaded without transposition. Its reader transposes it into a fragment and casts it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...devices import Groups
from ...ir.body import Body
from ...ir.core import NO_LINE, Kernel, Loop, Op, Program, walk
from ...ir.ops import OPS
from ...schedule.schedule import Schedule, ScheduleError
from ..common import dead_code, walks
from ..stage import takes
from .block_agents import assignment, block_agents
from .few_registers import few_registers
from .order import Cycle
from .tasks import INVERSE, Tasks, is_transposed
from .walk_order import by_task, in_order

#: Ops whose results lie in shared memory, where all threads of an agent write them.
SUMS = ("row_sum", "column_sum", "cumsum")
#: The rows of a tile that a warp holds.
ROWS_OF_WARP = 16


@takes("assigned")
def warp_groups(p: Program, s: Schedule, device: Groups) -> Program:
    """`p` in which each kernel that walks the chunks has several agents, and each of its ops has one of them. Passes for one
    agent leave such kernels as they are.

    Raises ScheduleError if the schedule's assignment does not fit a kernel. The message names the values, or the registers and
    threads.
    """
    return p.map_kernels(lambda k: _Assign(p, k, s, device).run() if walks(k) else k)


class _Assign:
    """Places the ops of one kernel on agents."""
    def __init__(self, p: Program, k: Kernel, s: Schedule, device: Groups) -> None:
        self.p, self.k, self.device, self.where = p, k, device, f"{p.name}, kernel {k.name} on {device.name}"
        self.tasks = Tasks(p, k, device.rows)
        self.loop, self.defs = self.tasks.loop, self.tasks.defs
        self.names: dict[tuple[str, ...], str] = {}  # (value, agent, view) -> the name that the agent reads
        self.plan = assignment(self.tasks, s, self.where)
        self.agent = {o: self.plan.agent_of[r] for o, r in self.tasks.of.items() if r in self.plan.agent_of}
        self.agent |= {o: self.agent[self.defs[o.args[0]]] for o in self.tasks.of if o not in self.agent}  # stores
        self.turned = {o.args[0] for o in self.tasks.inside if o.kind == "matmul" and o.attr("ta")}  # not read from registers
        self.state_agent = self.plan.agent_of["state"]
        self.numbers = {o.out for o in k.ops if o.type is not None and o.type.rank == 0}  # numbers, which all agents have

    def error(self, text: str) -> ScheduleError:
        return ScheduleError(f"{self.where}: {text}")

    def run(self) -> Kernel:
        """The kernel with an agent for each op, and with copies of values that cross between agents. ScheduleError if no order
        of ops exists."""
        b = Body({t.name: t for t in self.p.tensors})
        b.taken = {o.out for o in self.k.ops if not self.tasks.view(o)}
        b.taken |= {x for c in self.loop.carried for x in (c.name, c.result)}
        try:
            for s in self.k.body:
                if isinstance(s, Loop):
                    b.stmts.append(replace(s, body=self.body(s, b)))
                    b.types.update({c.result: c.type for c in s.carried})
                else:
                    b.op(s.kind, *s.args, name=s.out, line=s.line, agent=self.state_agent, **dict(s.attrs))
        except Cycle as e:
            raise self.error(f"no order of its ops gives each agent its operands in time: {e}") from e
        body = b.finish()
        used = {o.agent for o in walk(body)}
        return replace(self.k, body=body, agents=block_agents(self.plan, self.tasks, self.device, used, self.where))

    def body(self, s: Loop, b: Body) -> tuple[Op | Loop, ...]:
        """The ops of the walk, each with its agent, in the order in which agents run them."""
        inner = Body(b.tensors, {**b.types, **{c.name: c.type for c in s.carried}})
        inner.taken = b.taken
        for o in by_task(self.tasks):
            self.op(o, inner)
        ops = [o for o in dead_code(inner.finish(), {c.next for c in s.carried}) if isinstance(o, Op)]
        tasks: Mapping[str, str] = {o.out: r for o, r in self.tasks.of.items() if o.out}
        with_products = {o.agent for o in ops if o.kind == "matmul"}
        if "tokens" in tasks.values() and len(with_products) > 1:
            for agent in sorted(with_products):
                own = few_registers(ops, agent, with_products - {agent}, s, self.tasks.sizes)
                ops = [o for o in ops if o.agent != agent] + own
        return tuple(in_order(ops, tasks, self.state_agent, [a.name for a in self.plan.agents]))

    def op(self, o: Op, b: Body) -> None:
        """Rebuild an op for its agent, with operands as that agent reads them. ScheduleError for an op that warp groups cannot
        run."""
        agent, task = self.agent[o], self.tasks.of[o]
        if o.kind not in ("load", "store", "matmul", INVERSE, *SUMS) and not OPS[o.kind].elementwise and not OPS[o.kind].entry:
            raise self.error(f"{o.kind} ({o.out}, {o.line}) has no rule for warp groups; "
                             "let an earlier kernel compute it")
        if task == "store":
            self.store(o, agent, b)
            return
        if o.kind in SUMS:
            self.sum(o, agent, b)
            return
        there = {"matmul": {1} | ({0} & {n for n, a in enumerate(o.args) if a in self.turned}), INVERSE: {0}}.get(o.kind, set())
        attrs = {**dict(o.attrs), "transposed": None} if task == "load" else dict(o.attrs)
        as_it_lies = {n for n in (0, 1) if o.kind == "matmul" and is_transposed(self.defs.get(o.args[n]))}
        attrs |= {side: not attrs.get(side) for n, side in enumerate(("ta", "tb")) if n in as_it_lies}  # products read both
        args = [a if n in as_it_lies else self.read(a, agent, b, shared=n in there) for n, a in enumerate(o.args)]
        b.op(o.kind, *args, name=o.out, line=o.line, agent=agent, **attrs)
        solvers = {self.agent[x] for x in self.tasks.inside if x.kind == INVERSE and o.out in x.args}
        for x in solvers - {agent}:  # the move comes directly after the op, because an inverse takes long
            self.read(o.out, x, b)

    def sum(self, o: Op, agent: str, b: Body) -> None:
        """Append a sum. Each warp sums the columns of its rows, and the agent of vectors sums what warps have. The sum of a
        vector is the last of its running sums."""
        t, last = self.defs[o.args[0]].type, self.plan.agent_of["vectors"]
        assert t is not None
        x = self.read(o.args[0], agent, b)
        if o.kind == "column_sum":
            parts = t.shape(self.tasks.sizes)[0] // ROWS_OF_WARP
            x = b.op("column_sum", x, name=b.fresh(f"{o.out}_parts"), line=o.line, agent=agent, parts=parts)
            b.op("column_sum", x, name=o.out, line=o.line, agent=last)
            self.agent[o] = last
        elif o.kind == "row_sum" and t.rank == 1:
            x = b.op("cumsum", x, name=b.fresh(f"{o.out}_sums"), line=o.line, agent=agent)
            b.op("last", x, name=o.out, line=o.line, agent=agent)
        else:
            b.op(o.kind, x, name=o.out, line=o.line, agent=agent, **dict(o.attrs))

    def store(self, o: Op, agent: str, b: Body) -> None:
        """Store a value: its agent moves it to shared memory, and `agent` copies it to global memory, unless it is that agent."""
        (a,) = o.args
        made = self.defs.get(a)
        if made is None or made not in self.agent or self.tasks.of[made] == "load":
            what = "a plain copy of a loaded value" if made in self.agent else "a value that no op of the loop computes"
            raise self.error(f"{o.attr('tensor')} is {what}; warp groups cannot store those; let an earlier kernel store it")
        if self.agent[made] == agent:
            b.op("store", self.read(a, agent, b), agent=agent, line=o.line, **dict(o.attrs))
            return
        kind = "transpose" if o.attr("transposed") else "move"
        x = self.move(a, f"{a}_{self.device.operand}", self.agent[made], self.device.operand, b, kind)
        b.op("store", x, agent=agent, line=o.line, **{**dict(o.attrs), "transposed": None})

    def read(self, a: str, agent: str, b: Body, view: str = "", shared: bool = False) -> str:
        """The name that `agent` reads for the value `a`.

        view: "col" or "row" if the reader is such a view. shared: whether the value has to be in shared memory.
        """
        o = self.defs.get(a)
        if o is None:
            if agent != self.state_agent and a not in self.numbers:
                raise self.error(f"{agent} reads {a}, which is carried or computed before the loop; "
                                 f"only {self.state_agent} has it")
            return a
        there = o in self.agent and (self.tasks.of[o] in ("load", "inverse") or o.kind in SUMS)  # in shared memory already
        shared = shared and o in self.agent and self.agent[o] == agent and not there
        key = (a, agent, "shared" if shared else view)
        if key in self.names:
            return self.names[key]
        if self.tasks.view(o):
            args = [self.read(x, agent, b, o.kind if o.kind in ("col", "row") else "") for x in o.args]
            out = b.op(o.kind, *args, line=o.line, agent=agent, **dict(o.attrs))
        else:
            out, maker = a, self.agent[o]
            if (maker != agent or shared) and (not there or o.type.rank == 0):
                space = self.device.operand
                out = self.names[a, "", ""] = self.names.get((a, "", "")) or self.move(a, f"{a}_{space}", maker, space, b)
            if is_transposed(o):
                out = self.move(a, f"{a}_T", agent, self.device.tile, b, "transpose")
            elif view and maker != agent and (agent == self.state_agent or not self.plan.refined):
                out = self.move(out, f"{a}_{view}", agent, self.device.tile, b)
        self.names[key] = out
        return out

    def move(self, a: str, name: str, agent: str, space: str, b: Body, kind: str = "move") -> str:
        """Append a move or a transpose of `a` to `space`, by `agent`."""
        line = next((o.line for o in self.tasks.inside if o.out == a), NO_LINE)
        return b.op(kind, a, name=b.fresh(name), line=line, agent=agent, space=space)
