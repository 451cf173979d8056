"""transfer: passes values between cores through workspaces. Only devices with cores (PTO) run it.

Cores that share no memory exchange values in workspaces of index "block" (channels). The producer stores a value after
computing it. The reader loads it before its first use. An operand that is itself a product takes the same way, because the
device cannot move it directly; a cast of a product can be moved. Of a value of which an op reads the last row, only this row is
loaded. Carried values belong to the first agent.

Example:
    before:  vector: a = exp(x)                           cube: y = a @ b
    after:   vector: a = exp(x); store a to a_channel     cube: a_in = load a_channel; y = a_in @ b
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...devices import Cores
from ...ir.body import Body
from ...ir.core import Kernel, Loop, Program, Stmt, Tile, loops, types
from ...ir.ops import OPS
from ...ir.types import Tensor
from ..common import dead_code, with_tensors
from ..stage import takes


@takes("assigned", gives="transferred")
def transfer(p: Program, device: Cores) -> Program:
    """`p` with a store and a load wherever a value crosses between agents."""
    made: dict[str, Tensor] = {}
    kernels = tuple(_Kernel(p, k, device, made).run() for k in p.kernels)
    return with_tensors(replace(p, kernels=kernels), *made.values())


class _Kernel:
    """One kernel whose agents share no memory. made: workspaces by name; new channels are added to it."""
    def __init__(self, p: Program, k: Kernel, device: Cores, made: dict[str, Tensor]) -> None:
        """Finds the agent of each value (`home`), and for each value the agents that read it through a workspace (`wanted`)."""
        self.p, self.k, self.device, self.made = p, k, device, made
        self.type = types(k.body)
        self.home = {o.out: o.agent for o in k.ops if o.out and not OPS[o.kind].number}
        self.home |= {o.out: device.agents[0] for o in k.ops if o.kind == "from_quarters"}
        for lp in loops(k.body):
            for c in lp.carried:
                self.home[c.name] = self.home[c.result] = device.agents[0]
        self.products = {o.out for o in k.ops if o.kind == "matmul"}
        self.wanted: dict[str, list[str]] = {}  # value -> agents that read it from memory
        for o in k.ops:
            for n, a in enumerate(o.args):
                if self.crosses(o.agent, a, o.kind == "matmul" and n < 2):
                    self.wanted.setdefault(a, []).append(o.agent)
        for lp in loops(k.body):
            for c in lp.carried:
                for a in (c.init, c.next):
                    if self.home[a] != device.agents[0]:
                        self.wanted.setdefault(a, []).append(device.agents[0])

    def crosses(self, agent: str, value: str, operand: bool) -> bool:
        """Whether `agent` reads `value` through a workspace. operand: whether a product reads it."""
        if value not in self.home:
            return False
        if self.home[value] != agent:
            return True
        return operand and value in self.products  # a cast of a product needs no channel

    def run(self) -> Kernel:
        """The kernel with its transfers."""
        b = Body({t.name: t for t in self.p.tensors} | self.made)
        b.taken = set(self.type)
        body = self.body(self.k.body, b, {})
        return replace(self.k, body=dead_code(body, set()))

    def workspace(self, b: Body, value: str) -> str:
        """The name of the channel of a value. It is created if needed."""
        t: Tile = self.type[value]
        name = f"{value}_channel"
        while name in b.tensors and b.tensors[name].tile != t:
            name += "_"
        b.tensors[name] = self.made[name] = Tensor(name, "workspace", "block", "HV", t.dims, t.dtype)
        return name

    def send(self, b: Body, value: str) -> None:
        """Store the value to its channel if another agent reads it."""
        if value in self.wanted:
            b.op("store", value, tensor=self.workspace(b, value), agent=self.home[value])

    def receive(self, b: Body, value: str, agent: str, got: dict[tuple[str, str], str]) -> str:
        """The value as `agent` has it: loaded from the channel at its first use. got: the loads so far."""
        key = (value, agent)
        if key not in got:
            got[key] = b.op("load", name=b.fresh(f"{value}_in"), tensor=self.workspace(b, value), agent=agent)
        return got[key]

    def body(self, body: tuple[Stmt, ...], b: Body, got: dict[tuple[str, str], str]) -> tuple[Stmt, ...]:
        """Rebuild a body. Values that another agent reads are stored after they are computed, and loaded before their first
        use.

        got: (value, agent) -> the name under which the agent has the value.
        """
        first = self.device.agents[0]
        for s in body:
            if isinstance(s, Loop):
                carried = tuple(replace(c, init=self.receive(b, c.init, first, got) if self.home[c.init] != first
                                        else c.init) for c in s.carried)
                inner = Body(b.tensors, {**b.types, **{c.name: c.type for c in carried}})
                inner.taken, inner.tensors = b.taken, b.tensors
                for c in carried:
                    self.send(inner, c.name)
                seen = dict(got)
                done = self.body(s.body, inner, seen)
                carried = tuple(replace(c, next=self.receive(inner, c.next, first, seen) if self.home[c.next] != first
                                        else c.next) for c in carried)
                b.stmts.append(replace(s, carried=carried, body=inner.finish() if done is not None else ()))
                b.types.update({c.result: c.type for c in carried})
                for c in carried:
                    self.send(b, c.result)
                continue
            if s.kind == "from_quarters":  # the agent that has the parts stores them; the first agent loads the whole
                tensor, size = self.workspace(b, s.out), self.type[s.args[0]].dims[0]
                assert isinstance(size, int)
                for a, row, col in zip(s.args, (0, 0, size, size), (0, size, 0, size), strict=True):
                    b.op("store", a, tensor=tensor, row=row, col=col, agent=s.agent)
                b.op("load", name=s.out, tensor=tensor, agent=first, line=s.line)
                continue
            part = OPS[s.kind].loaded
            if part and self.crosses(s.agent, s.args[0], False):  # the agent loads only what the op reads
                only: dict[str, Any] = {part: True}
                b.op("load", name=s.out, tensor=self.workspace(b, s.args[0]), agent=s.agent, line=s.line, **only)
                continue
            args = tuple(self.receive(b, a, s.agent, got) if self.crosses(s.agent, a, s.kind == "matmul" and n < 2) else a
                         for n, a in enumerate(s.args))
            b.copy(s.changed(args=args))
            if s.out:
                self.send(b, s.out)
        return b.finish()
