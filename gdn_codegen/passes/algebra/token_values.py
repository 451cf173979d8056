"""token_values: what an op computes where a chunk has one token. The pass `single_token` uses it."""
from __future__ import annotations

from ...ir.core import Op
from ...ir.ops import OPS
from .token_ops import TokenOps


class TokenValue(TokenOps):
    """The value of one op without the axis of tokens. A method named after an op makes it, `elementwise` that of other ops."""

    # --- ops whose operand becomes the result, or a constant ---
    def operand(self) -> str:
        """The operand, which has become the result."""
        return self.o.args[0]

    col = row = lower = diagonal = diagonal_blocks = operand

    def strictly_lower(self) -> str:
        """What masked entries become: the only entry is on the diagonal."""
        return self.constant(float(self.o.attr("fill", 0.0)))

    pairs = strictly_lower

    def eye(self) -> str:
        """1, also for the inverse of I + 0."""
        return self.constant(1.0)

    unit_lower_inverse = eye

    def valid(self) -> str | None:
        """The operand: a chunk of one token has no rows past the end."""
        return None if self.o.attr("given") else self.o.args[0]

    def last(self) -> str:
        """The operand: of a tile [C, K] a vector. Of a tile [K, C] the last entry of the operand."""
        x = self.o.args[0]
        return x if self.before[0].dims[0] == "C" else self.put("last", x, name=self.o.out)

    def full(self) -> str:
        """A vector, or a number."""
        value = self.o.attr("value")
        return self.put("full", dims=self.dims, value=value, name=self.o.out) if self.dims else self.constant(float(value))

    def expand(self) -> str:
        """A broadcast vector, or the operand."""
        x = self.flat(self.o.args[0])
        return self.put("expand", x, dims=self.dims, name=self.o.out) if self.dims else x

    # --- sums ---
    def cumsum(self) -> str:
        """The one term, with its lower bound; without the token itself zeros."""
        if self.o.attr("exclusive"):
            return self.put("full", dims=self.dims, value=0.0, name=self.o.out) if self.dims else self.constant(0.0)
        least = self.o.attr("least")
        return self.o.args[0] if least is None else self.put("maximum", self.o.args[0], self.constant(least), name=self.o.out)

    def row_sum(self) -> str:
        """The sum of a vector [K], once a row of a tile [C, K]. The sum over the one token is the operand."""
        return self.o.args[0] if self.before[0].dims[1] == "C" else self.put("row_sum", self.o.args[0], name=self.o.out)

    def row_norm(self) -> str:
        """x / sqrt(sum(x * x) + eps). The sum is over a vector [K], once a row of a tile [C, K]. A row of a tile [K, C] has one
        entry."""
        (x,) = self.o.args
        square = self.put("mul", x, x)
        total = square if self.before[0].dims[1] == "C" else self.put("row_sum", square)
        inv = self.put("rsqrt", self.put("add", total, self.constant(float(self.o.attr("eps", 1e-6)))))
        return self.put("mul", x, inv, name=self.o.out)

    def matmul(self) -> str:
        """A product as elementwise products and a sum: over the contracted dim, if that is not the axis of tokens."""
        (a, x), acc = self.o.args[:2], self.o.args[2:]
        left, right = self.before[:2]
        m, inner = left.dims[::-1] if self.o.attr("ta") else left.dims
        n = right.dims[0 if self.o.attr("tb") else 1]
        name = "" if acc else self.o.out
        if inner == "C":
            out = self.outer(a, x, name)
        elif m == n == "C":
            out = self.put("row_sum", self.put("mul", a, x), name=name)
        else:
            vector, tile, lies = (a, x, self.o.attr("tb")) if m == "C" else (x, a, not self.o.attr("ta"))
            kind, view = ("row_sum", "row") if lies else ("column_sum", "col")
            out = self.put(kind, self.put("mul", self.put(view, vector), tile), name=name)
        return self.put("add", acc[0], out, name=self.o.out) if acc else out

    def outer(self, a: str, x: str, name: str) -> str:
        """The product of two values of one token: of a column and a row if both are vectors."""
        for one, other in ((a, x), (x, a)):
            if self.is_constant(one, 1.0):
                return other
        if all(self.b.types[y].rank for y in (a, x)):
            a, x = self.put("col", a), self.put("row", x)
        return self.put("mul", a, x, name=name)

    # --- elementwise ops ---
    def flat(self, a: str) -> str:
        """`a` as a vector, if it is a row or a column and the result is a vector."""
        t = self.b.types[a]
        if t.rank != 2 or len(self.dims) != 1:
            return a
        for o in self.b.stmts:
            if isinstance(o, Op) and o.out == a and o.kind in ("row", "col"):
                return o.args[0]
        return self.put("column_sum" if t.dims[0] == 1 else "row_sum", a)

    def elementwise(self) -> str:
        """The op on operands without the axis of tokens. Values that do not depend on the inputs become constants."""
        assert OPS[self.o.kind].elementwise, self.o.kind
        args = tuple(self.flat(a) for a in self.o.args)
        if self.o.kind == "sub" and args[0] == args[1]:
            return self.constant(0.0)
        if self.o.kind == "exp" and self.is_constant(args[0], 0.0):
            return self.constant(1.0)
        if self.o.kind == "mul":
            for a, x in (args, args[::-1]):
                if self.is_constant(a, 1.0):
                    return x
        return self.put(self.o.kind, *args, name=self.o.out, **dict(self.o.attrs))
