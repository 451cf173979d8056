"""shared_tiles: products of tiles of tokens x tokens with the same factors share one tile. All targets run it, for programs that
sum such tiles: gradients.

Signs, numbers, columns and rows stand outside of the shared tile, and a mask stands around it once. A factor of all entries of a
row leaves a sum over that row, and a factor of a column a sum over that column. Gradients by an operand of a product of decays,
and by the decays themselves, have such products.

Example, where b is a column of a vector c:
    before:  a = strictly_lower(-(b * x * D)) @ k; r = row_sum(strictly_lower(-(b * y * x)) * D)
    after:   t = strictly_lower(x * D); a = (-(b * t)) @ k; r = -(c * row_sum(y * t))
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from ...ir.core import Line, Op, Program, Stmt
from ..common import walk_body, with_walk_body
from ..stage import takes

TILE = ("C", "C")
SUMS = ("row_sum", "column_sum")
#: Masks of zeros, from the one that keeps all entries to the strictest.
MASKS = {"": 0, "lower": 1, "strictly_lower": 2}


@dataclass(frozen=True)
class Product:
    """A tile as a product: the tiles among its factors, the mask around it ("" for none), the factors of one number, column or
    row, and whether it is negative."""

    tiles: tuple[str, ...] = ()
    mask: str = ""
    scales: tuple[str, ...] = ()
    negative: bool = False

    def times(self, other: Product) -> Product:
        """The product of both. A mask of a factor is a mask of the product."""
        return Product(self.tiles + other.tiles, max(self.mask, other.mask, key=MASKS.__getitem__), self.scales + other.scales,
                       self.negative != other.negative)

    def contains(self, other: Product) -> bool:
        """Whether this one is the other one times more tiles, perhaps with a stricter mask."""
        return len(other.tiles) < len(self.tiles) and MASKS[other.mask] <= MASKS[self.mask] and \
            Counter(other.tiles) <= Counter(self.tiles)


@takes("traced")
def shared_tiles(p: Program) -> Program:
    """`p`, in which products of the same tiles share one. `p` itself if it sums no tile of tokens x tokens."""
    s = _Shared(p)
    return with_walk_body(p, s.run()) if s.sums else p


@dataclass
class _Shared:
    """Rebuilds the body of a walk. products: the values that change, as products: what a sum sums, and masked operands of
    products. parts: all products of tiles that the new body has, without their scales."""

    p: Program
    products: dict[str, Product] = field(default_factory=dict)
    parts: list[Product] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Finds the sums of tiles, and what changes."""
        self.ops, self.b = [o for o in self.p.walk.body if isinstance(o, Op)], walk_body(self.p)
        self.defs = {o.out: o for o in self.ops if o.out}
        self.sums = [o for o in self.ops if o.kind in SUMS and self.is_tile(o.args[0])]
        operands = [a for o in self.ops if o.kind == "matmul" for a in o.args if self.is_tile(a)]
        for a in dict.fromkeys([*operands, *(o.args[0] for o in self.sums)]):
            found = self.product(a)
            if len(found.tiles) > 1:
                self.parts.append(replace(found, scales=(), negative=False))
                if found.mask or a not in operands:
                    self.products[a] = found

    def is_tile(self, a: str) -> bool:
        """Whether a value has a number for each pair of tokens."""
        o = self.defs.get(a)
        return o is not None and o.type is not None and o.type.dims == TILE

    def product(self, a: str) -> Product:
        """The value `a` as a product. A value that is none is its only tile or scale."""
        o = self.defs.get(a)
        if o is None or o.type is None or o.type.dims != TILE:
            return Product(scales=(a,))
        if o.kind == "mul":
            return self.product(o.args[0]).times(self.product(o.args[1]))
        if o.kind == "neg":
            return self.product(o.args[0]).times(Product(negative=True))
        if o.kind in MASKS and not o.attr("fill"):
            return self.product(o.args[0]).times(Product(mask=o.kind))
        return Product((a,))

    def run(self) -> tuple[Stmt, ...]:
        """The new body."""
        names: dict[str, str] = {}
        for o in self.ops:
            if o.out in self.products and o not in self.sums:
                x = self.products[o.out]
                self.scaled(self.tile(x, o.line), x, x.scales, o.line, o.out)
            elif o in self.sums and o.args[0] in self.products:
                self.sum(o)
            elif equal := self.b.equal(o.kind, *(names.get(a, a) for a in o.args), agent=o.agent, **dict(o.attrs)):
                names[o.out] = equal
            else:
                self.b.copy(o, names)
        return self.b.finish()

    def tile(self, x: Product, line: Line) -> str:
        """Append the tiles of `x` and its mask, from the largest part that other products have. Of several it is the last one,
        which has been in registers for the shortest time."""
        found = [y for y in self.parts if x.contains(y)]
        part = max(found, key=lambda y: (len(y.tiles), MASKS[y.mask], self.parts.index(y)), default=None)
        rest, out = list(x.tiles), ""
        if part is not None:
            out = self.tile(part, line)
            for a in part.tiles:
                rest.remove(a)
        for a in rest:
            out = self.b.op("mul", out, a, line=line) if out else a
        return out if x.mask == (part.mask if part else "") else self.b.op(x.mask, out, line=line)

    def scaled(self, out: str, x: Product, scales: tuple[str, ...], line: Line, name: str) -> str:
        """Append `out` times these factors, with the sign of `x`, as the value `name`."""
        todo = [*(("mul", a) for a in scales), *([("neg", "")] if x.negative else [])]
        for n, (kind, a) in enumerate(todo, 1):
            out = self.b.op(kind, *([a] if a else []), out, name=name if n == len(todo) else "", line=line)
        return out if todo else self.b.op("mul", out, self.b.op("const", value=1.0, line=line), name=name, line=line)

    def sum(self, o: Op) -> None:
        """Append the sum `o`: the factors that all its summands have stand outside."""
        x, outside = self.products[o.args[0]], {"row_sum": "col", "column_sum": "row"}[o.kind]
        inner, factors = self.tile(x, o.line), []
        for a in x.scales:
            made = self.defs.get(a)
            if made is not None and made.kind == outside:
                factors.append(made.args[0])
            elif made is not None and made.type is not None and made.type.rank == 0:
                factors.append(a)
            else:
                inner = self.b.op("mul", a, inner, line=o.line)
        self.scaled(self.b.op(o.kind, inner, line=o.line), x, tuple(factors), o.line, o.out)
