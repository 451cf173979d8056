"""fold_into_inverse: what an inverse of a whole tile does by itself.

- cast(cast(diag_inverse(a)) * row(x)) is rounded twice and goes through every entry once more; diag_inverse(a, x) is not and
  does not. Only where the inverse is read once.
- strictly_lower of one leaves out the ones of the diagonal, which a `strict` inverse does not write.
- It reads what lies below the diagonal alone, so that a mask of the rest is not needed.
- What is widened and rounded again is what it was.
"""
from __future__ import annotations

from ...ir.builder import Body
from ...ir.core import Kernel, Op, Program, types, uses, walk
from ..common import rebuild_kernels
from ..stage import takes
from ..storage.offsets import WIDTH


@takes("decomposed")
def fold_into_inverse(p: Program, whole: int) -> Program:
    """`p` with scales of columns in its inverses of whole tiles, and without masks before them. whole: rows of the tiles that the
    device inverts whole, 0 for none; `p` itself where its chunk has another number."""
    if p.sizes["C"] != whole:
        return p
    return rebuild_kernels(p, _Inverses)


class _Inverses:
    """The rule of one op: a mask, a scale or a rounding around `diag_inverse` becomes part of it. None where the op stays."""
    def __init__(self, k: Kernel) -> None:
        self.defs, self.count, self.type = {o.out: o for o in walk(k.body) if o.out}, uses(k.body), types(k.body)

    def __call__(self, o: Op, b: Body) -> str | None:
        if o.kind == "cast" and (same := self.rounded_again(o)):
            return same
        below = self.strict(o.args[0]) if o.kind == "cast" else None
        if below is not None and self.type[below.out] == self.type[o.out]:
            return b.op("diag_inverse", self.bare(below.args[0], b), name=o.out, line=o.line, strict=True, **dict(below.attrs))
        found = self.scaled(o.args[0]) if o.kind == "cast" else None
        if found is not None and self.type[found[0].out] == self.type[o.out]:
            inverse, vector = found
            return b.op("diag_inverse", self.bare(inverse.args[0], b), vector, name=o.out, line=o.line, **dict(inverse.attrs))
        if o.kind == "diag_inverse":
            return b.op(o.kind, self.bare(o.args[0], b), *o.args[1:], name=o.out, line=o.line, **dict(o.attrs))
        return None

    def rounded_again(self, o: Op) -> str:
        """Of a cast, what was widened before it and has its type, or ""."""
        wide = self.defs.get(o.args[0])
        if wide is None or wide.kind != "cast" or self.type[wide.args[0]] != self.type[o.out]:
            return ""
        return wide.args[0] if WIDTH[self.type[wide.out].dtype] > WIDTH[self.type[o.out].dtype] else ""

    def strict(self, a: str) -> Op | None:
        """The inverse of which `a` is what lies below the diagonal."""
        below = self.defs.get(a)
        if below is None or below.kind != "strictly_lower" or below.attr("fill") or self.count[a] != 1:
            return None
        return self.alone(below.args[0])

    def alone(self, x: str) -> Op | None:
        """The inverse that `x` is, or is widened from, if it has no scale and nobody else reads it."""
        inverse = self.defs.get(x)
        if inverse is not None and inverse.kind == "cast":
            inverse = self.defs.get(inverse.args[0])
        if inverse is None or inverse.kind != "diag_inverse" or len(inverse.args) != 1:
            return None
        return inverse if self.count[x] == self.count[inverse.out] == 1 else None

    def scaled(self, a: str) -> tuple[Op, str] | None:
        """The inverse of which `a` has the columns scaled, and the vector that scales them."""
        product = self.defs.get(a)
        if product is None or product.kind != "mul" or self.count[a] != 1:
            return None
        for x, y in (product.args, product.args[::-1]):
            inverse, view = self.alone(x), self.defs.get(y)
            if view is not None and view.kind == "row" and inverse is not None:
                return inverse, view.args[0]
        return None

    def bare(self, a: str, b: Body) -> str:
        """`a` without its mask; it is read once."""
        o = self.defs.get(a)
        if o is None or self.count[a] != 1:
            return a
        if o.kind in ("lower", "strictly_lower"):
            return self.bare(o.args[0], b)
        if o.kind not in ("cast", "mul", "exp"):
            return a
        args = [self.bare(x, b) for x in o.args]
        return a if args == list(o.args) else b.op(o.kind, *args, line=o.line, **dict(o.attrs))
