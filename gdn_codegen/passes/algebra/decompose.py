"""decompose: replaces ops that no target implements. All targets run it.

`unit_lower_inverse` computes T = (I + A)^-1 of a strictly lower A. The schedule's option `inverse` chooses the method:
- "substitution": `diag_inverse` inverts the diagonal blocks of b rows that the device solves. Then T <- T - [T A]_b T doubles
  b. Here [X]_b keeps the lower left b x b block of each 2b x 2b diagonal block of X. [T A]_b equals T [A]_b, but A is then the
  same operand for all b. T is rounded after each step. A device that solves no blocks uses "doubling". A device
  that solves whole tiles needs no merging.
- "doubling": T = I. For b = 1, 2, 4, ...: T <- T - T A_b T, where A_b keeps the lower left b x b block of each 2b x 2b diagonal
  block of A. After a step T is the inverse of I + (the diagonal 2b-blocks of A). This is block forward substitution on all
  blocks at once.

The plain product (I - A)(I + A^2)(I + A^4)... is not offered, neither for a chunk nor for blocks of 16 rows. If the keys are
equal, entries of A^32 reach binomial(62, 31) = 5e17. In a block, entries of A^8 reach 3432 * 2^8 at beta = 2. No correct digit
remains.

A device that inverts blocks separately (`Device.inverts_blocks`) computes a chunk of two blocks by products of the block's size.
T0 and T1 are the inverses of the diagonal blocks. The result has the blocks T0, 0, -T1 A10 T0, T1. Its entries are the same,
because the other blocks of the products are zero. Blocks of 16 rows are inverted as a stack and merged pair by pair
(`stacked_inverse`), if operands have 16 bits.

For other ops the op table has the replacement (`OpDef.decompose`).
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ...devices import Device
from ...ir.body import Body
from ...ir.core import Op, Program, uses
from ...ir.names import DTYPES
from ...ir.ops import OPS
from ...ir.types import BYTES, Tensor
from ...schedule.schedule import Schedule
from ..common import rebuild_kernels, with_tensors
from ..stage import takes
from .stacked_inverse import ROWS, stacked, stacks


@takes("typed", gives="decomposed")
def decompose(p: Program, s: Schedule, dtype: str, device: Device) -> Program:
    """`p` without `unit_lower_inverse` and the other ops that have a replacement.

    dtype: that of q, and of the operands of the inverse's products. device: says which blocks and tiles it inverts itself, and
    whether diagonal blocks are inverted separately.
    """
    size, solves, whole = p.sizes["C"], device.solves, device.solves_whole
    block = s.inverse_block if device.inverts_blocks else 0
    in_stacks = stacked(size, s, dtype, device)
    if block == ROWS and not in_stacks:
        block = min(size // 2, 64) if size > ROWS else 0
    made: dict[str, Tensor] = {}
    how = "doubling" if s.inverse == "substitution" and not solves else s.inverse

    def rule(o: Op, b: Body, count: dict[str, int]) -> str | None:
        """What replaces an op."""
        if o.kind == "unit_lower_inverse":
            inverse = Inverse(o, b, dtype, made)
            if in_stacks:
                return stacks(inverse, size)
            if how == "substitution":
                alone = size == whole and BYTES[dtype] == 2 and count[o.args[0]] == 1  # the device's solve overwrites its operand
                return inverse.by_substitution(whole if alone else solves, size)
            return inverse.by_blocks(block) if block and size == 2 * block else inverse.by_doubling(size)
        simpler = OPS[o.kind].decompose
        return simpler(o, b) if simpler else None

    return with_tensors(rebuild_kernels(p, lambda k: partial(rule, count=uses(k.body))), *made.values())


class Inverse:
    """The ops that compute one inverse T of A. operand: the dtype of the operands of its products. made: constant tiles by name,
    to which it may add."""

    def __init__(self, o: Op, b: Body, operand: str, made: dict[str, Tensor]) -> None:
        self.o, self.b, self.operand, self.a, self.made = o, b, operand, o.args[0], made
        self.dims = b.types[self.a].dims

    def op(self, kind: str, *args: str, name: str = "", **attrs: Any) -> str:
        """Append an op. name: what follows the name of the inverse in that of its value."""
        return self.b.op(kind, *args, line=self.o.line, name=self.b.fresh(f"{self.o.out}_{name}") if name else "", **attrs)

    def cast(self, x: str, to: str = "") -> str:
        """`x` in the dtype `to`, by default that of operands."""
        to = to or self.operand
        return x if self.b.types[x].dtype == to else self.op("cast", x, to=to)

    def product(self, x: str, y: str, plus: str = "", name: str = "", **attrs: Any) -> str:
        """x @ y, or plus + x @ y. name: says how many rows the diagonal blocks of the result have, or which part of the inverse
        it is. attrs: of the product."""
        xy = self.op("matmul", self.cast(x), self.cast(y), name=f"{name}_part" if plus else name, **attrs)
        return self.op("add", self.cast(plus, "float32"), xy, name=name) if plus else xy

    def pairs(self, x: str, size: int) -> str:
        """`x` with only the lower left block of each diagonal block of 2 * size rows."""
        return self.op("pairs", x, size=size)

    def named(self, value: str) -> str:
        """Give the result of the last statement the name of the inverse."""
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
        """The inverse by the method "doubling"."""
        minus = self.op("neg", self.a)
        t, done = self.op("add", self.op("eye", dims=self.dims), self.pairs(minus, 1), name="rows_2"), 2
        while done < size:
            below = self.product(self.pairs(minus, done), t, name=f"below_{2 * done}")
            t = self.product(t, below, plus=t, name=f"rows_{2 * done}")
            done *= 2
        return self.named(t)

    def by_substitution(self, solves: int, size: int) -> str:
        """The inverse by the method "substitution". solves: rows of the blocks that `diag_inverse` inverts."""
        done, a = min(solves, size), self.cast(self.a)
        t = self.op("diag_inverse", a, size=done, name=f"rows_{done}" if done < size else DTYPES[self.b.types[a].dtype])
        while done < size:
            below = self.product(t, a, name=f"below_{2 * done}")
            t = self.product(self.op("neg", self.pairs(below, done)), t, plus=t, name=f"rows_{2 * done}")
            done *= 2
        return self.named(self.cast(t, "float32"))

    def by_blocks(self, size: int) -> str:
        """The inverse of a tile of two blocks of `size` rows. Each diagonal block is inverted separately."""
        minus, corners, done = self.op("neg", self.a), (0, size), 2

        def block(x: str, row: int, col: int) -> str:
            return self.op("block", self.cast(x), row=row, col=col, size=size)

        start = self.op("add", self.op("eye", dims=self.dims), self.pairs(minus, 1), name="rows_2")
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
