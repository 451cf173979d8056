"""whole_vectors: gives each core all entries of a vector where an op needs them. Only devices with cores (PTO) run it.

Each vector core holds some rows of a tile. So `row_sum` of a tile gives a core the sums of its rows only, and what is computed of
them elementwise is divided, too. Some ops need all entries: a running sum, an entry, a row that broadcasts, a sum of the vector.
The core that multiplies has all rows. So this pass makes products, whose last row `transfer` loads to each core:
- A divided vector v becomes a tile X of equal columns. Its entries are a row of I @ X.T with a small identity I, its running sums
  one of X.T @ L.T with a lower triangle L of ones, and its sum is an entry of X.T @ E.T, where E has few rows of ones.
- `column_sum` of a tile is the last of its running sums.

Products with zeros and ones are exact. The pass also replaces ops that vector cores lack: `diagonal` is `row_sum` of a masked
tile, and the sum of a whole vector is a row sum of a tile whose rows are the vector.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Op, Program
from ...ir.ops import OPS
from ...ir.types import Tensor
from ..common import rebuild_kernel, with_tensors
from ..stage import takes
from .across_rows import constant
from .vectorise import bounded

COLUMNS = 16  # of a tile that holds a vector: the least that a product takes
ROWS = 8  # of a tile whose rows are one vector, so that its row sums fill 32 bytes


@takes("decomposed")
def whole_vectors(p: Program) -> Program:
    """`p` with products that make divided vectors whole. The constant tiles are added as tensors."""
    made: dict[str, Tensor] = {}
    kernels = tuple(rebuild_kernel(p, k, _WholeVectors(made)) for k in p.kernels)
    return with_tensors(replace(p, kernels=kernels), *made.values())


class _WholeVectors:
    """The rule for one kernel. made: the constant tiles so far, by name; the rule adds to it.

    divided: the vectors of which each core has a part. whole: divided vector -> the same as a whole.
    """

    def __init__(self, made: dict[str, Tensor]) -> None:
        self.made, self.divided, self.whole = made, set[str](), dict[str, str]()

    def __call__(self, o: Op, b: Body) -> str | None:
        """Puts the replacement of `o` into `b` and returns the name of its value. None if it stays."""
        x = o.args[0] if o.args else ""
        rank = b.types[x].rank if x else -1
        if o.kind == "column_sum":
            return b.op("last", b.op("cumsum", x, line=o.line), name=o.out, line=o.line)
        if o.kind == "diagonal":
            eye = b.op("eye", dims=b.types[x].dims, line=o.line)
            self.divided.add(o.out)
            return b.op("row_sum", b.op("mul", x, eye, line=o.line), name=o.out, line=o.line, diagonal=True)
        if o.kind == "row_sum" and rank == 2:
            self.divided.add(o.out)
        elif o.kind == "row_sum":
            return b.op("last", self.sums(o, b), name=o.out, line=o.line)
        elif o.kind == "cumsum" and x in self.divided:
            return self.product(o, b, bounded(o, b), "strictly_lower" if o.attr("exclusive") else "lower", o.out)
        elif rank == 1 and (OPS[o.kind].entry or o.kind in ("row", "segment")) and x in self.divided:
            if x not in self.whole:
                self.whole[x] = self.product(o, b, x, "eye")
            return b.op(o.kind, self.whole[x], name=o.out, line=o.line, **dict(o.attrs))
        elif OPS[o.kind].elementwise and o.type is not None and o.type.rank == 1 and not self.divided.isdisjoint(o.args):
            self.divided.add(o.out)
        return None

    def sums(self, o: Op, b: Body) -> str:
        """A vector whose last entry is the sum of the vector that `o` sums."""
        x = o.args[0]
        if x in self.divided:
            return self.product(o, b, x, "ones")
        rows = b.op("expand", b.op("row", x, line=o.line), dims=(ROWS, *b.types[x].dims), line=o.line)
        return b.op("row_sum", rows, line=o.line)

    def product(self, o: Op, b: Body, x: str, kind: str, name: str = "") -> str:
        """The last row of a product with X, whose columns are the vector `x`. kind: "eye" for the vector, "lower" or
        "strictly_lower" for its running sums, "ones" for its sum in each entry."""
        (dim,) = b.types[x].dims
        tile = b.op("expand", b.op("col", x, line=o.line), dims=(dim, COLUMNS), line=o.line)
        rows = COLUMNS if kind in ("eye", "ones") else dim
        fill = "lower 1.0 1.0" if kind == "ones" else f"{kind} 1.0 0.0"
        ones = constant(b, fill, (rows, COLUMNS if kind == "eye" else dim), self.made, o.line)
        product = b.op("matmul", *((ones, tile) if kind == "eye" else (tile, ones)), line=o.line, ta=kind != "eye", tb=True)
        return b.op("last", product, name=name, line=o.line)
