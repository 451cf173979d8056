"""Writes one kernel: declarations, loops and statements. A rule gives the text of each op.

The text has one section for each agent. A vector core holds its part of a tile's rows; `sub` is the index of the core. A vector
of C values is complete on each core.
"""
from __future__ import annotations

from collections.abc import Mapping

from ...ir.core import NO_LINE, Loop
from ...ir.ops import OPS
from ...ir.padding import chunk_tokens
from ..base import Kernel, Op, Program, Rules, Stmt, Writer, blocks
from .addresses import Addresses
from .declarations import pruned, used_of
from .rolled import rolled
from .values import CTYPE, agents, counted, moves_all_heads

rule = Rules("pto", {
    "diag_inverse": "decompose",
    "delay": "moved_rows", "advance": "moved_rows", "latest": "moved_rows",
    "to_middle": "across_rows", "from_middle": "across_rows",
    "halves": "decayed_products", "decayed_blocks": "decayed_products", "decayed_pairs": "decayed_products",
    "lower": "vectorise", "strictly_lower": "vectorise", "pairs": "vectorise", "diagonal_blocks": "vectorise",
    "eye": "vectorise", "neg": "vectorise", "sigmoid": "vectorise", "from_quarters": "transfer",
    "fence": "mbarriers", "drain": "mbarriers", "warp_barrier": "mbarriers", "await_kernels": "overlapping",
    "resume": "single_token", "warm_up_length": "partition", "return_unless_negative": "partition", "claim_part": "partition",
    "if_negative": "partition", "row_max": "partition", "set_if_negative": "partition",
    "return_if_zero": "partition", "return_if_set": "partition", "choose_parts": "chosen_parts",
    "return_unless_split": "chosen_parts",
    "cumsum": "added_rows", "diagonal": "whole_vectors", "column_sum": "whole_vectors", "of_token": "token_groups",
    "clear_counter": "persistent", "claim_item": "persistent", "next_item": "persistent"})

#: Agent -> the condition that holds while the text is compiled for its cores: by the macros of A2 and A3, or those that newer
#: compilers define for all devices. PTO-ISA's CPU_SIM defines both of the latter at once.
AGENTS = {agent: f"defined(__DAV_C220_{macro}__) || (defined(__DAV_{macro}__) && !defined(__CPU_SIM))"
          for agent, macro in (("cube", "CUBE"), ("vector", "VEC"))}


def braces(lines: list[str], head: str = "") -> list[str]:
    """The lines in braces, indented. head: the text before the opening brace."""
    return [head + "{", *(f"    {x}" for x in lines), "}"]


def assigned(kind: str, name: str, address: str, valid: str = "") -> str:
    """The declaration of a tile at an address. valid: the rows and columns that hold values, of a type that is told so."""
    return f"auto {name} = tile_at<{kind}>({address}{valid and f', {valid}'});"


class KernelWriter(Addresses):
    """Writes one kernel."""

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        super().__init__(p, k, layout)
        self.w = Writer(p, "//", 1, k)
        self.counted = counted(p, k)

    def declare(self) -> None:
        """Print the declarations of the agent's tiles. A tile in a buffer with slots gets its address in each iteration
        instead."""
        for value, tile in self.tiles().items():
            self.w(f"{tile.type} {self.name(value)};" if self.iterations(value) else
                   assigned(tile.type, self.name(value), tile.address))
        for b in self.k.buffers:
            if self.is_scratch(b) and b.agent == self.agent:
                self.w(assigned(f"UbTile<{CTYPE[b.dtype]}, {b.shape[0]}, {b.shape[1]}>", b.name, hex(b.offset)))

    # --- statements ---
    def body(self, body: tuple[Stmt, ...]) -> None:
        """Print the statements that the current agent runs. A statement for a prefetched chunk tests whether that chunk
        exists."""
        for s in body:
            if isinstance(s, Loop):
                if not self.runs(s):
                    continue
                self.inside.append(s.index)
                if s.index == "item":
                    self.items(s)
                else:
                    self.chunks(s)
                self.inside.pop()
            elif s.agent == self.agent:
                self.w.at(s)
                self.which = "_next" if s.attr("ahead") and s.kind not in ("signal", "wait") else ""
                lines = rule.of(s)(self, s)
                if self.which and lines and s.out not in self.raw and not (s.out and self.is_number(s.out)):
                    plain = len(lines) == 1 and not lines[0].startswith("if")
                    lines = [f"if (rows_next > 0) {lines[0]}"] if plain else braces(lines, "if (rows_next > 0) ")
                self.w(*lines)

    def runs(self, s: Loop) -> bool:
        """Whether the current agent has ops in a loop, or needs its counter."""
        return s.index in self.counted or any(o.agent == self.agent and not OPS[o.kind].number for o in s.ops)

    def items(self, s: Loop) -> None:
        """Print the loop over the items of one core group. An item is a chunk or sequence, value head and block of the columns.

        Core group i % (number of groups) runs item i. The start of the loop's body computes the indices, and skips items without
        work.
        """
        n = blocks(self.p, self.k)
        over = "slots" if self.k.grid == "chunks" else "N"
        w = self.w
        heads = "HV" if self.k.batch.heads == 1 else f"((HV + {self.k.batch.heads - 1}) / {self.k.batch.heads})"
        items = f"{over} * {heads}{f' * {n}' if n > 1 else ''}"
        if "item" in self.counted:
            w("int64_t iteration = 0;")
        w(f"for (int64_t item = get_block_idx(); item < {items}; item += get_block_num()) {{")
        w.indent += 1
        one = "item" if n == 1 else f"item / {n}"
        if n > 1:
            w(f"const int64_t col = item % {n} * {self.k.sizes[self.k.blocked_dim]};")
        w(f"const int64_t hv = {one} % {heads}{f' * {self.k.batch.heads}' if self.k.batch.heads > 1 else ''}, h = hv / (HV / H);")
        together = moves_all_heads(self.k)
        if together:
            w(f"const int64_t heads = HV - hv < {self.k.batch.heads} ? HV - hv : {self.k.batch.heads};")
            if self.agent == "vector":
                w(f"const int64_t mine = part_of(heads, sub, {self.k.batch.heads // 2});")
        for i in range(1, 1 if together else self.k.batch.heads):
            w(f"const int64_t hv_{i} = hv + {i} < HV ? hv + {i} : HV - 1, h_{i} = hv_{i} / (HV / H);")
        size = chunk_tokens(self.p)
        skip = [f"if ({self.own_number(self.p.skips)} < 0) continue;"] if self.p.skips else []
        if self.k.grid == "chunks":
            w(f"const int64_t slot = {one} / {heads}, n = sequence_of(cu_seqlens, N, slot, {size});", *skip,
              "const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;",
              f"const int64_t c = slot - first / {size} - n;",
              f"if (c * {size} >= length) continue;")
            self.rows(size)
        else:
            ends = "first = cu_seqlens[n], length = cu_seqlens[n + 1] - first"
            if self.p.tokens:  # the host does not fill in ends of equal rows for chunks of one token
                ends = "first = batched ? n * T : cu_seqlens[n], length = batched ? T : cu_seqlens[n + 1] - first"
            w(f"const int64_t n = {one} / HV, b = n * batched;", *skip, f"const int64_t {ends};")
            if any(isinstance(o, Op) and o.attr("ahead") for o in s.body):
                self.chunk(size, "_next", "" if self.k.step > 0 else f"((length - 1) / {size})")
        self.body(s.body)
        if "item" in self.counted:
            w("++iteration;")
        w.indent -= 1
        w("}")
        w.line = NO_LINE

    def chunks(self, s: Loop) -> None:
        """Print the loop over the chunks of a sequence. Its body first assigns tiles with several slots their addresses. A loop
        of step -1 counts the chunks that it has passed."""
        size, w, count = chunk_tokens(self.p), self.w, self.count["chunk"]
        begin = f"int64_t {count} = 0"
        if s.index in self.counted:  # the counter is also read after the loop
            w(f"{begin};")
            begin = ""
        w(f"for ({begin}; {count} * {size} < length; ++{count}) {{")
        w.indent += 1
        if s.step < 0:
            w(f"const int64_t c = (length - 1) / {size} - {count};")
        self.chunk(size)
        if any(isinstance(o, Op) and o.attr("ahead") and o.kind not in ("signal", "wait") for o in s.body):
            self.chunk(size, "_next", step=s.step)
        w(*(f"TASSIGN({self.name(v)}, {tile.address});" for v, tile in self.tiles().items() if self.iterations(v) == s.index))
        self.body(s.body)
        w.indent -= 1
        w("}")
        w.line = NO_LINE

    def chunk(self, size: int, which: str = "", c: str = "c", step: int = 0) -> None:
        """Print the slot and the rows of chunk `c` of a sequence, "" for the first. which: a suffix of the variables' names.
        step: from `c` to the chunk, 1 or -1 for that of the loop's next iteration."""
        of = f"{c} {'+' if step > 0 else '-'} 1" if step else c
        self.w(f"const int64_t slot{which} = first / {size} + n{f' + {of}' if of else ''};")
        self.rows(size, which, f"({of})" if step else of, step)

    def rows(self, size: int, which: str = "", c: str = "c", step: int = 0) -> None:
        """Print the first token of chunk `c`, and its number of tokens. step: as for `chunk`."""
        before = f"{c} * {size}" if c else ""
        left = f"length - {before}" if c else "length"
        rows = f"part_of({left}, 0, {size})" if which else f"{left} < {size} ? {left} : {size}"
        if step < 0:
            rows = f"c > 0 ? {size} : 0"  # only the last chunk of a sequence is ragged
        self.w(f"const int64_t t{which} = first - b * T{f' + {before}' if c else ''};", f"const int64_t rows{which} = {rows};")
        if self.agent == "vector":
            half = self.p.sizes["C"] // 2
            self.w(f"const int64_t part{which} = part_of(rows{which}, sub, {half});")

    def run(self, declared: Mapping[str, str]) -> str:
        """The text of the kernel's body: one section for each agent, between #if for its cores and #endif. declared: lines that
        declare pointers and numbers of the launch, by name. A section has those that it uses."""
        here = agents(self.k)
        for agent, condition in AGENTS.items():
            if agent not in here:
                continue
            self.agent, self.w.line = agent, NO_LINE
            self.w.indent = 0
            self.w(f"#if {condition}")
            self.w.indent = 1
            if agent == "vector":
                self.w("set_mask_norm();", "set_vector_mask(-1, -1);")
            first = len(self.w.lines)
            if agent == "vector":
                self.w("const int64_t sub = get_subblockid();")
            self.declare()
            self.body(self.k.body)
            lines = pruned(self.w.lines[first:])
            self.w.lines[first:] = rolled([*(f"    {x}" for x in used_of(declared, lines)), *lines])
            self.w.indent = 0
            self.w("#endif")
        return self.w.text()
