"""Writes one kernel in which a thread block runs the instances of several value heads.

Each buffer has a row for each head, and each loop also iterates over the heads.
"""
from __future__ import annotations

from ...ir.core import Buffer
from ...ir.types import Dim, Tensor
from ..base import Op, Rules, Text
from .kernel import KernelWriter
from .rules import least
from .rules import rule as base
from .tiles import Value

rule = Rules("tilelang", base=base)


class HeadsWriter(KernelWriter):
    """Writes one kernel. For heads past the last, loads give zeros and stores have no effect."""

    rules = rule
    hv, there = "hv + j", "hv + j < HV"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.across = f"T.ceildiv(HV, {self.k.batch.heads})", "block"
        self.by_token = False  # whether heads, not tokens, are the inner index of a loop

    def head(self) -> None:
        """Print the kernel's head, and the first of the block's value heads."""
        super().head()
        self.w(f"hv = block * {self.k.batch.heads}")

    def stored(self, o_dims: tuple[Dim, ...], buffer: str) -> Value:
        """A value in a buffer with a row for each head."""
        name = self.name(buffer)
        return Value(o_dims, self.buffers[buffer].dtype, lambda *index: Text(f"{name}[{', '.join(['j', *index])}]"), buffer)

    def loop(self, dims: tuple[Dim, ...]) -> tuple[str, ...]:
        """Open a loop over heads and the entries of `dims`. Returns the indices of `dims`."""
        index, extents = ("i",)[:len(dims)], [self.dim(d) for d in dims]
        order = slice(None, None, -1 if self.by_token else 1)
        inside, sizes = ["j", *index][order], [str(self.k.batch.heads), *extents][order]
        self.line(f"for {', '.join(inside)} in t.parallel({', '.join(sizes)}):")
        self.w.indent += 1
        return index

    def end(self, dims: tuple[Dim, ...]) -> None:
        """Close what `loop` opened."""
        self.w.indent -= 1

    def inside(self, t: Tensor, index: tuple[str, ...]) -> list[str]:
        """The conditions under which an entry exists in memory. One of them is that the head exists."""
        return [*super().inside(t, index), self.there]

    def allocation(self, x: Buffer) -> str:
        """The line that allocates a buffer, with a row for each head."""
        dims = [str(self.k.batch.heads), *(f"{self.dim(d)} + {x.pad}" for d in x.dims)]
        return f"{self.name(x.name)} = t.{x.space}(({', '.join(dims)}{',' if len(dims) == 1 else ''}), {self.dtype(x.dtype)})"


@rule("load", statement=True)
def load(w: HeadsWriter, o: Op) -> None:
    w.by_token = w.layout == "bthd"  # in the order of memory
    base.of(o)(w, o)
    w.by_token = False


@rule("cumsum", statement=True)
def cumsum(w: HeadsWriter, o: Op, x: Value) -> None:
    w.line(f"t.row_cumsum({', '.join([w.name(x.buffer), w.name(o.buffer), w.dim(x.dims[0]), *least(o)])})")


@rule("scalar")
def scalar(w: HeadsWriter, o: Op) -> object:
    at = base.of(o)(w, o)
    return (lambda: Text(f"T.if_then_else({w.there}, {at()}, 0)")) if o.attr("tensor") else at
