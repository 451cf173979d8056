"""The head of a kernel: its parameters, its grid, the indices of an instance, and the rows that it clears."""
from __future__ import annotations

from ...ir.types import Tensor
from ..base import (
    CLEAR,
    WIDTH_OF,
    KernelText,
    Writer,
    blocks,
    in_pairs,
    integers,
    is_pool,
    numbers,
    own_numbers,
    touched,
    written,
)
from .functions import called
from .tiles import Tiles


class Head(Tiles):
    """The head of one kernel."""

    def head(self) -> None:
        """Print the grid, and the computation of an instance's head, sequence, and chunk or part from its block indices."""
        for x in touched(self.p, self.k):
            if x.strided:
                self.line(f"{self.params[x.name]} = {self.view(x)}")
        self.grid()
        if self.k.batch.way == "key_head":
            self.w(f"hv = group * {self.k.batch.heads}")
        if "h" in self.uses:
            # a variable, so that not every address repeats the division in 64 bits
            self.w("h = T.alloc_var(T.int32, init=T.truncdiv(hv, T.truncdiv(HV, H)))")
        if self.k.grid == "chunks":
            self.w("n = t.find_sequence(cu_seqlens, slot, ends - 1, C)")
        if self.k.grid == "parts":
            self.w("size = C * span", "n = t.find_sequence(cu_seqlens, part, ends - 1, size)")
        for x in own_numbers(self.p, self.k):
            first = "" if x.index == "number" else f", {x.at}_n - 1" if x.at else ", 0"
            self.w(f"{x.name}_n = T.cast({self.params[x.name]}[n{first}], T.int64)")
        if "b" in self.uses:
            self.w("b = n * batched")
        if self.one_token:  # the ends of equal rows need no load
            self.w("start = T.if_then_else(batched != 0, n * L, cu_seqlens[n])",
                   "length = T.if_then_else(batched != 0, L, cu_seqlens[n + 1] - start)")
        elif "length" in self.uses or self.k.grid != "sequences":
            self.w("start = cu_seqlens[n]", "length = cu_seqlens[n + 1] - start")
        if self.k.grid == "chunks":
            self.w("chunk = slot - (start // C + n)")
        if self.k.grid == "parts":
            self.w("first = (part - (T.truncdiv(start, size) + n)) * span", "stop = T.min(first + span, T.ceildiv(length, C))")

    def grid(self) -> None:
        """Print the grid, and the computation of the indices of an instance from those of its block."""
        extent, runs = {"chunks": ("slots", "slot"), "parts": ("parts", "part"), "sequences": ("ends - 1", "n")}[self.k.grid]
        dims = [(runs, extent), self.across[::-1]]
        if self.k.blocked_dim:
            dims.append(("block", f"({self.tiled(self.k.blocked_dim)} // {self.dim(self.k.blocked_dim)})"))
        if self.k.slices > 1:
            dims.append(("slice_index", str(self.k.slices)))
        last, many = dims[-1]
        if self.k.grid == "sequences":
            kernel, index = " * ".join([f"({extent})", *(n for _, n in dims[1:])]), "instance"
        else:
            if in_pairs(self.k):  # blocks start in order of their last index
                dims[-1] = "pair_index", f"2 * {many}"
            kernel, index = ", ".join(n for _, n in dims), f"({', '.join(x for x, _ in dims)})"
        self.w(f"with t.kernel({kernel}, threads={self.k.threads}) as {index}:")
        self.w.indent += 1
        if self.k.grid == "sequences":
            self.indices(dims)
        elif in_pairs(self.k):
            self.indices([("instance", ""), (last, many)], "pair_index")

    def indices(self, dims: list[tuple[str, str]], number: str = "instance") -> None:
        """Print the indices (name, extent), the slowest first, of the block with this number.

        Blocks start in the order of their numbers. So those of the columns and heads of one sequence start side by side: they
        read neighbouring memory, and rows of a key head that value heads share. Indices are variables, so that not every address
        repeats the divisions.
        """
        for at in range(len(dims) - 1, 0, -1):
            (name, many), slower = dims[at], "walk" if at > 1 else dims[0][0]
            self.w(f"{slower} = T.alloc_var(T.int32, init=T.truncdiv({number}, {many}))",
                   f"{name} = T.alloc_var(T.int32, init={number} - {slower} * {many})")
            number = slower

    def overlap(self) -> None:
        """Print the wait for earlier kernels, and the start of the next one."""
        if self.p.launch == "overlapping":
            first, last = (self.p.kernels[n].name == self.k.name for n in (0, -1))
            self.w(*(["t.wait_for_earlier_kernels()"] if not first else []), *(["t.start_next_kernel()"] if not last else []))

    def clear(self) -> list[str]:
        """The lines that write zeros to this instance's share of the rows that no sequence covers.

        An instance is responsible for the tokens of its chunk, part or sequence. Instances of the last sequence are also
        responsible for the tokens past its end.
        """
        self.w = Writer(self.p, "#", 3)
        for t in self.p.clears(self.k):
            for name in ("b", "length"):
                self.use(name)
            low, high = {"sequences": ("0", "row_end"), "chunks": ("chunk * C", "T.min(chunk * C + C, row_end)"),
                         "parts": ("first * C", "T.min((first + span) * C, row_end)")}[self.k.grid]
            begin = "length" if self.k.grid == "sequences" else f"T.max({low}, length)"
            if self.p.skips:
                begin = f"T.if_then_else({self.p.skips}_n < 0, {low}, {begin})"
            instance = " and instance == 0" if in_pairs(self.k) else ""
            self.w(f"if {CLEAR}{t.name} != 0{instance}:",
                   "    row_end = T.if_then_else(batched == 0 and n + 1 == ends - 1, L - start, length)",
                   f"    clear_begin = T.alloc_var(T.int32, init={begin})",
                   f"    clear_end = T.alloc_var(T.int32, init={high})",
                   "    for rest in T.serial(T.ceildiv(T.max(clear_end - clear_begin, 0), C)):",
                   "        row = start - b * L + clear_begin + rest * C",
                   "        rows = clear_end - clear_begin - rest * C")
            self.w.indent += 2
            for head in range(self.k.batch.in_body):
                self.zeros(t, head)
            self.w.indent -= 2
        return self.w.lines

    def zeros(self, t: Tensor, head: int) -> None:
        """Print a loop that writes zeros to the first `rows` rows of the current tile."""
        self.hv, self.order = f"hv + {head}" if head else type(self).hv, "parallel"
        index = self.loop(t.dims)
        inside = self.inside(t, index)
        for n, x in enumerate(inside):
            self.line(f"{'    ' * n}if {x}:")
        self.line(f"{'    ' * len(inside)}{self.address(t, index)} = 0")
        self.end(t.dims)

    def open_block(self, *conditions: str) -> None:
        """Open an `if` for statements that run if the sequence is not skipped and `conditions` hold.

        It is one `if`, since Python allows only 20 nested blocks and TileLang makes two of each `if`.
        """
        kept = [f"{self.p.skips}_n >= 0"] if self.p.skips else []
        if kept or conditions:
            self.w(f"if {' and '.join([*kept, *conditions])}:")
            self.w.indent += 1

    def finished(self, body: list[str]) -> KernelText:
        """The KernelText: the head that is already printed, the body, and the data for the template."""
        tensors = touched(self.p, self.k)
        params = [f"{self.params[x.name]}: T.Tensor({self.shape(x)}, {self.dtype(x.dtype)})" for x in tensors]
        params += ["cu_seqlens: T.Tensor((ends,), T.int32)", "batched: T.int32",
                   *(["parts: T.int32", "span: T.int32"] if self.k.grid == "parts" else [])]
        ints = tuple(x for x in integers(self.p, self.k) if not x.endswith(WIDTH_OF))  # that is in a tensor's shape
        params += [f"{x}: {'T.int64' if '_stride' in x else 'T.int32'}" for x in ints]
        params += [f"{self.name(x)}: T.float32" for x in numbers(self.k)]
        bare = [*dict.fromkeys(d for x in tensors for d in self.shape(x)[1:-1].rstrip(",").split(", ")), "ends"]
        long = [f"n_{x.name}" for x in tensors if is_pool(x)]  # elements of a pool
        fixed = [x for x in ("B", "L", "H", "HV", "slots", "ends") if x in bare]
        parts = [f"n_{x.name}" for x in tensors if x.index == "part"]
        own = [x for x in bare if x.startswith("n_") and x not in (*long, *parts)]
        dynamic = [", ".join(names) for names in (fixed, own, parts) if names]
        text = "\n".join([*self.w.lines, *body])
        sizes = {f"B{d}": str(n) for d, n in self.k.dims}
        if self.k.grid == "chunks" and "slots" not in bare:  # if no tensor's shape contains it
            sizes["slots"] = "B * L // C + ends - 1"
        extra = {"params": params, "dynamic": dynamic, "block": sizes,
                 "long": long,
                 "written": written(self.p, self.k), "agents": self.k.agents, "ints": ints, "calls": called(params, text)}
        return KernelText(self.k.name, self.k.grid, blocks(self.p, self.k), tensors, numbers(self.k), text, extra)
