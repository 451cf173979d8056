"""assign: chooses the agent of each op. All targets run it. `warp_groups` then divides walks among Hopper's warp groups.

A device with one agent gives it all ops. On a device where only one agent can multiply (`Cores.runs`), that agent gets the
products, and the first agent gets all other ops, with these exceptions:
- A load that both agents read becomes two loads.
- A cast of a product stays with the product if a product or a store reads the cast.
- x + a @ b is an accumulating product if x is a product without later readers. If x belongs to the first agent, but its cast is
  an operand of some product anyway, x @ I starts the sum. Otherwise the first agent adds.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...devices import Cores, Device
from ...ir.body import Body
from ...ir.core import Kernel, Line, Op, Program, loops, map_ops, walk
from ...ir.types import Tensor
from ..common import rebuild_kernels, with_tensors
from ..stage import takes
from ..uses import readers


@takes("decomposed", gives="assigned")
def assign(p: Program, device: Device) -> Program:
    """`p` with an agent on every op."""
    if isinstance(device, Cores):
        made: dict[str, Tensor] = {}
        done = rebuild_kernels(p, lambda k: _Assign(k, device, made))
        return with_tensors(done, *made.values())
    agent = device.agents[0]
    return p.map_kernels(lambda k: replace(k, body=map_ops(k.body, lambda o: [o.changed(agent=agent)])))


class _Assign:
    """The rule for one kernel of a device whose products have an agent of their own."""

    def __init__(self, k: Kernel, device: Cores, made: dict[str, Tensor]) -> None:
        self.first, self.maker, self.made, self.blocked_dim = device.agents[0], device.runs["matmul"], made, k.blocked_dim
        self.readers = readers(k.body)
        self.last = {a: n for n, o in enumerate(k.ops) for a in o.args}  # value -> the place of its last reader
        self.kept = {x for lp in loops(k.body) for c in lp.carried for x in (c.init, c.next, c.name)}
        self.casts = {o.args[0]: o for o in k.ops if o.kind == "cast" and self.fed(o.out)}
        self.defs = {o.out: o for o in k.ops if o.out}
        self.products: set[str] = set()
        self.twin: dict[str, str] = {}  # value -> its copy with the agent that multiplies
        self.at = -1

    def fed(self, name: str) -> bool:
        """Whether `name` is an operand of a product, or has blocks that are."""
        return any((o.kind == "matmul" and i < 2) or (o.kind == "blocks" and self.fed(o.out))
                   for o, i in self.readers.get(name, []))

    def inserted(self, name: str) -> bool:
        """Whether blocks are put into `name`."""
        return any(o.kind == "insert" and i == 0 for o, i in self.readers.get(name, []))

    def else_read(self, name: str) -> bool:
        """Whether something other than a product's operand reads `name`."""
        return name in self.kept or any(not (o.kind == "blocks" or (o.kind == "matmul" and i < 2))
                                        for o, i in self.readers.get(name, []))

    def __call__(self, o: Op, b: Body) -> str | None:
        """Copies `o` for its agent: once, or twice if both agents need its value. Returns the name of its value, "" for a
        store."""
        self.at += 1
        first, maker = self.first, self.maker

        def copy(agent: str, name: str = o.out, **attrs: object) -> str:
            return b.op(o.kind, *o.args, name=name, line=o.line, agent=agent, **{**dict(o.attrs), **attrs})

        if o.kind == "matmul":
            self.products.add(o.out)
            return self.product(o, b)
        if o.kind == "load" and self.fed(o.out):
            if not self.else_read(o.out):
                self.twin[o.out] = o.out
                return copy(maker)
            self.twin[o.out] = copy(maker, b.fresh(f"{o.out}_{maker}"))
            return copy(first)
        if o.kind == "blocks" and o.args[0] in self.twin:
            return b.op(o.kind, self.twin[o.args[0]], name=o.out, line=o.line, agent=maker, **dict(o.attrs))
        if o.kind in ("block", "blocks", "insert", "from_quarters") or (o.kind == "full" and self.inserted(o.out)):
            return copy(maker)
        if o.kind == "cast" and o.args[0] in self.products:
            if self.fed(o.out):
                self.twin[o.out] = copy(maker)
            others = [r for r in self.readers.get(o.out, []) if r[0].kind not in ("matmul", "store") or
                      (r[0].kind == "matmul" and r[1] == 2)]
            if others or o.out in self.kept:
                return copy(first, b.fresh(o.out) if o.out in self.twin else o.out)
            return self.twin.get(o.out) or copy(maker)
        if o.kind == "store":
            source = next((x for x in walk(b.finish()) if x.out == o.args[0]), None)
            made_there = source is not None and (source.out in self.products or source.agent == maker) \
                and source.kind != "from_quarters"  # the first agent loads it
            value = o.args[0]
            if o.attr("transposed"):  # the first agent transposes
                made_there = False
            elif source is not None and source.kind == "cast" and source.args[0] in self.products:
                made_there = True
                if self.fed(value):  # this cast is part of the store, separate from the operand's cast
                    value = b.op("cast", *source.args, name=b.fresh(value), line=o.line, agent=maker, **dict(source.attrs))
            b.op("store", value, line=o.line, agent=maker if made_there else first, **dict(o.attrs))
            return ""
        return copy(first)

    def product(self, o: Op, b: Body) -> str:
        """The value of a product `o`.

        The agent of products adds onto an accumulator only if it computed the accumulator, or can compute it from an operand
        that it has. Otherwise the sum is an op of the first agent.
        """
        left, right = (self.twin.get(a, a) for a in o.args[:2])

        def matmul(*args: str, name: str = "", **attrs: Any) -> str:
            out = b.op("matmul", *args, name=name, line=o.line, agent=self.maker, **attrs)
            self.products.add(out)
            return out

        if len(o.args) == 2:
            return matmul(left, right, name=o.out, **dict(o.attrs))
        x = o.args[2]
        if x in self.products:
            if x not in self.kept and self.last[x] <= self.at:
                return matmul(left, right, x, name=o.out, **dict(o.attrs))
        elif x not in self.kept:
            source = self.defs[x]
            exact = source.kind == "cast" and self.fed(source.args[0])  # x is an operand, cast to a wider dtype
            image = source.args[0] if exact else x if self.fed(x) else self.casts[x].out if x in self.casts else ""
            if image in b.types and b.types[image].dims[1] != self.blocked_dim:  # it exists already, and has as many columns as I
                start = matmul(self.twin.get(image, image), self.identity(b, image, o.line))
                return matmul(left, right, start, name=o.out, **dict(o.attrs))
        part = matmul(left, right, name=b.fresh(f"{o.out}_part"), **dict(o.attrs))
        self.products.discard(o.out)
        return b.op("add", x, part, name=o.out, line=o.line, agent=self.first)

    def identity(self, b: Body, x: str, line: Line) -> str:
        """Load an identity matrix I for the product x @ I."""
        t = b.types[x]
        name = f"identity_{t.dtype}_{t.dims[1]}"
        b.tensors[name] = self.made[name] = Tensor(name, "workspace", "const", "HV", (t.dims[1],) * 2, t.dtype,
                                                   fill="eye 1.0 0.0")
        return b.op("load", name=b.fresh("identity"), tensor=name, line=line, agent=self.maker)
