"""Storage of a kernel's values, their elements, and loops over tiles."""
from __future__ import annotations

import keyword
from collections.abc import Callable
from dataclasses import dataclass

from ...ir.core import Buffer
from ...ir.ops import ORDER
from ...ir.types import Dim
from ..base import CLEAR, EVERY, SUMMED, Kernel, Op, Program, Text, Writer, strides, touched, wrapped
from .addresses import Addresses

WIDTH = 120
#: Names of the kernels' own text, which no value may take.
OWN = {"T", "t", "tilelang", "torch", "i", "j", "n", "hv", "h", "b", "block", "start", "length", "chunk", "row", "rows", "slot",
       "cu_seqlens", "batched", "B", "L", "H", "HV", "slots", "ends", "parts", "part", "earlier", "span", "size", "first",
       "begin", "stop", "nth", "checkpoint", "both", "half", "group", "room", "low", "high", "rest", EVERY, SUMMED}
#: Words of C++, in which a kernel's parameters keep their names.
OWN |= set("""auto bool case catch char const default delete do double enum explicit export extern float friend goto half inline
int long mutable namespace new operator private protected public register short signed sizeof static struct switch template this
throw typedef typename union unsigned using virtual void volatile""".split())


@dataclass(frozen=True)
class Value:
    """`at` gives a value's element at some indices; `buffer` names its storage, "" for an expression. literal: of a constant."""

    dims: tuple[Dim, ...]
    dtype: str
    at: Callable[..., Text]
    buffer: str = ""
    literal: bool = False


class Tiles(Addresses):
    """The values of one kernel. `order` says which thread has which element in the loops of the op at hand."""

    across = "HV", "hv"  # what the grid has of heads, and a block's index into it

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        super().__init__(p, k, layout)
        self.sizes = {**p.sizes, **k.sizes}
        self.buffers = {x.name: x for x in k.buffers}
        self.env: dict[str, Value] = {}
        self.order = "parallel"  # of the prelude
        if k.lanes > 1:
            self.across = f"T.truncdiv(HV, {k.lanes})", "group"
        self.taken = OWN | set(p.sizes) | {f"B{d}" for d in p.sizes} | set(self.params.values()) | {f"P{d}" for d, _ in p.extents}
        self.taken |= {x for t in touched(p, k) for x in strides(t)}
        self.taken |= {f"{y}_{x}" for x in self.params for y in ("has", "n", CLEAR[:-1])}
        self.taken |= {f"{x}_{y}" for x in self.params for y in ("stride", "n")}
        self.w = Writer(p, "#", 2, k)

    def name(self, value: str) -> str:
        """The variable of a buffer or a number, out of the way of the kernel's own names."""
        out = value
        while out in self.taken or keyword.iskeyword(out) or (out != value and out in self.buffers):
            out += "_"
        return out

    def stored(self, o_dims: tuple[Dim, ...], buffer: str) -> Value:
        """A value in a buffer, indexed by its dims."""
        name = self.name(buffer)

        def at(*index: str) -> Text:
            return Text(f"{name}[{', '.join(index)}]" if index else name)
        return Value(o_dims, self.buffers[buffer].dtype, at, buffer)

    def loop(self, dims: tuple[Dim, ...]) -> tuple[str, ...]:
        """Open a parallel loop over a tile; the indices of its element. The caller closes it with `end`."""
        if not dims:
            return ()
        index = ("i", "j")[: len(dims)]
        self.line(f"for {', '.join(index)} in t.{self.order}({', '.join(self.dim(d) for d in dims)}):")
        self.w.indent += 1
        return index

    def end(self, dims: tuple[Dim, ...]) -> None:
        """Close what `loop` opened."""
        self.w.indent -= bool(dims)

    def fill(self, to: Value, x: Value) -> None:
        """One loop that fills the storage of `to` with `x`, element by element."""
        index = self.loop(to.dims)
        self.line(f"{to.at(*index)} = {element(x, to.dims, index)}")
        self.end(to.dims)

    def about(self, o: Op) -> None:
        """Address tensors of the value head that `o` is of, and loop in its order."""
        if self.k.lanes > 1:
            self.hv = f"hv + {o.attr('lane')}" if o.attr("lane") else "hv"
        self.order = "as_sums" if o.attr(ORDER) == "sums" else "parallel"

    def line(self, text: str) -> None:
        """Print a line, wrapped to the width of the file."""
        self.w(*wrapped(text, WIDTH - 4 * self.w.indent))

    def allocation(self, x: Buffer) -> str:
        """The line that allocates a buffer in its space and layout."""
        if not x.shape:
            return f"{self.name(x.name)} = T.alloc_var({self.dtype(x.dtype)})"
        dims = [self.dim(d) for d in x.dims]
        shape = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
        if x.layout == "rows":
            return f"{self.name(x.name)} = t.rows({shape}, {self.dtype(x.dtype)}, {self.k.threads})"
        return f"{self.name(x.name)} = t.{'staged' if x.layout == 'swizzled' else x.space}({shape}, {self.dtype(x.dtype)})"


def element(x: Value, dims: tuple[Dim, ...], index: tuple[str, ...]) -> Text:
    """`x`, broadcast to `dims`, at `index`."""
    if not x.dims:
        return x.at()
    return x.at(*("0" if d == 1 and full != 1 else i for d, full, i in zip(x.dims, dims, index, strict=True)))
