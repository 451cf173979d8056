"""reuse_products: computes sums of rows from products that are there anyway. All targets run it.

For tiles a, b and c, the row sums of (a @ b) * c are those of a * (c @ b.T). Where the program computes c @ b.T for another
reason and a @ b for this sum only, the second form saves a product. Gradients are full of such pairs: one product for the
derivative by an operand, and a row sum for the derivative by its scale. FLA has the identity in its kernels by hand
(dg = sum(q * dq - k * dk)).
"""
from __future__ import annotations

from ...ir.body import Body
from ...ir.core import Op, Program
from ..common import walk_body, with_walk_body
from ..stage import takes


@takes("traced")
def reuse_products(p: Program) -> Program:
    """`p`, whose row sums of products with a product are row sums of products with another one, where that exists."""
    r = _Reuse([o for o in p.walk.body if isinstance(o, Op)], walk_body(p))
    return with_walk_body(p, r.b.finish()) if r.run() else p


class _Reuse:
    """The products of a walk, and the factors of its elementwise products."""

    def __init__(self, ops: list[Op], b: Body) -> None:
        """ops: of the walk. b: an empty body for it."""
        self.ops, self.b, self.done, self.changed = ops, b, set[str](), False
        self.defs = {o.out: o for o in ops if o.out}
        self.products = {(*o.args, bool(o.attr("ta")), bool(o.attr("tb"))): o.out for o in ops if o.kind == "matmul"}

    def run(self) -> bool:
        """Rebuild the body. Returns whether a row sum changed."""
        for o in self.ops:
            self.emit(o)
        return self.changed

    def emit(self, o: Op) -> None:
        """Append an op after its operands, once. A product may come later than a row sum that now reads it."""
        if o.out and o.out in self.done:
            return
        self.done.add(o.out)
        if o.kind == "row_sum" and self.sum(o):
            self.changed = True
            return
        for a in o.args:
            if a in self.defs:
                self.emit(self.defs[a])
        self.b.copy(o)

    def factors(self, a: str) -> list[str]:
        """The factors of an elementwise product. For another value, the value itself."""
        o = self.defs.get(a)
        return [a] if o is None or o.kind != "mul" else [f for x in o.args for f in self.factors(x)]

    def is_scale(self, a: str) -> bool:
        """Whether a factor is a number or a column."""
        o = self.defs.get(a)
        return o is not None and o.type is not None and (not o.type.dims or o.kind == "col")

    def other(self, p: str, c: str) -> tuple[str, str] | None:
        """For p = a @ b: a, and the product c @ b.T if there is one."""
        o = self.defs.get(p)
        if o is None or o.kind != "matmul" or o.attr("ta") or len(o.args) > 2:
            return None
        found = self.products.get((c, o.args[1], False, not o.attr("tb")))
        return (o.args[0], found) if found else None

    def sum(self, o: Op) -> str:
        """Append what `o`, a row sum, is in the other form. "" if there is none."""
        if o.type is None or len(o.type.dims) != 1:
            return ""
        terms = self.terms(o.args[0])
        if not any(x for _, _, x in terms):
            return ""
        b, total = self.b, ""
        for n in (n for _, scales, pair in terms for n in (*scales, *(pair or ())) if n in self.defs):
            self.emit(self.defs[n])
        for sign, scales, pair in terms:
            tile = b.op("mul", *pair, line=o.line) if pair else ""
            tiles = [f for f in scales if not self.is_scale(f)]
            for f in tiles:
                tile = b.op("mul", tile, f, line=o.line) if tile else f
            x = b.op("row_sum", tile, line=o.line)
            for f in (f for f in scales if self.is_scale(f)):
                f = self.defs[f].args[0] if self.defs[f].kind == "col" else f
                x = b.op("mul", f, x, line=o.line)
            total = b.op("sub" if sign < 0 else "add", total, x, line=o.line) if total else (
                b.op("neg", x, line=o.line) if sign < 0 else x)
        return b.op("mul", total, b.op("const", value=1.0, line=o.line), name=o.out, line=o.line)

    def terms(self, a: str) -> list[tuple[int, list[str], tuple[str, str] | None]]:
        """What adds up to the tile `a`: for each term its sign, its factors, and the pair of tiles that replaces two of them, or
        None. A sum among the factors is multiplied out if that makes such a pair."""
        made = self.defs.get(a)
        if made is not None and made.kind == "neg":
            return [(-sign, factors, pair) for sign, factors, pair in self.terms(made.args[0])]
        factors = self.factors(a)
        pair = self.pair(factors)
        if pair:
            (x, y), rest = pair
            return [(1, rest, (x, y))]
        for f in factors:
            o = self.defs.get(f)
            if o is None or o.kind not in ("add", "sub"):
                continue
            rest = [x for x in factors if x != f]
            parts = [[*rest, *self.factors(x)] for x in o.args]
            found = [self.pair(x) for x in parts]
            if any(found) and len(rest) + 1 == len(factors):
                return [(-1 if n and o.kind == "sub" else 1, x[1] if x else part, x[0] if x else None)
                        for n, (part, x) in enumerate(zip(parts, found, strict=True))]
        return [(1, factors, None)]

    def pair(self, factors: list[str]) -> tuple[tuple[str, str], list[str]] | None:
        """The pair of tiles that replaces a product and its partner among these factors, and the other factors."""
        tiles = [f for f in factors if not self.is_scale(f)]
        if len(tiles) != 2:
            return None
        for p, c in (tiles, tiles[::-1]):
            found = self.other(p, c)
            if found:
                return found, [f for f in factors if self.is_scale(f)]
        return None
