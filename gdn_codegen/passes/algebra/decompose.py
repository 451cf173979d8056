"""decompose: expand ops that no target has.

unit_lower_inverse, by `inverse`:
- "substitution": T = diag_inverse of the blocks that the device solves, b rows each; then T <- T - [T A]_b T doubles b, where
  [X]_b is, of each 2b x 2b diagonal block of X, the lower left b x b block. [T A]_b = T [A]_b, but A is one operand for all b.
  T is rounded after each step. Where the device solves no blocks, "doubling"; where it solves whole tiles, nothing is merged.
- "doubling": T = I; for b = 1, 2, 4... T <- T - T A_b T, where A_b holds, of each 2b x 2b diagonal block of A, the lower
  left b x b block. T is then the inverse of I + (A's diagonal 2b-blocks): block forward substitution, all blocks at once.
The plain product (I - A)(I + A^2)(I + A^4)... is not offered, neither over the chunk nor over blocks of 16 rows. With equal keys
the entries of A^32 reach binomial(62, 31) = 5e17, and in a block those of A^8 reach 3432 * 2^8 at beta = 2: no digit is left.

With `block`, diagonal blocks of that size are inverted apart, T0 and T1, by products of that size, and a chunk of two is
the tile of T0, 0, -T1 A10 T0, T1. Entries are the same: the other blocks of the products above are zero.

Of other ops the op table has the decomposition (OpDef.decompose).
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ...ir.builder import Body
from ...ir.core import Op, Program, uses
from ...ir.ops import OPS
from ...schedule.schedule import Schedule
from ..common import rebuild_kernels
from ..stage import takes
from ..storage.offsets import WIDTH


@takes("typed", gives="decomposed")
def decompose(p: Program, s: Schedule, dtype: str, solves: int = 0, whole: int = 0, block: int = 0) -> Program:
    """Expand the ops named above; products of the inverse take operands in `dtype`, that of q. solves, whole: the device's."""
    size = p.sizes["C"]
    how = "doubling" if s.inverse == "substitution" and not solves else s.inverse

    def rule(o: Op, b: Body, count: dict[str, int]) -> str | None:
        if o.kind == "unit_lower_inverse":
            inverse = _Inverse(o, b, dtype)
            if how == "substitution":
                alone = size == whole and WIDTH[dtype] == 2 and count[o.args[0]] == 1  # it overwrites its operand
                return inverse.by_substitution(whole if alone else solves, size)
            return inverse.by_blocks(block) if block and size == 2 * block else inverse.by_doubling(size)
        made = OPS[o.kind].decompose
        return made(o, b) if made else None

    return rebuild_kernels(p, lambda k: partial(rule, count=uses(k.body)))


class _Inverse:
    """The ops that compute one inverse, T of A, with products whose operands are `operand`."""

    def __init__(self, o: Op, b: Body, operand: str) -> None:
        self.o, self.b, self.operand, self.a = o, b, operand, o.args[0]
        self.dims = b.types[self.a].dims

    def op(self, kind: str, *args: str, name: str = "", **attrs: Any) -> str:
        return self.b.op(kind, *args, line=self.o.line, name=self.b.fresh(f"{self.o.out}_{name}") if name else "", **attrs)

    def cast(self, x: str, to: str = "") -> str:
        to = to or self.operand
        return x if self.b.types[x].dtype == to else self.op("cast", x, to=to)

    def product(self, x: str, y: str, plus: str = "", name: str = "") -> str:
        """x @ y, or `plus` and that: of the inverse whose diagonal blocks have as many rows as `name` says, or part of it."""
        xy = self.op("matmul", self.cast(x), self.cast(y), name=f"{name}_part" if plus else name)
        return self.op("add", self.cast(plus, "float32"), xy, name=name) if plus else xy

    def eye(self) -> str:
        return self.op("eye", dims=self.dims)

    def pairs(self, x: str, size: int) -> str:
        return self.op("pairs", x, size=size)

    def named(self, value: str) -> str:
        """Give the value of the last statement the inverse's name."""
        b, name = self.b, self.o.out
        last = b.stmts[-1]
        assert isinstance(last, Op) and last.out == value
        b.stmts[-1] = replace(last, out=name)
        b.types[name] = b.types.pop(value)
        for key, x in list(b._seen.items()):
            if x == value:
                b._seen[key] = name
        return name

    def by_doubling(self, size: int) -> str:
        minus = self.op("neg", self.a)
        t, done = self.op("add", self.eye(), self.pairs(minus, 1), name="rows_2"), 2
        while done < size:
            below = self.product(self.pairs(minus, done), t, name=f"below_{2 * done}")
            t = self.product(t, below, plus=t, name=f"rows_{2 * done}")
            done *= 2
        return self.named(t)

    def by_substitution(self, solves: int, size: int) -> str:
        done, a = min(solves, size), self.cast(self.a)
        t = self.op("diag_inverse", a, size=done, name=f"rows_{done}")
        while done < size:
            below = self.product(t, a, name=f"below_{2 * done}")
            t = self.product(self.op("neg", self.pairs(below, done)), t, plus=t, name=f"rows_{2 * done}")
            done *= 2
        return self.named(self.cast(t, "float32"))

    def by_blocks(self, size: int) -> str:
        """Of two blocks of `size` rows, each inverted apart."""
        minus, corners, done = self.op("neg", self.a), (0, size), 2

        def block(x: str, row: int, col: int) -> str:
            return self.op("block", self.cast(x), row=row, col=col, size=size)

        start = self.op("add", self.eye(), self.pairs(minus, 1), name="rows_2")
        ts = [block(start, i, i) for i in corners]
        while done < size:
            below = self.pairs(minus, done)
            halves = [self.product(block(below, i, i), t, name=f"below_{2 * done}") for i, t in zip(corners, ts, strict=True)]
            ts = [self.product(t, x, plus=t, name=f"rows_{2 * done}") for t, x in zip(ts, halves, strict=True)]
            done *= 2
        below = self.pairs(minus, size)
        corner = self.product(ts[1], self.product(block(below, size, 0), ts[0], name="below"), name="corner")
        zero = self.product(block(below, 0, size), ts[1], name="zero")
        ts = [self.cast(t, "float32") for t in ts]
        return self.named(self.op("from_quarters", ts[0], zero, corner, ts[1], dims=self.dims, name="whole"))
