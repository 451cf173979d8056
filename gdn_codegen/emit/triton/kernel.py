"""Writes one kernel: statements, loops, and the whole text. A rule gives the text of each op."""
from __future__ import annotations

from itertools import groupby

from ...ir.ops import AHEAD
from ...ir.types import WARP, Tile
from ..base import (
    CLEAR,
    EVERY,
    SUMMED,
    WIDTH_OF,
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
    by_token,
    described,
    in_pairs,
    integers,
    numbers,
    quoted,
    strides,
    touched,
    wrapped,
)
from .functions import called
from .head import WIDTH, Head

rule = Rules("triton", {"diag_inverse": "decompose", "move": "place", "segment": "vectorise", "join": "vectorise",
                        "halves": "decayed_products", "decayed_pairs": "decayed_products",
                        "block": "decompose", "blocks": "decompose",
                        "diagonal_stack": "decompose", "insert": "decompose", "from_quarters": "decompose",
                        "add_rows": "added_rows", "signal": "synchronise", "wait": "synchronise",
                        "of_token": "token_groups", "fence": "mbarriers", "drain": "mbarriers", "transpose": "warp_groups",
                        "warp_barrier": "mbarriers",
                        "clear_counter": "persistent", "claim_item": "persistent", "next_item": "persistent",
                        "set_if_negative": "partition", "return_if_zero": "partition", "return_if_set": "partition",
                        "choose_parts": "chosen_parts", "return_unless_split": "chosen_parts",
                        "await_kernels": "overlapping"})


class KernelWriter(Head):
    """Writes one kernel."""

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        super().__init__(p, k, layout)
        self.w = Writer(p, "#", 1, k)
        self.env: dict[str, Text] = {}
        self.type: dict[str, Tile] = {}
        self.loops_at = 0  # the number of lines before the first loop

    # --- statements ---
    def instance(self, body: tuple[Stmt, ...]) -> None:
        """Print the whole body of the kernel, and before its loops the descriptors that their loads use."""
        for ahead, group in groupby(body, lambda s: isinstance(s, Op) and bool(s.attr(AHEAD))):
            if ahead:
                self.first_iteration(tuple(group))
            else:
                self.body(tuple(group))
        here = [line for t in self.described.values() for line in wrapped(self.descriptor(t), WIDTH - 4)]
        self.w.lines[self.loops_at:self.loops_at] = [f"    {line}" for line in here]

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Print statements in order. An op without a buffer becomes an expression in the ops that read it."""
        for s in body:
            if isinstance(s, Loop):
                self.loop(s)
                continue
            emit = rule.of(s)
            if s.type is not None:
                self.type[s.out] = s.type
            if s.kind in ("load", "store", "resume", "barrier", "return_unless_negative", "claim_part"):
                self.w.at(s)
                self.which = "_next" if s.attr(AHEAD) else ""
                emit(self, s)
                self.which = ""
                self.begins(s.out)
                continue
            text = emit(self, s, *(self.env[a] for a in s.args))
            if s.buffer:
                self.w.at(s)
                if text.code != self.name(s.buffer):  # otherwise the value is already in this variable
                    self.line(f"{self.name(s.buffer)} = {text}")
                text = Text(self.name(s.buffer))
            self.env[s.out] = text
            self.begins(s.out)

    def begins(self, value: str) -> None:
        """If `value` is the warm-up length, print the assignment of the token at which the walk begins."""
        if value and value == self.warm_up:
            self.line(f"begin = first - tl.maximum({self.env[value]}, 0).to(tl.int32) * {self.use('C')}")

    def loop(self, lp: Loop) -> None:
        """Print the initial values of a loop's carried values, and the loop."""
        self.loops_at = self.loops_at or len(self.w.lines)
        for c in lp.carried:
            self.type[c.name] = self.type[c.result] = c.type
            name = Text(self.name(c.name))
            if self.env[c.init].code != name.code:
                self.line(f"{name} = {self.env[c.init]}")
            self.env[c.name] = self.env[c.result] = name
        self.part = "earlier" if lp.index == "part" else "part"
        if lp.index == "columns":
            self.pieces_of_columns(lp)
        elif lp.index == "part":
            self.iterations(lp, "earlier", "part - first // size", "part")
        elif lp.index == "before":
            begin = self.use("begin")
            slices = f"tl.maximum({begin}, 0) + slice_index * {self.use('C')}"
            self.iterations(lp, self.passed, slices if self.k.slices > 1 else begin, "first", self.k.slices)
        elif self.k.grid == "parts":
            begins = lp.warm_up or not self.warm_up  # in a kernel without warm-ups `begin` is the part's first token
            self.iterations(lp, self.passed, self.use("begin") if begins else "first", self.use("stop"))
        else:
            begin = f"tl.maximum(tl.cdiv({self.use('length')}, {self.use('C')}) - 1, 0) * C" if lp.index == "last" else "0"
            self.iterations(lp, self.passed, begin, self.use("length"))
        self.part = "part"

    def iterations(self, lp: Loop, index: str, begin: str, stop: str, step: int = 1) -> None:
        """Print a loop from `begin` to `stop`, with the variables of each chunk. step: take every `step`-th chunk."""
        size = self.use("C") + (f" * {step}" if step > 1 else "")
        over = f"{begin}, {stop}" if index == "earlier" else f"{begin}, {stop}, {size}"
        self.w(f"for {index} in range({over}):")
        self.w.indent += 1
        first = len(self.w.lines)
        self.in_iteration(lp)
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        if index == "passed":
            self.w(f"t = {self.token('passed')}")
        following = "t + C" if lp.step > 0 else "tl.maximum(t - C, 0)"
        self.w(*([*self.chunk(), *self.following(following)] if index == self.passed else []))
        self.w.lines += after
        self.w.indent -= 1

    def pieces_of_columns(self, lp: Loop) -> None:
        """Print a loop over pieces of the columns. It has no pipeline, which would hold the tiles of two iterations."""
        self.w(f"for column in tl.range(0, {self.dim('K')}, {lp.step}, num_stages=1):")
        self.w.indent += 1
        self.w(f"columns = column + tl.arange(0, {lp.step})")
        self.column_loop = True
        self.in_iteration(lp)
        self.column_loop = False
        self.w.indent -= 1

    def in_iteration(self, lp: Loop) -> None:
        """Print the body of a loop, and the next values of what it carries."""
        self.body(lp.body)
        for c in lp.carried:
            if self.env[c.next].code != self.env[c.name].code:
                self.line(f"{self.env[c.name]} = {self.env[c.next]}")

    def chunk(self) -> list[str]:
        """The lines that compute the variables of the chunk whose first token is `t`, as far as ops use them."""
        lines = {"row": f"row = {self.origin()} + t",
                 "valid": f"valid = {self.index('C', 0, 1) if 'valid' in self.uses else ''} < length - t",
                 "slot": "slot = start // C + n + t // C",
                 "checkpoint": f"checkpoint = start // (C * {EVERY}) + (t // C + 1) // {EVERY} - 1"}
        lines |= {f"{x.name}_t": f"{x.name}_t = {self.number(x.name, 't // C')}.to(tl.int64)" for x in self.p.tensors
                  if x.index == "numbers"}
        if self.k.grid == "chunks":
            del lines["slot"]
        return [text for name, text in lines.items() if name in self.uses]

    def following(self, t: str) -> list[str]:
        """The lines that compute the variables of the next chunk, for loads one iteration ahead. t: its first token, "" for
        token 0.

        Past the last chunk they give the last chunk's slot again, so that loads stay in the workspace.
        """
        following = f"tl.minimum({t}, tl.maximum(length - 1, 0)) // C" if t else ""
        row = f"tl.minimum({t}, length - 1)" if t and by_token(self.k) else t
        lines = {"row_next": " + ".join(["row_next = " + self.origin(), *([row] if row else [])]),
                 "valid_next": f"valid_next = {' + '.join([*([t] if t else []), 'i_C'])} < length",
                 "slot_next": " + ".join(["slot_next = start // C + n", *([following] if t else [])])}
        return [text for name, text in lines.items() if name in self.uses]

    def first_iteration(self, ops: tuple[Stmt, ...]) -> None:
        """Print the ops that work one iteration ahead, before the loop: they work on the first chunk."""
        begin = self.use("begin") if self.k.grid == "parts" else ""
        if self.k.step < 0:
            begin = f"tl.maximum({self.token(begin)}, 0)"
        first = len(self.w.lines)
        self.before_loops = True
        self.body(ops)
        self.before_loops = False
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        self.w(*self.following(begin))
        self.w.lines += after

    def line(self, text: str) -> None:
        """Print a line, wrapped to WIDTH characters."""
        self.w(*wrapped(text, WIDTH - 4 * self.w.indent))

    # --- the whole ---
    def text(self) -> KernelText:
        """The kernel's text: parameters, head, body. EmitError if no pass has set its number of threads."""
        if not self.k.threads:
            raise EmitError(f"triton: kernel {self.k.name} has no number of threads; pass instance_warps should have given one")
        self.instance(self.k.body)
        clear = self.clear()
        chunk = self.chunk() if self.k.grid == "chunks" else []
        head = Writer(self.p, "#", 1)
        head(*self.head(clear), *chunk)
        tensors = touched(self.p, self.k)
        ints = integers(self.p, self.k)
        flags, far = [x for x in ints if x.startswith("has_")], [x for x in ints if "_stride" in x]
        tiles = [f"P{d}" for d, _ in self.p.extents]
        shape = [x for x in ("H", "HV", *self.p.sizes, *tiles, f"B{self.k.blocked_dim}") if x in self.uses]
        plain = [f"{t.name}_ptr" for t in tensors] + ["cu_seqlens", *(self.name(s) for s in numbers(self.k))]
        sizes = [x for x in ("N", "T", "batched", "span", EVERY, SUMMED) if x in self.uses]
        sizes += [x for x in ints if x.startswith(CLEAR) or x.endswith(WIDTH_OF)]
        # strides of vectors change with the number of tokens and with views, and no load gains by what divides them
        loose = [*sizes, *(x for t in tensors if len(t.dims) < 2 for x in strides(t))]
        fixed = [*flags, *shape, *(["OPERAND"] if "OPERAND" in self.uses else [])]
        block = {f"B{d}": n for d, n in self.k.dims}
        params = [*plain, *sizes, *far, *(f"{x}: tl.constexpr" for x in fixed)]
        body = "\n".join([*head.lines, *self.w.lines])
        return KernelText(self.k.name, self.k.grid, blocks(self.p, self.k), tensors, numbers(self.k), body,
                          {"params": params, "loose": loose, "block": block, "warps": self.k.threads // WARP, "ints": ints,
                           "decorator": f"triton.jit(do_not_specialize={quoted(loose)})" if loose else "triton.jit",
                           "in_pairs": in_pairs(self.k), "calls": called(body), "described": described(self.k)})
