"""columns: moves a column factor through an inverse, for the forms split and unit.

For a column b, (I + b * N)^-1 @ (b * Y) equals b * delta with delta = (I + N * b^T)^-1 @ Y. Readers of the product then read
delta, and b multiplies their other, state-free operand. So no column scales the inverse itself. An inverse that is rounded to
16 bit is still close to the inverse of a nearby matrix. A scaled inverse is not, and the error shows if keys are similar.

Where some reader needs b * delta itself, since its other operand cannot be scaled so, all readers read that. Else b * delta and
delta would both be rounded and take registers, and an operand would be rounded once more.
"""
from __future__ import annotations

from ....ir.body import Body
from ....ir.core import Line, Loop, Op, types, uses
from ....schedule.schedule import Schedule
from ...match import matched
from .terms import factors, is_plain, ops, product


class Through:
    """Copies ops to `b`. A column that goes through an inverse moves to the readers of the product. columns: the result of
    `columns`."""

    def __init__(self, b: Body, loop: Loop, columns: dict[str, tuple[str, list[str]]]) -> None:
        self.b, self.columns = b, columns
        self.defs, self.tile = {o.out: o for o in ops(loop)}, types(loop.body)
        self.scaled: dict[str, tuple[str, str]] = {}  # a product x[:, None] * z -> (x, z)
        #: Products that some reader needs as they are.
        self.whole = {n for o in ops(loop) for n in o.args
                      if n in columns and not self.scales_tile(o, n) and not self.scales_column(o, n)}

    def by_row(self, of: list[str], x: str, line: Line) -> str:
        """The product of the factors, where x[None, :] multiplies the last factor that is a tile."""
        at = max(n for n, f in enumerate(of) if self.tile[f].dims == ("C", "C"))
        new = self.b.op("mul", of[at], self.b.op("row", x, line=line), line=line)
        return product(self.b, [*of[:at], new, *of[at + 1:]], line)

    def multiplied(self, o: Op, z: str) -> None:
        """Compute the product `o` as its column times z."""
        x = self.columns[o.out][0]
        self.scaled[o.out] = x, z
        self.b.op("mul", self.b.op("col", x, line=o.line), z, line=o.line, name=o.out)

    def scales_tile(self, o: Op, n: str) -> bool:
        """Whether `o` is a product of a tile of tokens x tokens and `n`, so that n's column may multiply the tile."""
        return is_plain(o) and o.args[1] == n and self.tile[o.args[0]].dims == ("C", "C")

    def scales_column(self, o: Op, n: str) -> bool:
        """Whether `o` is a column times `n`, so that n's column may multiply that one."""
        return o.kind == "mul" and o.args[1] == n and o.args[0] in self.defs and self.defs[o.args[0]].kind == "col"

    def copy(self, o: Op) -> None:
        """Copy an op. If it reads a product that was x[:, None] * z, x multiplies the op's other operand, unless the product is
        in `whole`."""
        b, defs, tile = self.b, self.defs, self.tile
        n = o.args[1] if o.args[1:] else ""
        moved = n in self.scaled and n not in self.whole
        if o.kind == "strictly_lower" and o.out in self.columns:
            x, of = self.columns[o.out]
            b.op("strictly_lower", self.by_row(of, x, o.line), line=o.line, name=o.out)
        elif moved and self.scales_tile(o, n):
            x, z = self.scaled[n]
            of = factors(o.args[0], defs)
            if not any(tile[f].dims == ("C", "C") for f in of):
                of = [o.args[0]]
            b.op("matmul", self.by_row(of, x, o.line), z, line=o.line, name=o.out)
        elif moved and self.scales_column(o, n):
            x, z = self.scaled[n]
            both = b.op("mul", defs[o.args[0]].args[0], x, line=o.line)
            b.op("mul", b.op("col", both, line=o.line), z, line=o.line, name=o.out)
        else:
            b.copy(o)


def columns(s: Schedule, loop: Loop) -> dict[str, tuple[str, list[str]]]:
    """The products U = (I + A)^-1 @ (x[:, None] * Y) with A = strictly_lower(x[:, None] * N), where A and the inverse have no
    other reader.

    By the name of A: x and the factors of N. By the name of U: x and the factors of Y.
    """
    defs, count, tile = {o.out: o for o in ops(loop)}, uses(loop.body), types(loop.body)
    named = {n for g in s.kernels for n in g}
    found = {}
    for o in defs.values():
        parts = matched("unit_lower_inverse(strictly_lower(a)) @ y", o, defs)
        inverse = o.args[0] if parts else ""
        low_of = defs[inverse].args[0] if parts else ""
        if parts is None or count[inverse] > 1 or count[low_of] > 1 or named & {o.out, inverse, low_of}:
            continue
        low, high = factors(parts["a"], defs), factors(parts["y"], defs)
        column = next((f for f in low if f in defs and defs[f].kind == "col" and f in high), "")
        if column:
            low.remove(column)
            high.remove(column)
            if any(tile[f].dims == ("C", "C") for f in low) and any(tile[f] == tile[o.args[1]] for f in high):
                found.update({low_of: (defs[column].args[0], low), o.out: (defs[column].args[0], high)})
    return found
