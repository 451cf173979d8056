"""few_live: orders the ops of a kernel over chunks so that few tiles are live at once: list scheduling for little pressure on
registers and shared memory. `place` takes it where a multiprocessor has no room for two blocks otherwise.

The order is greedy: the next product, sum, move or store is the one after which the fewest bytes of tiles are live, in shared
memory and registers together. What it needs comes directly before it, so loads come late. `early_loads` moves them up again.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ...ir.core import Kernel, Op
from ...ir.ops import OPS
from ...ir.types import BYTES


def few_live(k: Kernel, sizes: Mapping[str, int]) -> Kernel:
    """`k`, whose body has no loop, in the greedy order. sizes: extents of dims."""
    return replace(k, body=tuple(_Greedy(k.ops, sizes).run()))


def most_live(k: Kernel, sizes: Mapping[str, int]) -> int:
    """The most bytes of tiles that are live at once in a body without a loop, in its order."""
    g, live, seen, most = _Greedy(k.ops, sizes), 0, set[str](), 0
    for o in (o for o in k.ops if o in g.needs):
        live += sum(g.bytes.get(n, 0) for n in {*g.needs[o], o.out} - seen)
        seen |= {*g.needs[o], o.out}
        most = max(most, live)
        for n in g.needs[o]:
            g.left[n] -= 1
        live -= sum(g.bytes.get(n, 0) for n in g.needs[o] if not g.left[n])
    return most


def late(k: Kernel, sizes: Mapping[str, int]) -> Kernel:
    """`k`, whose body has no loop, with its products, sums, moves and stores in their order, and what they need directly before
    them. sizes: extents of dims."""
    return replace(k, body=tuple(_Greedy(k.ops, sizes).in_order()))


def by_stores(k: Kernel) -> Kernel:
    """`k`, whose body has no loop, with its loads first, and then its stores, in their order, each after what it needs."""
    defs, done = {o.out: o for o in k.ops if o.out}, dict[Op, None]()
    for o in sorted((o for o in k.ops if not o.out or o.kind == "load"), key=lambda o: o.kind != "load"):
        _emit(o, defs, done)
    return replace(k, body=tuple(done))


def _emit(o: Op, defs: Mapping[str, Op], done: dict[Op, None]) -> None:
    """Append an op to `done` after its operands, once."""
    if o not in done:
        for a in o.args:
            _emit(defs[a], defs, done)
        done[o] = None


class _Greedy:
    """Ops in the order in which they are chosen. A step is an op that is chosen: any but loads, views and elementwise ops. A sum
    of two tiles is a step, too, because it frees both. It is none if both are made of the same tiles, as softplus adds them."""

    def __init__(self, ops: tuple[Op, ...], sizes: Mapping[str, int]) -> None:
        """ops: in any order that respects operands."""
        self.defs, self.done = {o.out: o for o in ops if o.out}, dict[Op, None]()
        self.needs = dict[Op, set[str]]()
        for o in ops:
            if self.step(o):
                self.needs[o] = self.needed(o.args)
        self.steps = list(self.needs)
        self.bytes = {o.out: prod(o.type.shape(dict(sizes))) * BYTES[o.type.dtype] for o in ops
                      if o.type is not None and o.type.rank == 2 and (o.kind == "load" or o in self.needs)}
        self.left: dict[str, int] = {}  # tile -> its readers that are still to come
        for n in (n for needs in self.needs.values() for n in needs):
            self.left[n] = self.left.get(n, 0) + 1

    def step(self, o: Op) -> bool:
        """Whether `o` is a step. Those before it are known (`needs`)."""
        if o.kind in ("add", "sub"):
            tiles = all((x := self.defs[a]).type is not None and x.type.rank == 2 and not OPS[x.kind].view for a in o.args)
            return tiles and self.needed(o.args[:1]) != self.needed(o.args[1:])
        return o.kind != "load" and not (o.out and (OPS[o.kind].elementwise or OPS[o.kind].view))

    def needed(self, values: Sequence[str]) -> set[str]:
        """The loads and results of steps of which values are made, directly or through other ops."""
        out, todo = set[str](), [*values]
        while todo:
            x = self.defs[todo.pop()]
            if x.kind == "load" or x in self.needs:
                out.add(x.out)
            else:
                todo += x.args
        return out

    def run(self) -> list[Op]:
        """All ops that steps need, ordered."""
        steps = list(self.steps)
        while steps:
            ready = [o for o in steps if all((x := self.defs[n]).kind == "load" or x in self.done for n in self.needs[o])]
            o = min(ready, key=self.growth)  # the first of equal ones
            steps.remove(o)
            for n in self.needs[o]:
                self.left[n] -= 1
            self.emit(o)
        return list(self.done)

    def in_order(self) -> list[Op]:
        """All ops that steps need, with the steps in their order."""
        for o in self.steps:
            self.emit(o)
        return list(self.done)

    def growth(self, o: Op) -> int:
        """By how many bytes the tiles that are live grow with `o`."""
        loaded = sum(self.bytes.get(n, 0) for n in self.needs[o] if self.defs[n] not in self.done)
        return loaded + self.bytes.get(o.out, 0) - sum(self.bytes.get(n, 0) for n in self.needs[o] if self.left[n] == 1)

    def emit(self, o: Op) -> None:
        """Append an op after its operands, once."""
        _emit(o, self.defs, self.done)
