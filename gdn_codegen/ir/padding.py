"""Finds the values that are zero on padding. An op that sums over a padded dim needs an operand that is zero there."""
from __future__ import annotations

from .core import Op, Program, Stmt, types
from .ops import OPS
from .types import Tile
from .zeros import ALL, NONE, Axes, transpose


def sums_over_padding(p: Program) -> list[tuple[str, Op, str]]:
    """The ops that sum over a padded dim although no operand is known to be zero on the padding: (kernel, op, dim)."""
    stored: dict[str, Axes] = {}
    while True:  # until nothing changes, since a load may come before the store of its workspace, as in values computed ahead
        before, found = dict(stored), []
        for k in p.kernels:
            walk = _Walk(p, types(k.body), stored)
            walk.body(k.body)
            found += [(k.name, o, d) for o, d in walk.found.values()]
        if before == stored:
            return found


class _Walk:
    def __init__(self, p: Program, type_of: dict[str, Tile], stored: dict[str, Axes]) -> None:
        self.p, self.type, self.stored = p, type_of, stored
        self.zero: dict[str, Axes] = {}
        self.found: dict[str, tuple[Op, str]] = {}  # name of the op's value -> op, dim

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Visit statements in order, and find the zero axes of each value. A carried value has a zero axis if its initial value
        has it and every iteration keeps it.
        """
        for s in body:
            if isinstance(s, Op):
                axes = self.op(s)
                if s.out:
                    self.zero[s.out] = axes
                continue
            now = {c.name: self.zero[c.init] for c in s.carried}
            while True:
                self.zero |= now
                self.body(s.body)
                after = {c.name: now[c.name] & self.zero[c.next] for c in s.carried}
                if after == now:
                    break
                now = after
            self.zero |= {c.result: now[c.name] for c in s.carried}

    def sums(self, o: Op, *sides: tuple[str, int]) -> None:
        """Record `o` if it sums along a padded axis on which no operand is known to be zero. sides: (operand, axis) pairs."""
        d = self.type[sides[0][0]].dims[sides[0][1]]
        self.found.pop(o.out, None)
        if d in dict(self.p.extents) and not any(axis in self.zero[a] for a, axis in sides):
            self.found[o.out] = o, str(d)

    def op(self, o: Op) -> Axes:
        """The axes along which the value of an op is zero on padding. Also records sums over padding that may be nonzero."""
        z = tuple(self.zero[a] for a in o.args)
        if o.kind in ("load", "store"):
            t, transposed = self.p.tensor(o.attr("tensor")), bool(o.attr("transposed"))
            if o.kind == "store":
                self.stored[t.name] = self.stored.get(t.name, ALL) & transpose(z[0], transposed)
                return NONE
            own = {n for n, x in enumerate(self.p.padded(t)) if x}
            lies = frozenset(own) if t.role != "workspace" else self.stored.get(t.name, ALL) if t.index != "const" else NONE
            return transpose(lies, transposed) & (z[1] if o.args[1:] else ALL)
        if o.kind == "matmul":
            self.sums(o, (o.args[0], 1 - bool(o.attr("ta"))), (o.args[1], int(bool(o.attr("tb")))))
        if o.kind == "row_sum":
            self.sums(o, (o.args[0], 1))
        return OPS[o.kind].zero(dict(o.attrs), tuple(self.type[a] for a in o.args), z)
