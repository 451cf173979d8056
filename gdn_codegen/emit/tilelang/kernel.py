"""Writes one kernel: storage, loops, its head; what an op computes is a rule's.

One text serves CUDA and the CPU: `t`, the prelude of the module's template, knows which of the two is traced.
"""
from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from ...ir.core import Buffer
from ...ir.types import Dim, Tensor
from ..base import (
    CLEAR,
    EVERY,
    SUMMED,
    EmitError,
    Kernel,
    KernelText,
    Loop,
    Op,
    Program,
    Rules,
    Stmt,
    Text,
    Writer,
    blocks,
    integers,
    numbers,
    strides,
    touched,
    walk,
    wrapped,
)
from .addresses import Addresses

rule = Rules("tilelang", {"unit_lower_inverse": "decompose", "row_norm": "decompose", "softplus": "decompose",
                          "part": "vectorise", "join": "vectorise", "block": "decompose", "from_quarters": "decompose",
                          "signal": "synchronise", "barrier": "synchronise", "fence": "mbarriers", "drain": "mbarriers",
                          "transpose": "warp_groups", "claim_part": "partition"})

WIDTH = 120
#: Registers of a multiprocessor, and those that a thread of a small kernel gets; with four heads together it would spill.
SM_REGISTERS, SMALL, SMALL_TOGETHER = 64 * 1024, 64, 80
#: Rows of a tile whose inverse is one call.
WHOLE = 64
#: Ops whose rules write lines; those of the others give an expression.
STATEMENTS = ("matmul", "diag_inverse", "cumsum", "row_sum", "diagonal", "move", "load", "store", "wait", "warm_up_length",
              "return_unless_negative")
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
    """A value: `at` gives its element at some indices; `buffer` names its storage, "" for an expression."""

    dims: tuple[Dim, ...]
    dtype: str
    at: Callable[..., Text]
    buffer: str = ""


class KernelWriter(Addresses):
    """Writes one kernel."""

    rules = rule
    statements: tuple[str, ...] = STATEMENTS
    across = "HV", "hv"  # what the grid has of heads, and a block's index into it

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        super().__init__(p, k, layout)
        self.sizes = {**p.sizes, **k.sizes}
        self.buffers = {x.name: x for x in k.buffers}
        self.env: dict[str, Value] = {}
        if k.lanes > 1:
            self.across = f"T.truncdiv(HV, {k.lanes})", "group"
        #: What an inverse of a whole tile reads and writes, in CUDA: a fixed layout.
        self.inverted = {x for o in walk(k.body) if o.kind == "diag_inverse" and o.attr("size") == WHOLE
                      for x in (o.buffer, next(y.buffer for y in walk(k.body) if y.out == o.args[0]))}
        #: Tiles whose rows are summed, of lengths that are no power of two.
        self.summed = {y.buffer for o in walk(k.body) if o.kind == "row_sum" for y in walk(k.body) if y.out == o.args[0]
                       and y.buffer and self.buffers[y.buffer].shape[1] & (self.buffers[y.buffer].shape[1] - 1)}
        #: Tiles in shared memory that warps store from, or load to, fragments: a fixed layout, too, at both ends.
        self.crossing: set[str] = set()
        self.taken = OWN | set(p.sizes) | {f"B{d}" for d in p.sizes} | set(self.params.values()) | {f"P{d}" for d, _ in p.extents}
        self.taken |= {x for t in touched(p, k) for x in strides(t)}
        self.taken |= {f"{y}_{x}" for x in self.params for y in ("has", "n", CLEAR[:-1])}
        self.taken |= {f"{x}_{y}" for x in self.params for y in ("stride", "n")}
        self.w = Writer(p, "#", 2)

    def name(self, value: str) -> str:
        """The variable of a buffer or a number, out of the way of the kernel's own names."""
        out = value
        while out in self.taken or keyword.iskeyword(out) or (out != value and out in self.buffers):
            out += "_"
        return out

    # --- text of values ---
    def stored(self, o_dims: tuple[Dim, ...], buffer: str) -> Value:
        name = self.name(buffer)

        def at(*index: str) -> Text:
            return Text(f"{name}[{', '.join(index)}]" if index else name)
        return Value(o_dims, self.buffers[buffer].dtype, at, buffer)

    def loop(self, dims: tuple[Dim, ...]) -> tuple[str, ...]:
        """Open a parallel loop over a tile; the indices of its element. The caller closes it with `end`."""
        if not dims:
            return ()
        index = ("i", "j")[: len(dims)]
        self.line(f"for {', '.join(index)} in t.{self.order(dims)}({', '.join(self.dim(d) for d in dims)}):")
        self.w.indent += 1
        return index

    def order(self, dims: tuple[Dim, ...]) -> str:
        """Of the prelude, what says which thread has which element of a loop."""
        return "parallel"

    def end(self, dims: tuple[Dim, ...]) -> None:
        self.w.indent -= bool(dims)

    def fill(self, to: Value, x: Value) -> None:
        """One loop that fills the storage of `to` with `x`, element by element."""
        index = self.loop(to.dims)
        self.line(f"{to.at(*index)} = {element(x, to.dims, index)}")
        self.end(to.dims)

    def line(self, text: str) -> None:
        self.w(*wrapped(text, WIDTH - 4 * self.w.indent))

    # --- statements ---
    def turn_to(self, o: Op) -> None:
        """Address tensors of the value head that `o` is of."""
        if self.k.lanes > 1:
            self.hv = f"hv + {o.attr('lane')}" if o.attr("lane") else "hv"

    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, Loop):
                self.walk(s)
                continue
            write = self.rules.of(s)
            args = [self.env[a] for a in s.args]
            self.turn_to(s)
            if s.kind in self.statements:
                self.w.at(s)
                write(self, s, *args)
                if s.out:
                    assert s.type is not None
                    self.env[s.out] = self.stored(s.type.dims, s.buffer)
                self.begins(s.out)
                continue
            assert s.type is not None
            x = Value(s.type.dims, s.type.dtype, write(self, s, *args))
            if s.buffer:
                self.w.at(s)
                to = self.stored(s.type.dims, s.buffer)
                if s.kind == "cast" and args[0].buffer and len(to.dims) == 2 and self.order(to.dims) == "parallel":
                    self.line(f"t.copy({self.name(args[0].buffer)}, {self.name(s.buffer)})")
                else:
                    self.fill(to, x)
                x = to
            self.env[s.out] = x
            self.begins(s.out)

    def begins(self, value: str) -> None:
        """Once the warm-up length of a part is known, say where its walk begins."""
        if value and value == self.warm_up:
            self.line(f"begin = first - T.max(T.cast({self.env[value].at()}, T.int32), 0)")

    def walk(self, lp: Loop) -> None:
        """The walk over chunks. Carried values live in the buffer of their name."""
        names = {c.name for c in lp.carried}
        for c in lp.carried:
            here = self.stored(c.type.dims, c.name)
            if self.env[c.init].buffer != c.name:
                self.fill(here, self.env[c.init])
            self.env[c.name] = self.env[c.result] = here
        first = len(self.w.lines)
        self.w.indent += 1
        self.part = "earlier" if lp.index == "part" else "part"
        self.body(lp.body)
        self.part = "part"
        for c in lp.carried:
            new = self.env[c.next]
            if new.buffer != c.name:
                if new.buffer in names:
                    raise EmitError(f"tilelang: carried {c.name} becomes another carried value, {c.next}; pass place "
                                    f"should have copied it")
                self.fill(self.env[c.name], new)
        self.w.indent -= 1
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        self.use("length")
        if lp.index == "part":
            self.w("for earlier in T.serial(part - T.truncdiv(first, span), part):")
        elif lp.index == "before":
            self.w(f"for chunk in T.serial(T.max({self.use('begin')}, 0) + nth, first, {self.k.slices}):")
        elif self.k.grid == "parts":
            self.w(f"for chunk in T.serial({self.use('begin')}, stop):")
        else:
            self.w("for chunk in T.serial(T.ceildiv(length, C)):")
        self.w.indent += 1
        for text in self.chunk() if lp.index != "part" else []:
            self.line(text)
        self.w.indent -= 1
        self.w.lines += after

    def chunk(self) -> list[str]:
        """What ops asked to know of the chunk."""
        lines = {"row": "row = start - b * L + chunk * C", "rows": "rows = length - chunk * C"}
        if self.k.grid != "chunks":
            lines["slot"] = "slot = start // C + n + chunk"
            first, n = (f"T.truncdiv({x}, {y})" for x, y in (("start", f"C * {EVERY}"), ("chunk + 1", EVERY)))
            lines["checkpoint"] = f"checkpoint = T.cast({first} + {n} - 1, T.int64)"
        if "row" in self.uses:
            self.use("b")
        return [text for name, text in lines.items() if name in self.uses]

    # --- the whole ---
    def text(self) -> KernelText:
        chunks, parts = self.k.grid == "chunks", self.k.grid == "parts"
        # Chunks with tokens; a sequence's first part, or one with chunks.
        conditions = ["chunk * C < length"] if chunks else ["first < T.max(stop, 1)"] if parts else []
        self.w.indent = 3 + bool(conditions or self.p.skips)
        self.body(self.k.body)
        body = self.w.lines
        clear = self.clear()
        at_chunk = self.chunk() if chunks else []
        self.w = Writer(self.p, "#", 2)
        self.head()
        for x in self.k.buffers:
            self.w(self.allocation(x))
        if chunks and self.small():
            self.w(f"t.blocks_at_least({SM_REGISTERS // (self.registers() * self.threads())})")
        self.w.lines += clear
        self.open_block(*conditions)
        if parts:
            self.w(*(["begin = first"] if "begin" in self.uses and not self.warm_up else []))
        self.w(*at_chunk)
        return self.finished(body)

    def clear(self) -> list[str]:
        """Zeros into this instance's part of the rows that no sequence covers. A sequence's instances have the tokens from its
        first on; those past the last sequence's end are that one's."""
        self.w = Writer(self.p, "#", 3)
        for t in self.p.clears(self.k):
            for name in ("b", "length"):
                self.use(name)
            low, high = {"sequences": ("0", "room"), "chunks": ("chunk * C", "T.min(chunk * C + C, room)"),
                         "parts": ("first * C", "T.min((first + span) * C, room)")}[self.k.grid]
            begin = "length" if self.k.grid == "sequences" else f"T.max({low}, length)"
            if self.p.skips:
                begin = f"T.if_then_else({self.p.skips}_n < 0, {low}, {begin})"
            half = " and half == 0" if any(o.kind == "claim_part" for o in walk(self.k.body)) else ""
            self.w(f"if {CLEAR}{t.name} != 0{half}:",
                   "    room = T.if_then_else(batched == 0 and n + 1 == ends - 1, L - start, length)",
                   f"    low = T.alloc_var(T.int32, init={begin})",
                   f"    high = T.alloc_var(T.int32, init={high})",
                   "    for rest in T.serial(T.ceildiv(T.max(high - low, 0), C)):",
                   "        row = start - b * L + low + rest * C",
                   "        rows = high - low - rest * C")
            self.w.indent += 2
            for lane in range(self.k.lanes):
                self.zeros(t, lane)
            self.w.indent -= 2
        return self.w.lines

    def zeros(self, t: Tensor, lane: int) -> None:
        """Zeros into the rows of the tile at hand that are below `rows`."""
        self.hv = f"hv + {lane}" if lane else type(self).hv
        index = self.loop(t.dims)
        inside = self.inside(t, index)
        for n, x in enumerate(inside):
            self.line(f"{'    ' * n}if {x}:")
        self.line(f"{'    ' * len(inside)}{self.address(t, index)} = 0")
        self.end(t.dims)

    def open_block(self, *conditions: str) -> None:
        """Open the block of what is done where the sequence is not left out and `conditions` hold. One `if`, since Python
        nests 20 blocks at most and TileLang makes two of each `if`."""
        kept = [f"{self.p.skips}_n >= 0"] if self.p.skips else []
        if kept or conditions:
            self.w(f"if {' and '.join([*kept, *conditions])}:")
            self.w.indent += 1

    def finished(self, body: list[str]) -> KernelText:
        """The kernel's head, which is written, and its body, with what a template is told."""
        tensors = touched(self.p, self.k)
        params = [f"{self.params[x.name]}: T.Tensor({self.shape(x)}, {self.dtype(x.dtype)})" for x in tensors]
        params += ["cu_seqlens: T.Tensor((ends,), T.int32)", "batched: T.int32",
                   *(["parts: T.int32", "span: T.int32"] if self.k.grid == "parts" else [])]
        ints = integers(self.p, self.k)
        params += [f"{x}: {'T.int64' if '_stride' in x else 'T.int32'}" for x in ints]
        params += [f"{self.name(x)}: T.float32" for x in numbers(self.k)]
        bare = [*dict.fromkeys(d for x in tensors for d in self.shape(x)[1:-1].rstrip(",").split(", ")), "ends"]
        long = [f"n_{x.name}" for x in tensors if x.at]  # elements of a pool
        fixed = [x for x in ("B", "L", "H", "HV", "slots", "ends") if x in bare]
        parts = [f"n_{x.name}" for x in tensors if x.index == "part"]
        own = [x for x in bare if x.startswith("n_") and x not in (*long, *parts)]
        dynamic = [", ".join(names) for names in (fixed, own, parts) if names]
        text = "\n".join([*self.w.lines, *body])
        sizes = {f"B{d}": str(n) for d, n in self.k.dims}
        if self.k.grid == "chunks" and "slots" not in bare:  # which no tensor's shape says
            sizes["slots"] = "B * L // C + ends - 1"
        extra = {"params": params, "dynamic": dynamic, "block": sizes,
                 "long": long,
                 "written": self.written(), "agents": self.k.agents, "ints": ints, "whole": bool(self.inverted),
                 "rows": bool(self.summed),
                 "calls": sorted(set(re.findall(r"\bt\.(\w+)\(", text)))}
        return KernelText(self.k.name, self.k.grid, blocks(self.p, self.k), tensors, numbers(self.k), text, extra)

    def written(self) -> tuple[str, ...]:
        names = {t.over or t.name for o in walk(self.k.body) if o.kind == "store" for t in [self.p.tensor(o.attr("tensor"))]}
        return tuple(x.name for x in touched(self.p, self.k) if x.name in names)

    def head(self) -> None:
        """From the block's indices to its head, its sequence and, in a grid over chunks, its chunk."""
        extent, instance = {"chunks": ("slots", "slot"), "parts": ("parts", "part"), "sequences": ("ends - 1", "n")}[self.k.grid]
        grid, index = [extent, self.across[0]], [instance, self.across[1]]
        if self.k.split:
            grid.append(f"{self.tiled(self.k.split)} // {self.dim(self.k.split)}")
            index.append("block")
        if self.k.slices > 1:
            grid.append(str(self.k.slices))
            index.append("nth")
        halves = any(o.kind == "claim_part" for o in walk(self.k.body))
        if halves:  # blocks start in order of their last index
            last, many = index[-1], f"({grid[-1]})" if self.k.split else grid[-1]
            grid[-1], index[-1] = f"2 * {many}", "both"
        for x in touched(self.p, self.k):
            if x.strided:
                self.line(f"{self.params[x.name]} = {self.view(x)}")
        self.w(f"with t.kernel({', '.join(grid)}, threads={self.threads()}) as ({', '.join(index)}):")
        self.w.indent += 1
        if halves:
            self.w(f"half = T.alloc_var(T.int32, init=T.truncdiv(both, {many}))",
                   f"{last} = T.alloc_var(T.int32, init=both - half * {many})")
        if self.k.lanes > 1:
            self.w(f"hv = group * {self.k.lanes}")
        if "h" in self.uses:
            # a variable, lest each address divide anew, in 64 bits
            self.w("h = T.alloc_var(T.int32, init=T.truncdiv(hv, T.truncdiv(HV, H)))")
        if self.k.grid == "chunks":
            self.w("n = t.find_sequence(cu_seqlens, slot, ends - 1, C)")
        if self.k.grid == "parts":
            self.w("size = C * span", "n = t.find_sequence(cu_seqlens, part, ends - 1, size)")
        for x in touched(self.p, self.k):
            if x.index == "number":
                self.w(f"{x.name}_n = T.cast({self.params[x.name]}[n], T.int64)")
        if "b" in self.uses:
            self.w("b = n * batched")
        if "length" in self.uses or self.k.grid != "sequences":
            self.w("start = cu_seqlens[n]", "length = cu_seqlens[n + 1] - start")
        if self.k.grid == "chunks":
            self.w("chunk = slot - (start // C + n)")
        if self.k.grid == "parts":
            self.w("first = (part - (T.truncdiv(start, size) + n)) * span", "stop = T.min(first + span, T.ceildiv(length, C))")

    def allocation(self, x: Buffer) -> str:
        if not x.shape:
            return f"{self.name(x.name)} = T.alloc_var({self.dtype(x.dtype)})"
        dims = [self.dim(d) for d in self.buffer_dims(x.name)]
        shape = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
        if x.name in self.summed and x.space == "fragment":
            return f"{self.name(x.name)} = t.rows({shape}, {self.dtype(x.dtype)}, {self.threads()})"
        return f"{self.name(x.name)} = t.{'staged' if x.name in self.inverted else x.space}({shape}, {self.dtype(x.dtype)})"

    def buffer_dims(self, name: str) -> tuple[Dim, ...]:
        for o in walk(self.k.body):
            if o.buffer == name and o.type is not None:
                return o.type.dims
        return next(c.type.dims for s in self.k.body if isinstance(s, Loop) for c in s.carried if c.name == name)

    def small(self) -> bool:
        """Whether `SMALL` registers a thread are enough: accumulators take half of them at most. Then more blocks share a
        multiprocessor, and one computes while another waits for its loads."""
        fragments = [math.prod(x.shape) for x in self.k.buffers if x.space == "fragment"]
        return any(o.kind == "matmul" for o in walk(self.k.body)) and 2 * max(fragments, default=0) <= SMALL * self.threads()

    def registers(self) -> int:
        """Of a thread of a small kernel."""
        return SMALL_TOGETHER if self.k.lanes > 2 else SMALL

    def threads(self) -> int:
        """256 where the largest fragment would take more than 64 registers of 128 threads; fewer than 128 where a product
        has fewer 16 x 16 tiles than that many warps, or no buffer as many entries as threads. 128 where a product has 16
        columns: TileLang may give each of two warp groups half of them, and a wgmma reads no row-major operand of 8 columns."""
        products = [self.buffers[o.buffer].shape for o in walk(self.k.body) if o.kind == "matmul"]
        large = max((math.prod(x.shape) for x in self.k.buffers if x.space == "fragment"), default=0) > 64 * 128
        large = large and all(shape[-1] > 16 for shape in products)
        tiles = [math.prod(n // 16 for n in shape) for shape in products]
        entries = max((math.prod(x.shape) for x in self.k.buffers), default=1)
        return 32 * min([8 if large else 4, -(-entries // 32), *tiles])


def element(x: Value, dims: tuple[Dim, ...], index: tuple[str, ...]) -> Text:
    """`x`, broadcast to `dims`, at `index`."""
    if not x.dims:
        return x.at()
    return x.at(*("0" if d == 1 and full != 1 else i for d, full, i in zip(x.dims, dims, index, strict=True)))
