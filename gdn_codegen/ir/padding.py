"""Finds the values that are zero on padding. An op that sums over a padded dim needs an operand that is zero there.

Tiles are padded along C, past the sequence's end, and along dims of `Program.extents`, past the caller's tensor. Workspaces keep
the padding of what kernels store to them, so a load from one is zero where everything stored to it is.
"""
from __future__ import annotations

from dataclasses import replace

from .core import Op, Program, Stmt, loops, types
from .ops import OPS
from .types import Tensor, Tile
from .zeros import ALL, NONE, Axes, transpose

#: A value, as the number of its kernel and its name; or a tensor, as MEMORY and its name.
Source = tuple[int, str]
MEMORY = -1


def chunk_tokens(p: Program) -> int:
    """The tokens of a chunk, but of a sequence's last: C, or fewer where the other rows of tiles are empty."""
    return p.tokens or p.sizes["C"]


def sums_over_padding(p: Program) -> list[tuple[str, Op, str]]:
    """The ops that sum over a padded dim although no operand is known to be zero on the padding: (kernel, op, dim).

    Products over C are none of these, because a product may leave its padded rows undefined if nothing reads them.
    """
    type_of = [types(k.body) for k in p.kernels]
    wanted, stored = _wanted(p, type_of), dict[str, Axes]()
    while wanted:  # a load may come before the store of its workspace, as in values computed ahead
        loaded, found = dict[str, Axes](), []
        for n, k in enumerate(p.kernels):
            visit = _Walk(p, n, type_of[n], wanted, stored, loaded)
            visit.body(k.body)
            found += [(k.name, o, d) for o, d in visit.found.values()]
        if all(axes == stored.get(name, ALL) for name, axes in loaded.items()):
            return found
    return []


def zero_beyond(p: Program) -> dict[str, Axes]:
    """The axes along which values of a traced program are zero beyond the caller's tensors, where tiles are larger than these."""
    p = replace(p, extents=(("K", 1), ("V", 1)))
    (k,) = p.kernels
    visit = _Walk(p, 0, types(k.body), {(0, n) for n in types(k.body)}, {}, {})
    visit.body(k.body)
    return visit.zero


def _wanted(p: Program, type_of: list[dict[str, Tile]]) -> set[Source]:
    """The results of sums over padded dims, and all that leads to them. Few values do. type_of: the types of each kernel's
    values."""
    ops = [k.ops for k in p.kernels]
    wanted = {(n, o.out) for n, each in enumerate(ops) for o in each if _padded_sum(p, o, type_of[n])}
    before = 0
    while before != (before := len(wanted)):  # a read in a loop, or of memory, may stand before what is written
        for n, k in enumerate(p.kernels):
            values, memory = {x for m, x in wanted if m == n}, {x for m, x in wanted if m == MEMORY}
            for o in reversed(ops[n]):
                if o.out in values if o.out else o.kind == "store" and o.attr("tensor") in memory:
                    values.update(o.args)
                    if o.kind == "load":
                        memory.add(o.attr("tensor"))
            for c in (c for lp in loops(k.body) for c in lp.carried):
                if c.name in values or c.result in values:
                    values |= {c.init, c.next}
            wanted |= {(n, x) for x in values} | {(MEMORY, x) for x in memory}
    return wanted


def _padded_sum(p: Program, o: Op, type_of: dict[str, Tile]) -> str:
    """The padded dim over which an op sums where an operand must be zero. "" if there is none."""
    of = OPS[o.kind].sums
    if of is None:
        return ""
    sides = of(dict(o.attrs))
    if not sides:
        return ""
    d = type_of[o.args[sides[0][0]]].dims[sides[0][1]]
    return str(d) if d in dict(p.extents) or (d == "C" and len(sides) == 1) else ""


class _Walk:
    """A visit to those ops of a kernel that `wanted` has, and to the stores to tensors that it has. number: of the kernel.

    stored: workspace -> the axes along which all that was stored so far is zero on padding. They become fewer only. loaded: the
    same when the workspace was loaded first.
    """

    def __init__(self, p: Program, number: int, type_of: dict[str, Tile], wanted: set[Source], stored: dict[str, Axes],
                 loaded: dict[str, Axes]) -> None:
        self.p, self.number, self.type, self.wanted, self.stored, self.loaded = p, number, type_of, wanted, stored, loaded
        self.tensors = {t.name: t for t in p.tensors}
        self.zero: dict[str, Axes] = {}
        self.units: set[str] = set()  # identity matrices I; x @ I is zero where x is
        self.found: dict[str, tuple[Op, str]] = {}  # name of the op's value -> op, dim

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Visit statements in order, and find the zero axes of each value. A carried value has a zero axis if its initial value
        has it and every iteration keeps it.
        """
        for s in body:
            if isinstance(s, Op):
                if s.out and (self.number, s.out) in self.wanted:
                    self.zero[s.out] = self.op(s)
                elif s.kind == "store" and (MEMORY, s.attr("tensor")) in self.wanted:
                    self.store(s)
                continue
            carried = [c for c in s.carried if {(self.number, c.name), (self.number, c.result)} & self.wanted]
            now = {c.name: self.zero[c.init] for c in carried}
            while True:
                self.zero |= now
                self.body(s.body)
                after = {c.name: now[c.name] & self.zero[c.next] for c in carried}
                if after == now:
                    break
                now = after
            self.zero |= {c.result: now[c.name] for c in carried}

    def sums(self, o: Op, axes: tuple[tuple[int, int], ...]) -> None:
        """Record `o` if it sums along a padded axis on which no operand is known to be zero. axes: pairs (operand, axis)."""
        self.found.pop(o.out, None)
        d = _padded_sum(self.p, o, self.type)
        if d and not any(axis % self.type[o.args[n]].rank in self.zero[o.args[n]] for n, axis in axes):
            self.found[o.out] = o, d

    def store(self, o: Op) -> None:
        """Note along which axes the workspace of a store is still zero on padding."""
        t = self.tensors[o.attr("tensor")]
        self.stored[t.name] = self.stored.get(t.name, ALL) & _in_memory(t, o, self.zero[o.args[0]])

    def op(self, o: Op) -> Axes:
        """The axes along which the value of an op is zero on padding. Also records sums over padding that may be nonzero."""
        z = tuple(self.zero[a] for a in o.args)
        if o.kind == "move" and o.args[0] in self.units:
            self.units.add(o.out)
        if o.kind == "load":
            t = self.tensors[o.attr("tensor")]
            if t.index == "const" and t.fill == "eye 1.0 0.0":
                self.units.add(o.out)
            if t.role != "input":
                lies = self.stored.get(t.name, ALL) if t.index != "const" else NONE
                if t.index != "const":
                    self.loaded.setdefault(t.name, lies)
            else:
                filled = t.index == "token" and not o.attr("unfilled")
                padded = [d in dict(self.p.extents) and not (t.index == "slot" and t.wide) for d in t.dims]  # see `ir/stored.py`
                lies = frozenset(n for n, has in enumerate(padded) if has or (n == 0 and filled))
            return _in_memory(t, o, lies) & (z[1] if o.args[1:] else ALL)
        d, attrs = OPS[o.kind], dict(o.attrs)
        if d.sums is not None:
            self.sums(o, d.sums(attrs))
        if o.kind == "matmul" and o.args[1] in self.units:
            return transpose(z[0], bool(attrs.get("ta"))) & (z[2] if z[2:] else ALL)
        return d.zero(attrs, tuple(self.type[a] for a in o.args), z)


def _in_memory(t: Tensor, o: Op, axes: Axes) -> Axes:
    """Maps zero axes of the value that `o` moves to axes of the tile in memory, and the reverse."""
    if o.attr("last") or (o.attr("one_token") and not o.attr("tokens")):
        return frozenset(n - 1 for n in axes if n)
    swapped = o.attr("transposed") or (o.attr("heads") and t.index != "token")  # of several heads, each is a row
    return transpose(axes, bool(swapped))
