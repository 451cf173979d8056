"""Which values are zero on the padding of their dims: what sums over a padded dim rely on."""
from __future__ import annotations

from .core import Op, Program, Stmt, types
from .types import Tile

Axes = frozenset[int]
NONE: Axes = frozenset()
ALL: Axes = frozenset((0, 1))
#: Ops whose value is zero where that of their operand is.
KEEP = ("neg", "cast", "move", "valid", "row_norm", "cumsum", "last", "row_sum", "div", "strictly_lower", "pairs", "diag_blocks")


def sums_over_padding(p: Program) -> list[tuple[str, Op, str]]:
    """The ops that sum over a padded dim of values that may be other than zero there: kernel, op, dim."""
    stored: dict[str, Axes] = {}
    while True:  # loads before stores, as of what is computed ahead: until nothing changes
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
        self.found: dict[str, tuple[Op, str]] = {}  # by the op's value

    def body(self, body: tuple[Stmt, ...]) -> None:
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
        """Note `o` if it sums along an axis of operands, padded, that none of them has zeros on."""
        d = self.type[sides[0][0]].dims[sides[0][1]]
        self.found.pop(o.out, None)
        if d in dict(self.p.extents) and not any(axis in self.zero[a] for a, axis in sides):
            self.found[o.out] = o, str(d)

    def op(self, o: Op) -> Axes:
        z = [self.zero[a] for a in o.args]
        if o.kind in ("load", "store"):
            t, turned = self.p.tensor(o.attr("tensor")), bool(o.attr("transposed"))
            if o.kind == "store":
                self.stored[t.name] = self.stored.get(t.name, ALL) & _turned(z[0], turned)
                return NONE
            own = {n for n, x in enumerate(self.p.padded(t)) if x}
            lies = frozenset(own) if t.role != "workspace" else self.stored.get(t.name, ALL) if t.index != "const" else NONE
            return _turned(lies, turned) & (z[1] if o.args[1:] else ALL)
        if o.kind == "matmul":
            a, b = (1 - bool(o.attr("ta"))), int(bool(o.attr("tb")))
            self.sums(o, (o.args[0], a), (o.args[1], b))
            out = frozenset(n for n, zero in enumerate((1 - a in z[0], 1 - b in z[1])) if zero)
            return out & z[2] if z[2:] else out
        if o.kind == "row_sum":
            self.sums(o, (o.args[0], 1))
        if o.kind in ("full", "eye"):
            return ALL if o.attr("value") == 0 or o.attr("within") else NONE
        if o.kind == "mul":
            return frozenset().union(*z)
        if o.kind in ("add", "sub", "maximum", "minimum"):
            assert o.type is not None
            return frozenset(n for n in ALL if all(n in x and self.wide(a, n) for a, x in zip(o.args, z, strict=True)))
        if o.kind == "expand":
            return frozenset(n for n in z[0] if self.wide(o.args[0], n))
        if o.kind in ("row", "transpose"):
            return _turned(z[0], True)
        if o.kind == "col" or (o.kind == "lower" and not o.attr("fill")):
            return z[0]
        return z[0] if o.kind in KEEP else NONE

    def wide(self, a: str, axis: int) -> bool:
        """Whether `a` has more than one entry along an axis, so that its padding is that of the result."""
        dims = self.type[a].dims
        return axis < len(dims) and dims[axis] != 1


def _turned(axes: Axes, turned: bool) -> Axes:
    return frozenset(1 - n for n in axes) if turned else axes
