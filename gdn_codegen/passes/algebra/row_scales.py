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
from typing import Any

from ...ir.core import Loop, Op, Program, uses, walk
from ..common import walk_body, with_walk_body
from ..stage import takes

Powers = dict[str, int]  # vector -> power
#: Ops that the scales of an operand can pass. Other ops need the scaled value itself.
FOLLOWED = ("matmul", "mul", "neg", "strictly_lower", "lower", "unit_lower_inverse", "row_sum", "add", "sub")


@takes("traced")
def row_scales(p: Program) -> Program:
    """`p` with products that read unscaled inputs. `scales` keeps the vectors that are still computed."""
    if not p.scales:
        return p
    done = with_walk_body(p, _Scale(p, p.walk).run())
    kept = {o.out for o in walk(done.walk.body)}
    return replace(done, scales=tuple(n for n in p.scales if n in kept))


def _times(a: Powers, b: Powers) -> Powers:
    out = {n: a.get(n, 0) + b.get(n, 0) for n in (*a, *b)}
    return {n: e for n, e in out.items() if e}


def _inverse(a: Powers) -> Powers:
    return {n: -e for n, e in a.items()}


class _Scale:
    """Rebuilds the body of a walk. A value diag(r) y diag(c) is held as y, with the powers of r and of c."""
    def __init__(self, p: Program, loop: Loop) -> None:
        self.p, self.loop = p, loop
        self.ops = [o for o in loop.body if isinstance(o, Op)]
        self.defs, self.count = {o.out: o for o in self.ops if o.out}, uses(loop.body)
        self.readers: dict[str, set[str]] = {}
        for o in self.ops:
            for a in o.args:
                self.readers.setdefault(a, set()).add(o.kind)
        self.whole = {c.next for c in loop.carried} | {p.forgets}  # values that are needed with their scales applied
        self.whole |= {n for n, kinds in self.readers.items() if not kinds <= set(FOLLOWED)}
        self.b = walk_body(p)
        self.made: dict[str, Op] = {}
        self.paid: set[str] = set()  # products that already have a column factor
        self.of: dict[str, tuple[str, Powers, Powers]] = {}  # value -> y, scales of its rows, scales of its columns

    def run(self) -> tuple[Op, ...]:
        for o in self.ops:
            self.op(o)
        return self.b.finish()  # type: ignore[return-value]

    def put(self, kind: str, *args: str, name: str = "", line: int = 0, **attrs: Any) -> str:
        """Append an op to the new body and return its value."""
        out = self.b.op(kind, *args, name=name, line=line, **attrs)
        last = self.b.stmts[-1]
        if isinstance(last, Op) and last.out == out:
            self.made[out] = last
        return out

    # --- vectors ---
    def vector(self, powers: Powers, line: int) -> str:
        """The vector that is the product of these powers. At least one power is not 0."""
        out = ""
        for sign in (1, -1):
            for n, e in powers.items():
                for _ in range(max(0, e * sign)):
                    if sign < 0:
                        out = self.put("div", out or self.put("const", value=1.0), n, line=line)
                    else:
                        out = self.put("mul", out, n, line=line) if out else n
        return out

    def rows(self, x: str, v: str, line: int, name: str = "") -> str:
        """diag(v) x. If x has a column factor and no other reader, v becomes part of that column."""
        o = self.made.get(x)
        if o is not None and o.kind == "mul" and self.count.get(x, 1) <= 1:
            for this, that in (o.args, o.args[::-1]):
                col = self.made.get(this)
                if col is not None and col.kind == "col":
                    return self.put("mul", self.put("col", self.put("mul", col.args[0], v, line=line), line=line), that,
                                    name=name, line=line)
            for i, a in enumerate(o.args):
                inner = self.made.get(a)
                if inner is not None and inner.kind == "mul" and self.count.get(a, 1) <= 1 and \
                        self.b.types[a].dims == self.b.types[x].dims:
                    args = [self.rows(y, v, line) if i == n else y for n, y in enumerate(o.args)]
                    return self.put("mul", *args, name=name, line=line)
        return self.put("mul", self.put("col", v, line=line), x, name=name, line=line)

    def scaled(self, x: str, rows: Powers, cols: Powers, line: int, name: str = "") -> str:
        """The value diag(rows) x diag(cols)."""
        if cols:
            x = self.put("mul", x, self.put("row", self.vector(cols, line), line=line), name="" if rows else name, line=line)
        return self.rows(x, self.vector(rows, line), line, name) if rows else x

    def value(self, a: str, line: int) -> str:
        """The value of `a` with its scales applied."""
        return self.scaled(*self.of[a], line) if a in self.of else a

    def result(self, o: Op, kind: str, args: list[str], rows: Powers, cols: Powers, attrs: dict[str, Any]) -> None:
        """Compute y for the op `o`, whose value is diag(rows) y diag(cols). If the value itself is needed, compute that."""
        if o.out in self.whole and (rows or cols):
            self.scaled(self.put(kind, *args, line=o.line, **attrs), rows, cols, o.line, o.out)
            return
        square = kind == "mul" and args[0] == args[1] and rows  # the computation of the scale has this value already
        y = self.put(kind, *args, name="" if square else o.out, line=o.line, **attrs)
        if rows or cols:
            self.of[o.out] = y, rows, cols

    # --- ops ---
    def op(self, o: Op) -> None:
        """Copy an op. A row scale of a load is noted. The scales of operands pass through the op, or are applied before it."""
        parts = [self.of.get(a, (a, {}, {})) for a in o.args]
        attrs = dict(o.attrs)
        if self.is_scale(o):
            (base,) = (a for a in o.args if self.b.types[a].rank == 2 and self.defs[a].kind != "col")
            col = next(a for a in o.args if self.defs[a].kind == "col")
            if o.out in self.whole:
                self.b.copy(o)
            else:
                self.of[o.out] = base, {self.defs[col].args[0]: 1}, {}
        elif o.kind == "mul" and len(o.args) == 2:
            self.mul(o, parts)
        elif not any(rows or cols for _, rows, cols in parts):
            self.put(o.kind, *o.args, name=o.out, line=o.line, **attrs)
        elif o.kind == "matmul" and len(o.args) == 2:
            self.matmul(o, parts)
        elif o.kind in ("neg", "lower") and not o.attr("fill"):
            (y, rows, cols), = parts
            self.result(o, o.kind, [y], rows, cols, attrs)
        elif o.kind == "strictly_lower" and not o.attr("fill"):
            (y, rows, cols), = parts
            if "unit_lower_inverse" in self.readers.get(o.out, ()) and cols:
                both = _times(rows, cols)
                y = self.scaled(y, both, {}, o.line) if both else y
                rows = _inverse(cols)
            self.result(o, o.kind, [y], rows, cols, attrs)
        elif o.kind == "unit_lower_inverse" and not _times(parts[0][1], parts[0][2]):
            self.result(o, o.kind, [parts[0][0]], *parts[0][1:], attrs)
        elif o.kind == "row_sum" and not parts[0][2]:
            total = self.put("row_sum", parts[0][0], line=o.line)
            self.put("mul", self.vector(parts[0][1], o.line), total, name=o.out, line=o.line)
        elif o.kind in ("add", "sub") and parts[0][1:] == parts[1][1:]:
            self.result(o, o.kind, [y for y, *_ in parts], *parts[0][1:], attrs)
        else:
            self.put(o.kind, *(self.value(a, o.line) for a in o.args), name=o.out, line=o.line, **attrs)

    def is_scale(self, o: Op) -> bool:
        """Whether `o` scales the rows of a load by a vector that `scales` names."""
        kinds = {self.defs[a].kind: self.defs[a] for a in o.args if a in self.defs}
        return o.kind == "mul" and set(kinds) == {"col", "load"} and kinds["col"].args[0] in self.p.scales

    def mul(self, o: Op, parts: list[tuple[str, Powers, Powers]]) -> None:
        """An elementwise product: the scales of the operands multiply. A column times a product with a column factor gets one
        column."""
        rows, cols = _times(parts[0][1], parts[1][1]), _times(parts[0][2], parts[1][2])
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
        between = _times(contracted, other)
        if between:
            loaded = [self.defs[a].kind == "load" if a in self.defs else False for a in (x, y)]
            if loaded[0] or not loaded[1]:
                y = self.scaled(y, {}, between, o.line) if tb else self.scaled(y, between, {}, o.line)
            else:
                x = self.scaled(x, between, {}, o.line) if ta else self.scaled(x, {}, between, o.line)
        now = {n: e for n, e in left.items() if e > 0}  # applied directly after the product
        left = {n: e for n, e in left.items() if e < 0}
        if not now:
            self.result(o, "matmul", [x, y], left, right, dict(o.attrs))
            return
        product = self.put("matmul", x, y, line=o.line, **dict(o.attrs))
        if o.out in self.whole and (left or right):
            self.scaled(product, _times(now, left), right, o.line, o.out)
        else:
            self.rows(product, self.vector(now, o.line), o.line, o.out)
            self.paid.add(o.out)
            if left or right:
                self.of[o.out] = o.out, left, right
