"""warp_groups: divides walks among the warp groups of a block. For Hopper under TileLang (sm_90a).

`assign` has given each op to the block. In a kernel that walks the chunks, an assignment (schedule/agents.py) gives each task to
an agent (`block_agents`) instead. Ops outside the walk belong to the agent of the state. The order of ops is topological
(walk_order.py).

How values cross between agents is in crossings.py. Products read their second operand from shared memory, and inverses read
theirs there. So a computed operand of these moves even if its reader computed it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from ...devices import Groups
from ...ir.body import Body
from ...ir.core import Kernel, Loop, Op, Program, walk
from ...ir.ops import OPS
from ...schedule.schedule import Schedule
from ..algebra.masks import masks
from ..common import dead_code, walks
from ..stage import takes
from ..storage.summed import SUMS, is_sum
from ..storage.turn_limits import OF_TURNS
from .behind_products import behind_products, two_at_once
from .block_agents import block_agents
from .by_columns import by_columns
from .crossings import Crossings
from .few_registers import few_registers
from .order import Cycle
from .outputs_early import carried_first, loads_ahead, outputs_early
from .tasks import INVERSE
from .walk_order import by_task, in_order


@takes("assigned")
def warp_groups(p: Program, s: Schedule, device: Groups) -> Program:
    """`p` in which each kernel that walks the chunks has several agents, and each of its ops has one of them. Passes for one
    agent leave such kernels as they are. Agents compute cheap tiles again (`few_registers`), so that an exponential may have one
    reader now, and `masks` has more pairs to replace.

    Raises ScheduleError if the schedule's assignment does not fit a kernel. The message names the values, or the registers and
    threads.
    """
    return masks(p.map_kernels(lambda k: _Assign(p, k, s, device).run() if walks(k) else k))


class _Assign(Crossings):
    """Places the ops of one kernel on agents."""

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
        if "tokens" in tasks.values():
            ops = few_registers(ops, s, self.tasks.sizes)
        ops = in_order(by_columns(ops, self.in_turns), tasks, self.state_agent, [a.name for a in self.plan.agents], self.in_turns)
        # These products were timed in neither: walks back, and walks with a task `tokens`, whose order is that of few_registers.
        if s.step < 0 or "tokens" in tasks.values():
            return tuple(ops)
        if {o.agent for o in ops if o.kind == "matmul"} != {self.state_agent}:
            # with one more such agent threads have fewer registers, and nvcc serialises products (C7512)
            return tuple(behind_products(ops, self.state_agent))
        fresh, agents = cache(inner.fresh), [a.name for a in self.plan.agents]

        def begun(ops: list[Op]) -> list[Op]:
            """The ops with products that begin before others have ended."""
            return two_at_once(behind_products(ops, self.state_agent), self.state_agent, {c.next for c in s.carried}, fresh)

        late = begun(ops)
        if not self.plan.outputs_early or not loads_ahead(ops, self.stages, self.tasks.sizes, self.device):
            return tuple(late)
        first = begun(carried_first(ops, self.state_agent, s.carried, agents))
        early = outputs_early(first, self.state_agent, s.carried, agents)
        return tuple(late if early is first else early)

    def op(self, o: Op, b: Body) -> None:
        """Rebuild an op for its agent, with operands as that agent reads them. ScheduleError for an op that warp groups cannot
        run."""
        agent, task = self.agent[o], self.tasks.of[o]
        sums = SUMS if self.plan.refined else ()
        known = ("load", "store", "matmul", INVERSE, *sums, *(OF_TURNS if agent in self.in_turns else ()))
        if o.kind not in known and not OPS[o.kind].elementwise and not OPS[o.kind].entry:
            raise self.error(f"{o.kind} ({o.out}, {o.line}) has no rule for warp groups; "
                             "let an earlier kernel compute it")
        if task == "store":
            self.store(o, agent, b)
            return
        if is_sum(o) and agent in self.in_turns:
            raise self.error(f"{o.kind} ({o.out}, {o.line}) has no rule for {agent}, whose warps run iterations in turn; let an "
                             "earlier kernel compute it")
        if is_sum(o):
            self.sum(o, agent, b)
            return
        args, attrs = self.operands(o, agent, b)
        b.op(o.kind, *args, name=o.out, line=o.line, agent=agent, **attrs)
        solvers = {self.agent[x] for x in self.tasks.inside if x.kind == INVERSE and o.out in x.args}
        if agent in self.in_turns and o.kind != "load":  # few tiles are in registers at once
            solvers |= {self.agent[x] for x in self.tasks.inside if o.out in x.args and x in self.agent}
        for x in solvers - {agent}:  # the move comes directly after the op, because an inverse takes long
            self.read(o.out, x, b)

    def store(self, o: Op, agent: str, b: Body) -> None:
        """Store a value: its agent moves it to shared memory, where an inverse is already, and `agent` copies it from there."""
        (a,) = o.args
        made = self.defs.get(a)
        if made is None or made not in self.agent or made.kind == "load":
            what = "a plain copy of a loaded value" if made in self.agent else "a value that no op of the loop computes"
            raise self.error(f"{o.attr('tensor')} is {what}; warp groups cannot store those; let an earlier kernel store it")
        if self.agent[made] == agent or made.kind == INVERSE:
            b.op("store", self.read(a, agent, b), agent=agent, line=o.line, **dict(o.attrs))
            return
        kind = "transpose" if o.attr("transposed") else "move"
        x = self.move(a, f"{a}_{self.device.operand}", self.agent[made], self.device.operand, b, kind)
        b.op("store", x, agent=agent, line=o.line, **{**dict(o.attrs), "transposed": None})
