"""The head of a kernel: its parameters, its grid, the indices of an instance, and the rows that it clears."""
from __future__ import annotations

from ..base import (
    AT_A_TIME,
    INSTANCES,
    LEAST_SPAN,
    PART,
    SUMMED,
    UNITS,
    WIDTH_OF,
    KernelText,
    blocks,
    in_pairs,
    integers,
    is_pool,
    numbers,
    own_numbers,
    touched,
    written,
)
from .clears import Clears
from .functions import called

#: What kernels read of a part in a tensor of places, in this order.
OF_PART = "n", "first", "start", "length"
#: The first chunk of the part of an instance, where the host chose the parts.
FIRST = "(part - (T.truncdiv(start, C * span) + n)) * span"


class Head(Clears):
    """The head of one kernel."""

    def head(self) -> None:
        """Print the grid, and the computation of an instance's head, sequence, and chunk or part from its block indices."""
        for x in touched(self.p, self.k):
            if x.strided:
                self.line(f"{self.params[x.name]} = {self.view(x)}")
        self.grid()
        if self.k.places:
            self.chosen_place()
        if not self.items:
            for name, text, kept in self.place():
                self.line(f"{name} = T.alloc_var(T.int32, init={text})" if kept else f"{name} = {text}")

    def chosen_place(self) -> None:
        """Print the indices of an instance and the place of its part, which an earlier kernel may have chosen. Instances with
        nothing to do end.

        If that kernel chose, all heads of a part start before those of the next one, so that the longest sequences of all heads
        start first. Of parts of the host, all of a head start before those of the next one. Then few of the instances that start
        first wait for summaries. The kernel ends after those before it: where blocks start early its first block waits for these,
        else all do.
        """
        half, dims, places = [("half", "2")] if in_pairs(self.k) else [], self.dims(), self.params[self.k.places]
        by_part, by_head = (self.indices([*half, *x]) for x in (dims, dims[::-1]))
        own = [*dict.fromkeys(name for name, *_ in (*by_part, *by_head)), "span", "chosen", *OF_PART]
        self.w(*(f"{name} = T.alloc_var(T.int32)" for name in own), f"if {UNITS} != 0:")
        self.w(*(f"    {name} = {text}" for name, text, _ in by_part))
        if self.k.start != "beside":
            self.w(*([f"    if {SUMMED} == 0:", "        t.wait_for_earlier_kernels()"] if self.k.start else
                     ["    t.wait_for_earlier_kernels()"]))
        self.w(f"    span = {places}[0]", f"    chosen = {places}[1]",
               *(f"    {name} = {places}[4 * (part + 1) + {n}]" for n, name in enumerate(OF_PART)), "else:",
               *(f"    {name} = {text}" for name, text, _ in by_head), f"    span = {LEAST_SPAN}", "    chosen = parts",
               "    n = t.find_sequence(cu_seqlens, part, ends - 1, C * span)", "    start = cu_seqlens[n]",
               "    length = cu_seqlens[n + 1] - start", f"    first = {FIRST}")
        for x in self.p.clears(self.k):
            self.clear_past_the_end(x)
        whole = "span == slots or " if any(o.kind == "return_unless_split" for o in self.k.ops) else ""
        self.w(f"t.end_if({whole}part >= chosen, {self.first_block if self.k.start else 'True'})")

    @property
    def linear(self) -> bool:
        """Whether blocks have one number, from which they compute their indices."""
        return self.k.grid != "parts" or self.k.by_part or bool(self.k.places)

    def place(self) -> list[tuple[str, str, bool]]:
        """The variables with an instance's place in the grid, as (name, text, whether memory of its own keeps the value, so that
        not every address repeats divisions in 64 bits)."""
        out = self.indices(self.dims()) if self.linear and not self.k.places else []
        if self.k.by_length:
            out.append(("n", "t.by_length(cu_seqlens, rank, ends - 1)", True))
        if in_pairs(self.k) and not self.linear:
            out = self.indices([("half", ""), self.dims()[-1]], "pair_index")
        if self.k.batch.way == "key_head":
            out.append(("hv", f"group * {self.k.batch.heads}", False))
        if "h" in self.uses:
            out.append(("h", "T.truncdiv(hv, T.truncdiv(HV, H))", True))
        found = {"chunks": ("slot", "C"), "parts": ("part", "C * span")}.get(self.k.grid)
        found = None if self.k.by_part or self.k.places else found
        out += [("n", "T.truncdiv(of_part, span)", True)] if self.k.grid == "chunks" and self.k.by_part else []
        out += [("n", f"t.find_sequence(cu_seqlens, {found[0]}, ends - 1, {found[1]})", False)] if found else []
        for x in own_numbers(self.p, self.k):
            first = "" if x.index == "number" else f", {x.at}_n - 1" if x.at else ", 0"
            out.append((f"{x.name}_n", f"T.cast({self.params[x.name]}[n{first}], T.int64)", False))
        if "b" in self.uses:
            out.append(("b", "n * batched", False))
        start, length = "cu_seqlens[n]", "cu_seqlens[n + 1] - start"
        if self.one_token:  # the ends of equal rows need no load
            start, length = (f"T.if_then_else(batched != 0, {x}, {y})" for x, y in (("n * L", start), ("L", length)))
        if not self.k.places and (self.one_token or "length" in self.uses or self.k.grid != "sequences"):
            out += [("start", start, False), ("length", length, False)]
        return out + self.chunks()

    def chunks(self) -> list[tuple[str, str, bool]]:
        """The variables that say which chunks of its sequence an instance has, as `place` gives them."""
        if self.k.grid == "chunks":
            return [("chunk", f"{PART} * span + of_part - n * span", True), ("slot", "start // C + n + chunk", False)
                    ] if self.k.by_part else [("chunk", "slot - (start // C + n)", False)]
        if self.k.grid != "parts":
            return []
        first = [("part", f"T.truncdiv(start, C * span) + n + {PART}", False), ("first", f"{PART} * span", False)
                 ] if self.k.by_part else [("first", FIRST, False)] if not self.k.places else []
        return [*first, ("stop", "T.min(first + span, T.ceildiv(length, C))", False)]

    def dims(self) -> list[tuple[str, str]]:
        """The dims of the grid, the slowest first, as (index, extent)."""
        n = "rank" if self.k.by_length else "n"
        extent, runs = {"chunks": ("slots", "slot"), "parts": ("parts", "part"), "sequences": ("ends - 1", n)}[self.k.grid]
        if self.k.by_part:
            extent, runs = ("(ends - 1) * span", "of_part") if self.k.grid == "chunks" else ("ends - 1", "n")
        out = [(runs, extent), self.across[::-1]]
        if self.k.blocked_dim:
            out.append(("block", f"({self.tiled(self.k.blocked_dim)} // {self.dim(self.k.blocked_dim)})"))
        if self.k.slices > 1:
            out.append(("slice_index", str(self.k.slices)))
        return out

    @property
    def first_block(self) -> str:
        """The condition that this is the first block of the grid."""
        return f"{' + '.join(name for name, _ in self.dims())} == 0"

    @property
    def instances(self) -> str:
        """The number of instances of a kernel whose blocks have one number."""
        return ("2 * " if in_pairs(self.k) else "") + " * ".join(f"({n})" if " - " in n else n for _, n in self.dims())

    def grid(self) -> None:
        """Print the grid: a block for each instance, or as many as run at a time, whose first instance is their own."""
        dims, choice = self.dims(), [o for o in self.k.ops if o.kind == "choose_parts"]
        if self.linear:
            kernel, index = self.instances, "instance"
            if self.items:
                kernel, index = f"T.min({AT_A_TIME}, {kernel})", "first_instance"
            elif choice:
                kernel, index = f"{kernel} + 1", "block_number"  # one block more chooses the parts
        else:
            if in_pairs(self.k):  # blocks start in order of their last index
                dims[-1] = "pair_index", f"2 * {dims[-1][1]}"
            kernel, index = ", ".join(n for _, n in dims), f"({', '.join(x for x, _ in dims)})"
        self.w(f"with t.kernel({kernel}, threads={self.k.threads}) as {index}:")
        self.w.indent += 1
        if self.k.start == "next_part":
            self.w(f"if {PART} == 0:", "    t.wait_for_earlier_kernels()")
        self.ends("return_if_zero")  # before later kernels start, which may be those of the next call
        for o in choice:
            how = f"{LEAST_SPAN}, slots, {INSTANCES}, {UNITS}, {o.attr('costs')}"
            self.w("instance = block_number - 1", "if instance < 0:")
            self.w.indent += 1
            self.line(f"t.choose_parts({self.params[o.attr('tensor')]}, cu_seqlens, ends - 1, C, {how})")
            self.w.indent -= 1
            self.w("t.end_if(instance < 0, False)")
        if self.k.start in ("beside", "next_part"):
            self.start_next()

    def indices(self, dims: list[tuple[str, str]], number: str = "instance") -> list[tuple[str, str, bool]]:
        """The indices (name, extent), the slowest first, of the block with this number, as `place` gives them.

        Blocks start in the order of their numbers. So those of the columns and heads of one sequence or chunk start side by side:
        they read neighbouring memory, tiles that blocks of columns share, and rows of a key head that value heads share.
        """
        out = []
        for at in range(len(dims) - 1, 0, -1):
            (name, many), slower = dims[at], f"outer_{at}" if at > 1 else dims[0][0]
            out += [(slower, f"T.truncdiv({number}, {many})", True), (name, f"{number} - {slower} * {many}", True)]
            number = slower
        return out

    def overlap(self) -> None:
        """Print the wait for earlier kernels, and the start of the next one. Of a kernel whose blocks start early the first one
        waits. It lets the next kernel start before (`grid`), or here, if in some calls its blocks wait first."""
        if self.p.launch == "overlapping":
            if self.k.start == "unless_summed":
                self.w(f"if {SUMMED} == 0:", "    t.wait_for_earlier_kernels()")
            elif not self.k.start and (self.k.name != self.p.kernels[0].name or self.k.by_part):
                self.w("t.wait_for_earlier_kernels()")
            if self.k.start not in ("beside", "next_part"):
                self.start_next()
            if self.k.start in ("beside", "unless_summed"):
                self.w(f"if {self.first_block}:", "    t.wait_for_earlier_kernels()")
        self.ends("return_if_set")

    def ends(self, kind: str) -> None:
        """Print the ends of instances by a counter, of this kind of op. If they end because it is zero, the build that ran before
        has computed the call. Blocks should then take little time, so they read the counter before all else."""
        self.w(*(f"t.{kind}({self.params[o.attr('tensor')]})" for o in self.k.ops if o.kind == kind))

    def start_next(self) -> None:
        """Let the next launch of the call start, if there is one. The walk of the last part lets what comes after the call start,
        too. That is no harm: a kernel that starts before the one before it has ended waits by itself."""
        if self.k.name != self.p.kernels[-1].name or self.k.by_part:
            self.w("t.start_next_kernel()")

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
        span, part = f"{LEAST_SPAN}: T.int32" if self.k.places else "span: T.int32", PART if self.k.by_part else "parts"
        params += ["cu_seqlens: T.Tensor((ends,), T.int32)", "batched: T.int32",
                   *([f"{part}: T.int32", span] if self.k.by_part or self.k.grid == "parts" else [])]
        ints = tuple(x for x in integers(self.p, self.k) if not x.endswith(WIDTH_OF))  # that is in a tensor's shape
        params += [f"{x}: {'T.int64' if '_stride' in x else 'T.int32'}" for x in ints]
        params += [f"{self.name(x)}: T.float32" for x in numbers(self.k)]
        bare = [*dict.fromkeys(d for x in tensors for d in self.shape(x)[1:-1].rstrip(",").split(", ")), "ends"]
        long = [f"n_{x.name}" for x in tensors if is_pool(x)]  # elements of a pool
        fixed = [x for x in ("B", "L", "H", "HV", "slots", "ends") if x in bare]
        parts = [f"n_{x.name}" for x in tensors if x.index == "part"]
        own = [x for x in bare if x.startswith("n_") and x not in (*long, *parts)]
        dynamic = [", ".join(names) for names in (fixed, own, parts) if names]
        ends = []
        if self.k.start == "next_part":
            ends = [f"            if {self.first_block}:", "                t.wait_for_earlier_kernels()"]
        text = "\n".join([*self.w.lines, *body, *ends])
        sizes = {f"B{d}": str(n) for d, n in self.k.dims}
        if self.k.grid == "chunks" and "slots" not in bare:  # if no tensor's shape contains it
            sizes["slots"] = "B * L // C + ends - 1"
        extra = {"params": params, "dynamic": dynamic, "block": sizes,
                 "long": long,
                 "written": written(self.p, self.k), "agents": self.k.agents, "ints": ints, "calls": called(params, text)}
        return KernelText(self.k.name, self.k.grid, blocks(self.p, self.k), tensors, numbers(self.k), text, extra)
