"""order: sorts ops so that each value comes before its readers."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ...ir.core import Loop, Op
from ...ir.ops import OPS
from ..storage.stored_values import is_view


class Cycle(ValueError):
    """Ops that cannot be ordered, because each needs another of them first. needs: the ops that each op still needs."""

    def __init__(self, needs: dict[Op, list[Op]]) -> None:
        self.needs = needs
        super().__init__("; ".join(f"{_name(o)} needs {', '.join(map(_name, first))}" for o, first in needs.items()))


def _name(o: Op) -> str:
    return o.out or o.kind


def topological(ops: Iterable[Op], needs: Callable[[Op], Collection[Op]]) -> list[Op]:
    """`ops` in an order in which each op comes after those of `needs(o)` that are in `ops`.

    Of several ops that could come next, the first in `ops` does. So ops that are in order keep their order. Raises Cycle if
    there is no such order.
    """
    left = list(ops)
    open_needs = {o: {x for x in needs(o) if x in left} for o in left}
    out: list[Op] = []
    while left:
        o = next((o for o in left if not open_needs[o]), None)
        if o is None:
            raise Cycle({o: [x for x in left if x in open_needs[o]] for o in left})
        left.remove(o)
        out.append(o)
        for x in open_needs.values():
            x.discard(o)
    return out


def needs_in_place(loop: Loop) -> Callable[[Op], set[Op]]:
    """A function that gives the ops which must come before an op of `loop`.

    These are the ops that compute its operands. For the next value of a carried value, they are also all readers of the present
    value, because the next value overwrites it.
    """
    ops = [o for o in loop.body if isinstance(o, Op)]
    defs = {o.out: o for o in ops if o.out}
    count: dict[str, int] = {}
    operands: set[str] = set()
    for o in ops:
        for n, a in enumerate(o.args):
            count[a] = count.get(a, 0) + 1
            if o.kind == "matmul" and n < 2:
                operands.add(a)

    def makers(a: str) -> set[Op]:
        """The op that computes `a`. If `a` is a view, also the ops that compute the values under it, as each reader makes its
        own view."""
        o = defs.get(a)
        return set() if o is None else {o} | ({x for y in o.args for x in makers(y)} if is_view(o) else set())

    def readers(name: str, new: str) -> set[Op]:
        """The ops that read the carried value `name`, directly or through expressions in them."""
        old, out = {name}, set()
        for o in ops:
            if o.out != new and old & set(o.args):
                out.add(o)
                if is_view(o) or (o.out and OPS[o.kind].elementwise and count.get(o.out) == 1 and o.out not in operands):
                    old.add(o.out)
        return out

    replaced: dict[str, set[Op]] = {}
    for c in loop.carried:
        if c.next in defs:
            replaced[c.next] = readers(c.name, c.next)
    return lambda o: {x for a in o.args for x in makers(a)} | replaced.get(o.out, set()) - {o}
