"""few_registers: orders the ops of an agent so that few tiles are in registers at once. For Hopper's warp groups, where the
ops of a walk have several agents with products.

First come ops that need nothing of another agent with products, then those that need its first value, and so on. An op whose
value only later ones read comes with them. Within each of these groups the order is greedy: the next product, sum, move or
store is the one after which the fewest bytes of tiles are in registers. What it needs comes directly before it.

Products of an agent that computes no next carried value are asynchronous: it waits for one where it reads it.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from ...ir.core import Loop, Op
from ...ir.ops import OPS
from ...ir.types import BYTES
from ...schedule.schedule import ScheduleError
from ..storage.stored_values import is_view


def few_registers(ops: list[Op], loop: Loop, sizes: Mapping[str, int]) -> list[Op]:
    """The ops of a walk, each with its agent, with those of agents with products in this order, if there are several such agents.
    ops: in an order that respects operands. sizes: extents of dims."""
    with_products, next_values = {o.agent for o in ops if o.kind == "matmul"}, {c.next for c in loop.carried}
    for agent in sorted(with_products) if len(with_products) > 1 else ():
        own = _Order(ops, agent, with_products - {agent}, loop, dict(sizes)).run()
        if not any(o.out in next_values for o in own):
            own = [o.with_attrs(asynchronous=True) if o.kind == "matmul" else o for o in own]
        ops = [o for o in ops if o.agent != agent] + own
    return ops


class _Order:
    """Ops in the order in which they are chosen. A step is an op that is chosen: any but loads, views, vectors in registers and
    elementwise ops that are expressions in their readers."""

    def __init__(self, ops: list[Op], agent: str, others: Collection[str], loop: Loop, sizes: dict[str, int]) -> None:
        """Finds what each step needs, the bytes of its value in registers, its level, and whether others wait for it."""
        self.mine = [o for o in ops if o.agent == agent]
        self.defs = {o.out: o for o in self.mine if o.out}
        self.readers: dict[str, list[Op]] = {}
        for o in self.mine:
            for a in o.args:
                self.readers.setdefault(a, []).append(o)
        carried, self.next = {c.name: c.type for c in loop.carried}, {c.next: c.name for c in loop.carried}
        self.steps = [o for o in self.mine if self.step(o)]
        self.needs = {o: self.needed(o, set(carried)) for o in self.steps}
        held = {**carried, **{o.out: o.type for o in self.steps if o.type is not None and o.attr("space") != "shared"}}
        self.bytes = {n: prod(t.shape(sizes)) * BYTES[t.dtype] for n, t in held.items() if t.rank == 2 and 1 not in t.dims}
        self.left: dict[str, int] = {}
        for n in (n for needs in self.needs.values() for n in needs):
            self.left[n] = self.left.get(n, 0) + 1
        self.before = {o: self.overwrites(o, carried) for o in self.steps}
        self.urgent = {c.next for c in loop.carried} | {a for o in ops if o.agent in others for a in o.args}
        for o in reversed(self.mine):
            self.urgent |= set(o.args) if o.out in self.urgent else set()
        self.level = self.levels({o.out for o in ops if o.agent in others})
        self.done = set[Op]()
        self.out: list[Op] = []
        self.names: dict[tuple[str, bool], str] = {}  # value, level -> the name that readers of this level use

    def step(self, o: Op) -> bool:
        """Whether `o` is a step."""
        if o.attr("space") == "fragment":
            return False
        if not o.out or not (OPS[o.kind].elementwise or is_view(o) or OPS[o.kind].entry):
            return True
        read = self.readers.get(o.out, [])
        operand = len(read) > 1 and any(r.kind in ("matmul", "move", "transpose") and o.out in r.args[:2] for r in read)
        return o.out in self.next or (o.type is not None and o.type.rank == 2 and 1 not in o.type.dims and operand)

    def needed(self, o: Op, carried: Collection[str]) -> set[str]:
        """The results of steps and the carried values that `o` reads, directly or through other ops."""
        out, todo = set[str](), [*o.args]
        while todo:
            a = todo.pop()
            x = self.defs.get(a)
            if a in carried or (x is not None and self.step(x)):
                out.add(a)
            elif x is not None:
                todo += x.args
        return out

    def overwrites(self, o: Op, carried: Collection[str]) -> list[Op]:
        """The steps that read a carried value before `o` takes its registers: its next value, or a product onto a multiple."""
        onto = {self.next[o.out]} if o.out in self.next else set[str]()
        onto |= self.needs[o] & set(carried) if o.kind == "matmul" and o.args[2:] else set()
        return [x for x in self.steps if self.needs[x] & onto and x is not o]

    def levels(self, foreign: Collection[str]) -> dict[Op, bool]:
        """Whether a step needs a value of others, or all its readers do and nobody waits for it. foreign: values of others."""
        waits: set[str] = set(foreign)
        level: dict[Op, bool] = {}
        for o in self.mine:
            level[o] = bool(waits & set(o.args))
            waits |= {o.out} if level[o] else set()
        for o in reversed(self.steps):
            after = [level[r] for r in self.steps if o.out in self.needs[r]]
            level[o] |= o.out in self.bytes and o.out not in self.urgent and bool(after) and all(after)
        return level

    def run(self) -> list[Op]:
        """All ops, ordered."""
        steps = list(self.steps)
        while steps:
            ready = [o for o in steps if all(n not in self.defs or self.defs[n] in self.done for n in self.needs[o])
                     and all(x in self.done for x in self.before[o])]
            if not ready:
                left = ", ".join(o.out or o.kind for o in steps)
                raise ScheduleError(f"agents: {left} would be read after others took their registers; accepted: a schedule in "
                                    "which one agent has all products")
            o = min(ready, key=lambda o: (self.level[o], o.out not in self.urgent, self.growth(o), o.out in self.bytes))
            steps.remove(o)
            for n in self.needs[o]:
                self.left[n] -= 1
            self.emit(o, self.level[o])
        return self.out

    def growth(self, o: Op) -> int:
        """By how many bytes the tiles in registers grow with `o`."""
        return self.bytes.get(o.out, 0) - sum(self.bytes.get(n, 0) for n in self.needs[o] if self.left[n] == 1)

    def emit(self, o: Op, level: bool) -> str:
        """Append an op after its operands, once, or once for each level if that is cheap. Returns the name of its value."""
        again = level and o in self.done and self.cheap(o)
        if (o.out, again) in self.names and o.out:
            return self.names[o.out, again]
        args = tuple(self.emit(self.defs[a], level) if a in self.defs else a for a in o.args)
        name = f"{o.out}_again" if again else o.out
        self.done.add(o)
        self.names[o.out, again] = name
        self.out.append(o.changed(out=name, args=args))
        return name

    def cheap(self, o: Op) -> bool:
        """Whether `o` is a tile that elementwise ops compute from vectors."""
        t, made = o.type, [self.defs.get(a) for a in o.args]
        return (OPS[o.kind].elementwise and t is not None and t.rank == 2 and 1 not in t.dims and bool(made)
                and all(x is not None and x.type is not None and (1 in x.type.dims or self.cheap(x)) for x in made))
