"""The storage of a kernel's values, the elements of values, and loops over tiles."""
from __future__ import annotations

import keyword
from collections.abc import Callable
from dataclasses import dataclass

from ...ir.core import Buffer
from ...ir.ops import ORDER
from ...ir.types import Dim
from ..base import (
    AT_A_TIME,
    CLEAR,
    EVERY,
    INSTANCES,
    LEAST_SPAN,
    PART,
    SUMMED,
    UNITS,
    Kernel,
    Op,
    Program,
    Text,
    Writer,
    strides,
    touched,
    wrapped,
)
from .addresses import Addresses

WIDTH = 120
BELOW = "below"  # the variable with the result of `t.below_diagonal`
#: Names that the text of kernels uses, so that no value may have them.
OWN = {"T", "t", "tilelang", "torch", "i", "j", "n", "hv", "h", "b", "block", "start", "length", "chunk", "passed", "row",
       "rows", "slot", "cu_seqlens", "batched", "B", "L", "H", "HV", "slots", "ends", "parts", "part", "earlier", "span",
       "chosen", "first", "begin", "stop", "row_next", "rows_next", "slice_index", "checkpoint", "pair_index", "half",
       "instance", "outer_2", "outer_3", "group", "row_end", "past", "share", "block_number", "clear_begin", "clear_end", "rest",
       "first_instance", "iteration", "iterations_before", "items_before", "tails_before", "turn", "lane", "run", "step",
       "piece", "rank", "of_part", EVERY, SUMMED, PART, AT_A_TIME, LEAST_SPAN, INSTANCES, UNITS, BELOW}
#: Keywords of C++. Parameters of a kernel keep their names in the C++ that TileLang generates.
OWN |= set("""auto bool case catch char const default delete do double enum explicit export extern float friend goto half inline
int long mutable namespace new operator private protected public register short signed sizeof static struct switch template this
throw typedef typename union unsigned using virtual void volatile""".split())


@dataclass(frozen=True)
class Value:
    """A value. at: a function that gives the element at some indices. buffer: the name of its storage, "" for an expression."""

    dims: tuple[Dim, ...]
    dtype: str
    at: Callable[..., Text]
    buffer: str = ""


class Tiles(Addresses):
    """The values of one kernel. order: the device function of loops that assigns elements to threads, for the current op. warps:
    how many warps run the op, each for another iteration."""

    across = "HV", "hv"  # the size of the grid's dim for heads, and the variable with a block's index in it

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        """No value has storage yet. `taken` has the names that the kernel's head uses. layout: "bthd" or "bhtd"."""
        super().__init__(p, k, layout)
        self.sizes = {**p.sizes, **k.sizes}
        self.buffers = {x.name: x for x in k.buffers}
        self.env: dict[str, Value] = {}
        self.order, self.warps = "parallel", 1
        if k.batch.way == "key_head":
            self.across = f"T.truncdiv(HV, {k.batch.heads})", "group"
        self.taken = OWN | set(p.sizes) | {f"B{d}" for d in p.sizes} | set(self.params.values()) | {f"P{d}" for d, _ in p.extents}
        self.taken |= {x for t in touched(p, k) for x in strides(t)}
        self.taken |= {f"{y}_{x}" for x in self.params for y in ("has", "n", CLEAR[:-1])}
        self.taken |= {f"{x}_{y}" for x in self.params for y in ("stride", "n", "t", "width", "parent")}
        self.w = Writer(p, "#", 2, k)

    def name(self, value: str) -> str:
        """The variable for a buffer or a number. It gets a suffix if the kernel's text uses the name."""
        out = value
        while out in self.taken or keyword.iskeyword(out) or (out != value and out in self.buffers):
            out += "_"
        return out

    def stored(self, o_dims: tuple[Dim, ...], buffer: str) -> Value:
        """A value in a buffer, which is indexed by the value's dims."""
        name, one = self.name(buffer), "[0]" if self.buffers[buffer].space == "sum" else ""

        def at(*index: str) -> Text:
            return Text(f"{name}[{', '.join(index)}]" if index else name + one)
        return Value(o_dims, self.buffers[buffer].dtype, at, buffer)

    def whole(self, buffer: str) -> str:
        """The part of a buffer that holds a value: all of it, or its rows without what pads them."""
        x = self.buffers[buffer]
        return f"{self.name(buffer)}[{', '.join(f'0:{self.dim(d)}' for d in x.dims)}]" if x.pad else self.name(buffer)

    def loop(self, dims: tuple[Dim, ...]) -> tuple[str, ...]:
        """Open a parallel loop over a tile. Returns the indices of the current element. The caller closes the loop with `end`."""
        if not dims:
            return ()
        index = ("i", "j")[: len(dims)]
        warps = [f"warps={self.warps}"] if self.order == "as_warp_sums" else []
        self.line(f"for {', '.join(index)} in t.{self.order}({', '.join([*map(self.dim, dims), *warps])}):")
        self.w.indent += 1
        return index

    def end(self, dims: tuple[Dim, ...]) -> None:
        """Close the loop that `loop` opened."""
        self.w.indent -= bool(dims)

    def fill(self, to: Value, x: Value) -> None:
        """Print a loop that copies `x` to the storage of `to`, element by element."""
        index = self.loop(to.dims)
        self.line(f"{to.at(*index)} = {element(x, to.dims, index)}")
        self.end(to.dims)

    def about(self, o: Op) -> None:
        """Set the value head for addresses, and the order of loops, for the op `o`."""
        if self.k.batch.way == "key_head":
            self.hv = f"hv + {o.attr('head')}" if o.attr("head") else "hv"
        self.order = {"sums": "as_sums", "warp_sums": "as_warp_sums"}.get(o.attr(ORDER), "parallel")
        self.warps = next((a.turns for a in self.k.agents if a.name == o.agent), 1)

    def line(self, text: str) -> None:
        """Print a line, wrapped to WIDTH characters."""
        self.w(*wrapped(text, WIDTH - 4 * self.w.indent))

    def allocation(self, x: Buffer) -> str:
        """The line that allocates a buffer, with its memory space and layout."""
        if x.space == "sum":
            return f"{self.name(x.name)} = T.alloc_local((1,), {self.dtype(x.dtype)})"
        if not x.shape:
            return f"{self.name(x.name)} = T.alloc_var({self.dtype(x.dtype)})"
        dims = [self.dim(d) for d in x.dims]
        dims[-1] += f" + {x.pad}" if x.pad else ""
        shape = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
        if x.layout not in ("", "swizzled"):
            lanes = self.k.threads // x.dims[0] if isinstance(x.dims[0], int) else self.k.lanes  # of a group, each token has some
            threads = f"{self.k.threads}, {lanes}, {self.k.piece}" if lanes else str(self.k.threads)
            return f"{self.name(x.name)} = t.{x.layout}({shape}, {self.dtype(x.dtype)}, {threads})"
        return f"{self.name(x.name)} = t.{'staged' if x.layout == 'swizzled' else x.space}({shape}, {self.dtype(x.dtype)})"


def element(x: Value, dims: tuple[Dim, ...], index: tuple[str, ...]) -> Text:
    """The element at `index` of `x` broadcast to `dims`."""
    if not x.dims:
        return x.at()
    return x.at(*("0" if d == 1 and full != 1 else i for d, full, i in zip(x.dims, dims, index, strict=True)))
