"""row_scales: row scales leave products.

Where an input's rows are scaled by a vector that the program names in `scales`, k = diag(r) x, products read x itself, as it
lies in memory. A value is followed as diag(a) y diag(b), a and b products of powers of such vectors, and y computed:
- (diag(r) x) @ z is diag(r) (x @ z): a positive power is paid where the product is, as a column, which often is one more
  factor of a column that is there already;
- powers that meet in a contraction cancel, or scale one side: x.T diag(r) diag(1 / r) y is x.T @ y;
- (I + diag(1/b) A diag(b))^-1 is diag(1/b) (I + A)^-1 diag(b), so that what the inverse takes is scaled along rows alone.
For the delta rule that is the rule with keys x, and r u for u.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir.core import Loop, Op, Program, uses, walk
from ..common import walk_body, with_walk_body
from ..stage import takes

Powers = dict[str, int]  # vector -> power
#: Ops that need not know what their operands are multiples of.
FOLLOWED = ("matmul", "mul", "neg", "strictly_lower", "lower", "unit_lower_inverse", "row_sum", "add", "sub")


@takes("traced")
def row_scales(p: Program) -> Program:
    """`p` whose products read unscaled inputs."""
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
    """The body of a walk without row scales of its loads: a value x = diag(r) y diag(c) is held as y with powers of r and c."""
    def __init__(self, p: Program, loop: Loop) -> None:
        self.p, self.loop = p, loop
        self.ops = [o for o in loop.body if isinstance(o, Op)]
        self.defs, self.count = {o.out: o for o in self.ops if o.out}, uses(loop.body)
        self.readers: dict[str, set[str]] = {}
        for o in self.ops:
            for a in o.args:
                self.readers.setdefault(a, set()).add(o.kind)
        self.whole = {c.next for c in loop.carried} | {p.forgets}  # what is wanted as it is
        self.whole |= {n for n, kinds in self.readers.items() if not kinds <= set(FOLLOWED)}
        self.b = walk_body(p)
        self.made: dict[str, Op] = {}
        self.paid: set[str] = set()  # products that a column scales
        self.of: dict[str, tuple[str, Powers, Powers]] = {}  # value -> y, what scales its rows, its columns

    def run(self) -> tuple[Op, ...]:
        for o in self.ops:
            self.op(o)
        return self.b.finish()  # type: ignore[return-value]

    def put(self, kind: str, *args: str, name: str = "", line: int = 0, **attrs: Any) -> str:
        out = self.b.op(kind, *args, name=name, line=line, **attrs)
        last = self.b.stmts[-1]
        if isinstance(last, Op) and last.out == out:
            self.made[out] = last
        return out

    # --- vectors ---
    def vector(self, powers: Powers, line: int) -> str:
        """The product of powers, none of them empty."""
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
        """diag(v) x, by a column that scales x already where nobody else reads that."""
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
        """diag(rows) x diag(cols), computed."""
        if cols:
            x = self.put("mul", x, self.put("row", self.vector(cols, line), line=line), name="" if rows else name, line=line)
        return self.rows(x, self.vector(rows, line), line, name) if rows else x

    def value(self, a: str, line: int) -> str:
        """`a` itself."""
        return self.scaled(*self.of[a], line) if a in self.of else a

    def result(self, o: Op, kind: str, args: list[str], rows: Powers, cols: Powers, attrs: dict[str, Any]) -> None:
        """Compute y for an `o` that is diag(rows) y diag(cols); all of it where somebody wants `o` as it is."""
        if o.out in self.whole and (rows or cols):
            self.scaled(self.put(kind, *args, line=o.line, **attrs), rows, cols, o.line, o.out)
            return
        square = kind == "mul" and args[0] == args[1] and rows  # which is there already, for the scale itself
        y = self.put(kind, *args, name="" if square else o.out, line=o.line, **attrs)
        if rows or cols:
            self.of[o.out] = y, rows, cols

    # --- ops ---
    def op(self, o: Op) -> None:
        """Take an op over: note a row scale, carry the scales of its operands through it, or apply them before it."""
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
        """Whether `o` scales the rows of what is loaded by a vector of the program's `scales`."""
        kinds = {self.defs[a].kind: self.defs[a] for a in o.args if a in self.defs}
        return o.kind == "mul" and set(kinds) == {"col", "load"} and kinds["col"].args[0] in self.p.scales

    def mul(self, o: Op, parts: list[tuple[str, Powers, Powers]]) -> None:
        """An elementwise product: the operands' scales multiply. A column times what a column scales becomes one column."""
        rows, cols = _times(parts[0][1], parts[1][1]), _times(parts[0][2], parts[1][2])
        args = [y for y, *_ in parts]
        for x, y in (args, args[::-1]):  # a column times what a column of ours scales is one column
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
        """A product: scales of outer dims stay on the result; those of the contracted dim are applied to one operand."""
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
        now = {n: e for n, e in left.items() if e > 0}  # paid here
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
