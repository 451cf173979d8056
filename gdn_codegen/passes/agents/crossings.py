"""crossings: how values cross between the agents of a walk. `warp_groups` uses it.

Values cross through shared memory, by a move or by a transpose. An inverse and a sum are in shared memory already. A column or
row of a vector in shared memory is read from a fragment; columns and rows have one each. Warps that run iterations in turn
compute a vector there, before they read its columns or rows. A tile that is read transposed is loaded without transposition. Its
reader transposes it into a fragment and casts it. Where tiles of tokens have an agent of their own, products read such a tile as
it lies.
"""
from __future__ import annotations

from typing import Any

from ...devices import Groups
from ...ir.body import Body
from ...ir.core import NO_LINE, Kernel, Op, Program
from ...ir.ops import OPS
from ...ir.types import BYTES
from ...schedule.schedule import Schedule, ScheduleError
from ..storage.summed import SUMS
from .block_agents import assignment
from .tasks import INVERSE, Tasks, is_transposed

#: The rows of a tile that a warp holds.
ROWS_OF_WARP = 16
#: Ops whose results are in shared memory.
IN_SHARED = ("load", "diagonal", *SUMS)


class Crossings:
    """The ops of a kernel with their agents, and the names of values that agents read."""

    def __init__(self, p: Program, k: Kernel, s: Schedule, device: Groups) -> None:
        """Finds the assignment. ScheduleError if none fits."""
        self.p, self.k, self.device, self.where = p, k, device, f"{p.name}, kernel {k.name} on {device.name}"
        self.tasks, self.stages = Tasks(p, k, device.rows), s.stages
        self.loop, self.defs = self.tasks.loop, self.tasks.defs
        self.names: dict[tuple[str, ...], str] = {}  # (value, agent, view) -> the name that the agent reads
        self.plan = assignment(self.tasks, s, self.where)
        self.agent = {o: self.plan.agent_of[r] for o, r in self.tasks.of.items() if r in self.plan.agent_of}
        for o in (o for o in self.tasks.of if o not in self.agent):  # a store, by the agent that has the value
            made = self.defs.get(o.args[0])
            self.agent[o] = self.agent.get(made, self.plan.agent_of["state"]) if made else self.plan.agent_of["state"]
        self.state_agent = self.plan.agent_of["state"]
        self.numbers = {o.out for o in k.ops if o.type is not None and o.type.rank == 0}  # numbers, which all agents have
        self.in_turns = {a.name for a in self.plan.agents if a.in_turns}
        self.there = self._there()
        self.summed = set[str]()  # what running sums read, perhaps through expressions
        for o in reversed(self.tasks.inside):
            if o.kind == "cumsum" or (o.out in self.summed and (OPS[o.kind].elementwise or o.kind == "valid")):
                self.summed |= set(o.args)

    def error(self, text: str) -> ScheduleError:
        """The error that says where the kernel is."""
        return ScheduleError(f"{self.where}: {text}")

    def _there(self) -> set[str]:
        """The first operands that products read from shared memory: those that a product reads transposed, and where tiles of
        tokens have an agent of their own, what crosses to another agent anyway."""
        out = {o.args[0] for o in self.tasks.inside if o.kind == "matmul" and o.attr("ta")}
        if self.plan.refined:
            out |= {a for o in self.agent for a in o.args if a in self.defs and self.defs[a] in self.agent
                    and self.agent[self.defs[a]] != self.agent[o]}
        return out

    def operands(self, o: Op, agent: str, b: Body) -> tuple[list[str], dict[str, Any]]:
        """What `agent` reads for the operands of `o`, and the attributes of `o` for them."""
        attrs = {**dict(o.attrs), "transposed": None} if o.kind == "load" else dict(o.attrs)
        product, args = o.kind == "matmul", list[str]()
        as_they_lie = product and self.plan.refined
        for n, a in enumerate(o.args):
            if as_they_lie and n < 2 and is_transposed(self.defs.get(a)):
                side = ("ta", "tb")[n]
                attrs[side] = not attrs.get(side)
                args.append(a)
            else:
                from_shared = n == 1 or (n == 0 and a in self.there)
                shared = (product and from_shared and agent not in self.in_turns) or (o.kind == INVERSE and n == 0)
                args.append(self.read(a, agent, b, shared=shared))
        return args, attrs

    def sum(self, o: Op, agent: str, b: Body) -> None:
        """Append a sum. Each warp sums the columns of its rows, and the agent of vectors sums what warps have. The sum of a
        vector is the last of its running sums."""
        t, last, x = self.defs[o.args[0]].type, self.plan.agent_of["vectors"], self.read(o.args[0], agent, b)
        assert t is not None
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
        there = o in self.agent and (o.kind in IN_SHARED or self.tasks.of[o] == "inverse")  # in shared memory already
        shared = shared and o in self.agent and self.agent[o] == agent and not there
        key = (a, agent, "shared" if shared else view)
        if key in self.names:
            return self.names[key]
        if self.tasks.view(o):
            args = [self.read(x, agent, b, o.kind if o.kind in ("col", "row") else "") for x in o.args]
            out = b.op(o.kind, *args, line=o.line, agent=agent, **dict(o.attrs))
        else:
            out, maker = a, self.agent[o]
            each = bool(view) and agent in self.in_turns and OPS[o.kind].elementwise  # a lane computes each entry once
            if (maker != agent or shared or each) and (not there or a in self.numbers):
                space = self.device.operand
                out = self.names[a, "", ""] = self.names.get((a, "", "")) or self.move(a, f"{a}_{space}", maker, space, b)
            if is_transposed(o):
                out = self.move(a, f"{a}_T", agent, self.device.tile, b, "transpose")
            elif agent in self.in_turns and o.kind == "load" and self.narrow(a) and a not in self.summed:
                out = self.move(a, f"{a}_tile", agent, self.device.tile, b)
            elif view and maker != agent and agent not in self.in_turns and (agent == self.state_agent or not self.plan.refined):
                out = self.move(out, f"{a}_{view}", agent, self.device.tile, b)
        self.names[key] = out
        return out

    def narrow(self, a: str) -> bool:
        """Whether `a` is a tile of 16 bits."""
        t = self.defs[a].type
        return t is not None and t.rank == 2 and BYTES[t.dtype] == 2

    def move(self, a: str, name: str, agent: str, space: str, b: Body, kind: str = "move") -> str:
        """Append a move or a transpose of `a` to `space`, by `agent`."""
        line = next((o.line for o in self.tasks.inside if o.out == a), NO_LINE)
        return b.op(kind, a, name=b.fresh(name), line=line, agent=agent, space=space)
