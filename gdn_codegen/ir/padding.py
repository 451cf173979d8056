"""Finds the values that are zero on padding. An op that sums over a padded dim needs an operand that is zero there.

Tiles are padded along C, past the sequence's end, and along dims of `Program.extents`, past the caller's tensor. Workspaces keep
the padding of what kernels store to them, so a load from one is zero where everything stored to it is.
"""
from __future__ import annotations

from .core import Op, Program, Stmt, types
from .ops import OPS
from .types import Tensor, Tile
from .zeros import ALL, NONE, Axes, transpose


def sums_over_padding(p: Program) -> list[tuple[str, Op, str]]:
    """The ops that sum over a padded dim although no operand is known to be zero on the padding: (kernel, op, dim).

    Products over C are none of these, because a product may leave its padded rows undefined if nothing reads them.
    """
    stored: dict[str, Axes] = {}
    while True:  # a load may come before the store of its workspace, as in values computed ahead
        loaded, found = dict[str, Axes](), []
        for k in p.kernels:
            walk = _Walk(p, types(k.body), stored, loaded)
            walk.body(k.body)
            found += [(k.name, o, d) for o, d in walk.found.values()]
        if all(axes == stored.get(name, ALL) for name, axes in loaded.items()):
            return found


class _Walk:
    """A visit to the ops of a kernel.

    stored: workspace -> the axes along which all that was stored so far is zero on padding. They become fewer only. loaded: the
    same when the workspace was loaded first.
    """

    def __init__(self, p: Program, type_of: dict[str, Tile], stored: dict[str, Axes], loaded: dict[str, Axes]) -> None:
        self.p, self.type, self.stored, self.loaded = p, type_of, stored, loaded
        self.tensors, self.extents = {t.name: t for t in p.tensors}, dict(p.extents)
        self.zero: dict[str, Axes] = {}
        self.found: dict[str, tuple[Op, str]] = {}  # name of the op's value -> op, dim

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Visit statements in order, and find the zero axes of each value. A carried value has a zero axis if its initial value
        has it and every iteration keeps it.
        """
        for s in body:
            if isinstance(s, Op):
                if s.out:
                    self.zero[s.out] = self.op(s)
                elif s.kind == "store":
                    self.store(s)
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

    def sums(self, o: Op, axes: tuple[tuple[int, int], ...]) -> None:
        """Record `o` if it sums along a padded axis on which no operand is known to be zero. axes: pairs (operand, axis)."""
        sides = [(o.args[n], axis % self.type[o.args[n]].rank) for n, axis in axes]
        d = self.type[sides[0][0]].dims[sides[0][1]]
        self.found.pop(o.out, None)
        padded = d in self.extents or (d == "C" and len(sides) == 1)
        if padded and not any(axis in self.zero[a] for a, axis in sides):
            self.found[o.out] = o, str(d)

    def store(self, o: Op) -> None:
        """Note along which axes the workspace of a store is still zero on padding."""
        t = self.tensors[o.attr("tensor")]
        self.stored[t.name] = self.stored.get(t.name, ALL) & _in_memory(t, o, self.zero[o.args[0]])

    def op(self, o: Op) -> Axes:
        """The axes along which the value of an op is zero on padding. Also records sums over padding that may be nonzero."""
        z = tuple(self.zero[a] for a in o.args)
        if o.kind == "load":
            t = self.tensors[o.attr("tensor")]
            if t.role == "workspace":
                lies = self.stored.get(t.name, ALL) if t.index != "const" else NONE
                if t.index != "const":
                    self.loaded.setdefault(t.name, lies)
            else:
                lies = frozenset(n for n, padded in enumerate(self.p.padded(t)) if padded or (n == 0 and t.index == "token"))
            return _in_memory(t, o, lies) & (z[1] if o.args[1:] else ALL)
        d, attrs = OPS[o.kind], dict(o.attrs)
        if d.sums is not None:
            self.sums(o, d.sums(attrs))
        return d.zero(attrs, tuple(self.type[a] for a in o.args), z)


def _in_memory(t: Tensor, o: Op, axes: Axes) -> Axes:
    """Maps zero axes of the value that `o` moves to axes of the tile in memory, and the reverse."""
    if o.attr("last"):
        return NONE  # a number
    if o.attr("one_token"):
        return frozenset(n - 1 for n in axes if n)
    swapped = o.attr("transposed") or (o.attr("heads") and t.index != "token")  # of several heads, each is a row
    return transpose(axes, bool(swapped))
