"""products_end: where the asynchronous products of warp groups are known to have ended. `mbarriers` drains them there.

The products of an agent end in the order in which they began. So a wait for one of them is a wait for all before it. A product
that adds to another one, in the same registers, needs no wait for it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from ...ir.core import Op

#: A place for ops of synchronisation: "before" or "after" an op.
Place = tuple[str, Op]


class Ends:
    """The ends of the asynchronous products in the ops of an iteration.

    at: of each such product, the index of the op before which its agent waits for it: its own first reader, or, if that is
    earlier, the place where a later product ends. It is the number of ops if none of the iteration reads it.
    """

    def __init__(self, ops: Sequence[Op], read: Callable[[Op], Collection[str]]) -> None:
        """read: the values that an op reads."""
        self.ops, self.order = ops, {o: n for n, o in enumerate(ops)}
        self.at: dict[Op, int] = {}
        later = dict[str, int]()  # agent -> where its next asynchronous product ends
        for o in reversed([o for o in ops if o.attr("asynchronous")]):
            readers = [self.order[r] for r in ops if o.out in read(r) and not adds_in_place(r, o)]
            self.at[o] = later[o.agent] = min([*readers, later.get(o.agent, len(ops))])

    def over(self, o: Op) -> tuple[int, bool]:
        """When an op has read its operands, as a sort key: at its own place, or where it ends."""
        return (self.at[o], False) if o in self.at else (self.order[o], True)

    def place(self, o: Op, loop: Sequence[Op]) -> Place:
        """The place at which an op has read its operands. loop: the ops of its loop."""
        if o not in self.at:
            return "after", o
        if self.at[o] < len(self.ops):
            return "before", self.ops[self.at[o]]
        return "after", next(x for x in reversed(loop) if x.agent == o.agent and (x.buffer or not x.out))

    def end_late(self, agent: str) -> bool:
        """Whether products of an agent are under way after all else that it does in an iteration."""
        return any(x.agent == agent and end == len(self.ops) for x, end in self.at.items())

    def later_products(self, o: Op) -> int:
        """How many products the agent of `o` begins after `o` has read its operands."""
        return sum(self.order[x] >= self.over(o)[0] for x in self.ops if x.kind == "matmul" and x.agent == o.agent and x is not o)

    def drained(self, loop_of: Callable[[Op], Sequence[Op]]) -> Iterator[tuple[Place, list[Op], tuple[str, ...]]]:
        """For each place where an agent waits: the products that end there, and those that began before and end later. loop_of:
        gives the ops of an op's loop."""
        ending = dict[Place, list[Op]]()
        for o in reversed(self.at):
            ending.setdefault(self.place(o, loop_of(o)), []).append(o)
        for place, some in ending.items():
            end = self.at[some[0]]
            yield place, some, tuple(x.out for x in reversed(self.at)
                                     if x.agent == some[0].agent and self.order[x] < end < self.at[x])


def adds_in_place(o: Op, product: Op) -> bool:
    """Whether `o` is an asynchronous product that adds to `product`, of the same shape, in the same registers. Before buffers are
    assigned, both have none, and it is assumed. The checker has the same rule (prove/rings.py)."""
    return bool(o.attr("asynchronous")) and o.args[2:] == (product.out,) and (o.buffer, o.type) == (product.buffer, product.type)
