"""scaled: values that are held without the scales of their rows and columns. `row_scales` uses it."""
from __future__ import annotations

from typing import Any

from ...ir.core import NO_LINE, Line, Op, Program, uses
from ..common import walk_body
from ..match import matches

Powers = dict[str, int]  # vector -> power
#: Ops that the scales of an operand can pass. Other ops need the scaled value itself.
FOLLOWED = ("matmul", "decayed_pairs", "mul", "neg", "strictly_lower", "lower", "unit_lower_inverse", "row_sum", "add", "sub")


def times(a: Powers, b: Powers) -> Powers:
    """The product of two products of powers."""
    out = {n: a.get(n, 0) + b.get(n, 0) for n in (*a, *b)}
    return {n: e for n, e in out.items() if e}


def inverse(a: Powers) -> Powers:
    """One divided by a product of powers."""
    return {n: -e for n, e in a.items()}


class Divides(Exception):
    """A value is needed that is held divided by a scale. Scales may be 0."""


class Scaled:
    """The new body of a walk. A value diag(r) y diag(c) is held as y, with the powers of r and of c.

    defs, readers: op of each value of the old body, and the kinds of the ops that read it. made: ops of the new body. whole:
    values that are needed with their scales applied. of: value -> y, scales of its rows, scales of its columns.
    """

    def __init__(self, p: Program) -> None:
        """Finds the values that are needed with their scales: next states, `forgets`, operands of ops that scales cannot pass."""
        loop = p.walk
        self.ops = [o for o in loop.body if isinstance(o, Op)]
        self.defs, self.count = {o.out: o for o in self.ops if o.out}, uses(loop.body)
        self.readers: dict[str, set[str]] = {}
        for o in self.ops:
            for a in o.args:
                self.readers.setdefault(a, set()).add(o.kind)
        self.whole = {c.next for c in loop.carried} | {p.forgets}
        self.whole |= {n for n, kinds in self.readers.items() if not kinds <= set(FOLLOWED)}
        self.b = walk_body(p)
        self.made: dict[str, Op] = {}
        self.of: dict[str, tuple[str, Powers, Powers]] = {}

    def put(self, kind: str, *args: str, name: str = "", line: Line = NO_LINE, **attrs: Any) -> str:
        """Append an op to the new body and return its value."""
        out = self.b.op(kind, *args, name=name, line=line, **attrs)
        last = self.b.stmts[-1]
        if isinstance(last, Op) and last.out == out:
            self.made[out] = last
        return out

    def vector(self, powers: Powers, line: Line) -> str:
        """The vector that is the product of these powers. At least one power is not 0. Divides if one is negative."""
        if min(powers.values()) < 0:
            raise Divides
        out = ""
        for n in (n for n, e in powers.items() for _ in range(e)):
            out = self.put("mul", out, n, line=line) if out else n
        return out

    def rows(self, x: str, v: str, line: Line, name: str = "") -> str:
        """diag(v) x. If x has a column factor and no other reader, v becomes part of that column."""
        o = self.made.get(x)
        if o is not None and self.count.get(x, 1) <= 1:
            for found in matches("c[:, None] * y", o, self.made):
                col = self.put("col", self.put("mul", found["c"], v, line=line), line=line)
                return self.put("mul", col, found["y"], name=name, line=line)
            for i, a in enumerate(o.args if o.kind == "mul" else ()):
                inner = self.made.get(a)
                if inner is not None and inner.kind == "mul" and self.count.get(a, 1) <= 1 and \
                        self.b.types[a].dims == self.b.types[x].dims:
                    args = [self.rows(y, v, line) if i == n else y for n, y in enumerate(o.args)]
                    return self.put("mul", *args, name=name, line=line)
        return self.put("mul", self.put("col", v, line=line), x, name=name, line=line)

    def scaled(self, x: str, rows: Powers, cols: Powers, line: Line, name: str = "") -> str:
        """The value diag(rows) x diag(cols)."""
        if cols:
            x = self.put("mul", x, self.put("row", self.vector(cols, line), line=line), name="" if rows else name, line=line)
        return self.rows(x, self.vector(rows, line), line, name) if rows else x

    def value(self, a: str, line: Line) -> str:
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
