"""dependences: which ops of a run must come before an op, for `list_scheduling` and `depth_first`.

These are the ops that compute its operands, and accesses to the same tensor of which one is a store. An op that works in place
comes after all other readers of the value that it overwrites. Moves that feed a product directly precede it.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ...ir.core import Op, Stmt
from ..storage.core_values import IN_PLACE, is_view


class Dependences:
    """The dependences of a run of ops, by their numbers in it.

    next_of: the next value of a carried value -> the carried value, whose storage it overwrites. rounded: casts without
    storage. feeds: the spaces of a product's operands.

    after: the ops that must come before each op. before: the same, and what must come before the moves that directly precede
    the op. feeding: the moves of each product. readers: value with storage -> the ops that read it.
    """

    def __init__(self, ops: list[Op], next_of: dict[str, str], rounded: Collection[str], feeds: Collection[str]) -> None:
        """Finds, op by op, what must come before: definitions of operands, accesses to a tensor, reads of overwritten storage."""
        self.ops = ops
        self.after: list[set[int]] = [set() for _ in ops]
        self.readers: dict[str, set[int]] = {}
        self._root: dict[str, str] = {}  # value -> the value whose storage holds it
        here = {o.out: n for n, o in enumerate(ops) if o.out}
        touched: dict[str, list[int]] = {}
        for n, o in enumerate(ops):
            self.after[n] |= {here[a] for a in o.args if a in here}
            if o.kind in ("load", "store"):
                others = touched.setdefault(o.attr("tensor"), [])
                self.after[n] |= {m for m in others if "store" in (o.kind, ops[m].kind)}
                others.append(n)
            grown = o.kind == "matmul" and len(o.args) == 3
            target = o.args[0] if o.kind in IN_PLACE else o.args[2] if grown else next_of.get(o.out, "")
            if target:
                self.after[n] |= self.readers.get(self.storage(target), set()) - {n}
            if o.out and o.args and (is_view(o) or o.kind in IN_PLACE or o.out in rounded or grown):
                self._root[o.out] = self.storage(o.args[2 if grown else 0])
            for a in o.args:
                self.readers.setdefault(self.storage(a), set()).add(n)
        moves = {n for n, o in enumerate(ops) if o.kind == "move" and o.attr("space") in feeds}
        self.feeding = {n: sorted(moves & self.after[n]) for n, o in enumerate(ops) if o.kind == "matmul"}
        self.before = [s.union(*(self.after[m] for m in self.feeding.get(n, ()))) - set(self.feeding.get(n, ()))
                       for n, s in enumerate(self.after)]

    def storage(self, a: str) -> str:
        """The value whose storage holds `a`."""
        return self._root.get(a, a)

    def ways(self, cost: list[float]) -> list[float]:
        """For each op, the longest sum of costs on a path from it to the end."""
        out = [0.0] * len(self.ops)
        for n in reversed(range(len(self.ops))):
            out[n] += cost[n]
            for m in self.after[n]:
                out[m] = max(out[m], out[n])
        return out


def by_runs(body: tuple[Stmt, ...], order: Callable[[list[Op], dict[str, str]], Iterable[Op]],
            next_of: dict[str, str] | None = None) -> tuple[Stmt, ...]:
    """The body with each run of ops between loops in another order, and so the bodies of its loops.

    order: (ops of a run, the next value of a carried value -> the carried value) -> these ops. next_of: of the body's own loop.
    """
    out: list[Stmt] = []
    run: list[Op] = []
    for s in body:
        if isinstance(s, Op):
            run.append(s)
            continue
        overwritten = {c.next: c.name for c in s.carried if c.slots == 1}
        out += [*order(run, next_of or {}), replace(s, body=by_runs(s.body, order, overwritten))]
        run = []
    return (*out, *order(run, next_of or {}))
