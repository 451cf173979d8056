"""row_scales: moves row scales of inputs out of products.

An input may have its rows scaled by a vector r that `Program.scales` names: k = diag(r) x. After this pass products read x
itself, which is what memory holds. The pass writes each value as diag(a) y diag(b) and computes y. a and b are products of
powers of such vectors.
- (diag(r) x) @ z becomes diag(r) (x @ z). A positive power is applied directly after the product, as a column. Often the
  product has a column factor already, and r becomes part of it.
- Powers that meet in a contracted dim cancel, or scale one operand: x.T diag(r) diag(1 / r) y is x.T @ y.
- (I + diag(1/b) A diag(b))^-1 becomes diag(1/b) (I + A)^-1 diag(b), so that the operand of the inverse has row scales only.

Example: the delta rule with keys diag(r) x becomes the delta rule with keys x, where r u takes the place of u. All targets run
this pass.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Op, Program, Stmt, walk
from ..common import with_walk_body
from ..match import Found, matches
from ..stage import takes
from .scaled import Divides, Powers, Scaled, inverse, times


@takes("traced")
def row_scales(p: Program) -> Program:
    """`p` with products that read unscaled inputs. `scales` keeps the vectors that are still computed. `p` without
    `scales` if a value would have to be divided by one of them, which is 0 for a row of zeros: all inputs are scaled then."""
    if not p.scales:
        return p
    try:
        done = with_walk_body(p, _Scale(p).run())
    except Divides:
        return replace(p, scales=())
    kept = {o.out for o in walk(done.walk.body)}
    return replace(done, scales=tuple(n for n in p.scales if n in kept))


class _Scale(Scaled):
    """Copies the body of a walk. The scales of operands pass through an op, or are applied before it.

    paid: products that already have a column factor.
    """

    def __init__(self, p: Program) -> None:
        super().__init__(p)
        self.scales, self.paid = p.scales, set[str]()

    def run(self) -> tuple[Stmt, ...]:
        """The new body."""
        for o in self.ops:
            self.op(o)
        return self.b.finish()

    def op(self, o: Op) -> None:
        """Copy an op, or note the row scale of a load."""
        parts = [self.of.get(a, (a, {}, {})) for a in o.args]
        attrs, scale = dict(o.attrs), self.scale(o)
        if scale and o.out in self.whole:
            self.b.copy(o)
        elif scale:
            self.of[o.out] = scale["x"], {scale["r"]: 1}, {}
        elif o.kind == "mul" and len(o.args) == 2:
            self.mul(o, parts)
        elif not any(rows or cols for _, rows, cols in parts):
            self.put(o.kind, *o.args, name=o.out, line=o.line, **attrs)
        elif o.kind == "matmul" and len(o.args) == 2:
            self.matmul(o, parts)
        elif o.kind == "decayed_pairs" and not (parts[0][2] or parts[1][2] or any(r or c for _, r, c in parts[2:])):
            self.product(o, [y for y, *_ in parts], parts[0][1], parts[1][1])
        elif o.kind in ("neg", "lower") and not o.attr("fill"):
            (y, rows, cols), = parts
            self.result(o, o.kind, [y], rows, cols, attrs)
        elif o.kind == "strictly_lower" and not o.attr("fill"):
            (y, rows, cols), = parts
            if "unit_lower_inverse" in self.readers.get(o.out, ()) and cols:
                both = times(rows, cols)
                y = self.scaled(y, both, {}, o.line) if both else y
                rows = inverse(cols)
            self.result(o, o.kind, [y], rows, cols, attrs)
        elif o.kind == "unit_lower_inverse" and not times(parts[0][1], parts[0][2]):
            self.result(o, o.kind, [parts[0][0]], *parts[0][1:], attrs)
        elif o.kind == "row_sum" and not parts[0][2]:
            total = self.put("row_sum", parts[0][0], line=o.line)
            self.put("mul", self.vector(parts[0][1], o.line), total, name=o.out, line=o.line)
        elif o.kind in ("add", "sub") and parts[0][1:] == parts[1][1:]:
            self.result(o, o.kind, [y for y, *_ in parts], *parts[0][1:], attrs)
        else:
            self.put(o.kind, *(self.value(a, o.line) for a in o.args), name=o.out, line=o.line, **attrs)

    def scale(self, o: Op) -> Found | None:
        """A load x and a vector r that `scales` names, if `o` scales the rows of x by r."""
        return next((f for f in matches("r[:, None] * x", o, self.defs) if f["r"] in self.scales and self.loaded(f["x"])), None)

    def loaded(self, a: str) -> bool:
        """Whether `a` is a load of the page."""
        return a in self.defs and self.defs[a].kind == "load"

    def mul(self, o: Op, parts: list[tuple[str, Powers, Powers]]) -> None:
        """An elementwise product: the scales of the operands multiply. A column times a product with a column factor gets one
        column."""
        rows, cols = times(parts[0][1], parts[1][1]), times(parts[0][2], parts[1][2])
        args = [y for y, *_ in parts]
        for x, y in (args, args[::-1]):  # two column factors become one
            col = self.made.get(x)
            if col is None or col.kind != "col" or y not in self.paid or self.count.get(y, 1) > 1:
                continue
            if o.out not in self.whole or not (rows or cols):
                self.rows(y, col.args[0], o.line, o.out)
                if rows or cols:
                    self.of[o.out] = o.out, rows, cols
                return
        self.result(o, "mul", args, rows, cols, {})

    def matmul(self, o: Op, parts: list[tuple[str, Powers, Powers]]) -> None:
        """A product: scales of outer dims stay on the result. Scales of the contracted dim are applied to one operand."""
        ta, tb = bool(o.attr("ta")), bool(o.attr("tb"))
        (x, *outer), (y, *inner) = parts
        left, contracted = outer[::-1] if ta else outer
        other, right = inner[::-1] if tb else inner
        between = times(contracted, other)
        if between:
            if self.loaded(x) or not self.loaded(y):
                y = self.scaled(y, {}, between, o.line) if tb else self.scaled(y, between, {}, o.line)
            else:
                x = self.scaled(x, between, {}, o.line) if ta else self.scaled(x, {}, between, o.line)
        self.product(o, [x, y], left, right)

    def product(self, o: Op, args: list[str], left: Powers, right: Powers) -> None:
        """A product of tiles without their scales. Positive powers of rows are applied directly after it."""
        now = {n: e for n, e in left.items() if e > 0}  # applied directly after the product
        left = {n: e for n, e in left.items() if e < 0}
        if not now:
            self.result(o, o.kind, args, left, right, dict(o.attrs))
            return
        product = self.put(o.kind, *args, line=o.line, **dict(o.attrs))
        if o.out in self.whole and (left or right):
            self.scaled(product, times(now, left), right, o.line, o.out)
        else:
            self.rows(product, self.vector(now, o.line), o.line, o.out)
            self.paid.add(o.out)
            if left or right:
                self.of[o.out] = o.out, left, right
