"""Writes one kernel: statements, the loop over chunks, and the whole text. A rule gives the text of each op.

The same text works for CUDA and for the CPU: `t` has the device functions for either (device/).
"""
from __future__ import annotations

from itertools import groupby

from ...ir.ops import AHEAD, BESIDE, ORDER
from ..base import EVERY, EmitError, KernelText, Loop, Op, Rules, Stmt, Writer
from .head import Head
from .tiles import Value

rule = Rules("tilelang", {"segment": "vectorise", "join": "vectorise", "block": "decompose", "blocks": "decompose",
                          "diagonal_stack": "decompose", "insert": "decompose", "from_quarters": "decompose",
                          "add_rows": "added_rows", "signal": "synchronise", "fence": "mbarriers", "drain": "mbarriers",
                          "warp_barrier": "mbarriers",
                          "transpose": "warp_groups", "claim_part": "partition", "claim_item": "persistent",
                          "next_item": "persistent"})


#: The line that computes the chunk of a walk from the last chunk to the first. passed: the chunks before it in the walk.
BACKWARDS = "chunk = T.ceildiv(length, C) - 1 - passed"


class KernelWriter(Head):
    """Writes one kernel."""

    rules = rule
    in_loop = False  # whether the current statements are those of a loop
    gathered: tuple[Op, ...] = ()  # ops of an incomplete group that one statement runs in parallel

    # --- statements ---
    def gather(self, o: Op) -> tuple[Op, ...]:
        """Collect the ops that one statement runs in parallel. Returns all of them for the last op, and none for the others."""
        self.gathered = (*self.gathered, o)
        if len(self.gathered) < o.attr(BESIDE, 1):
            return ()
        row, self.gathered = self.gathered, ()
        return row

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Print statements in order. Ops that work one iteration ahead compute a group of tokens: before a loop the first one, in
        a loop that of the next token, if it begins a group."""
        for ahead, run in groupby(body, lambda s: isinstance(s, Op) and bool(s.attr(AHEAD))):
            group = tuple(run)
            if not ahead:
                self.statements(group)
                continue
            tokens = max((o.attr("tokens", 0) for o in group if isinstance(o, Op)), default=0)
            first = f"start - {self.use('b')} * L"
            if self.in_loop:
                self.w(f"if T.truncmod(chunk + 1, {tokens}) == 0 and chunk + 1 < {self.use('length')}:",
                       f"    row_next = {first} + chunk + 1", "    rows_next = length - (chunk + 1)")
            else:
                self.w(f"if {self.use('length')} > 0:", f"    row_next = {first}", "    rows_next = length")
            self.w.indent += 1
            self.statements(group)
            self.w.indent -= 1
            self.which = ""

    def statements(self, body: tuple[Stmt, ...]) -> None:
        """Print statements in order. An op without a buffer becomes an expression in the ops that read it."""
        for s in body:
            if isinstance(s, Loop):
                self.walk(s)
                continue
            write = self.rules.of(s)
            args = [self.env[a] for a in s.args]
            self.about(s)
            self.which = "_next" if s.attr(AHEAD) else ""
            if self.rules.is_statement(s):
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
                if s.attr(ORDER) == "copy":
                    self.line(f"t.copy({self.whole(args[0].buffer)}, {self.whole(s.buffer)})")
                else:
                    self.fill(to, x)
                x = to
            self.env[s.out] = x
            self.begins(s.out)

    def begins(self, value: str) -> None:
        """If `value` is the warm-up length, print the assignment of the chunk at which the walk begins."""
        if value and value == self.warm_up:
            self.line(f"begin = first - T.max(T.cast({self.env[value].at()}, T.int32), 0)")

    def walk(self, lp: Loop) -> None:
        """Print a loop over chunks or parts. A carried value has the buffer of its name."""
        names = {c.name for c in lp.carried}
        for c in lp.carried:
            here = self.stored(c.type.dims, c.name)
            if self.env[c.init].buffer != c.name:
                self.fill(here, self.env[c.init])
            self.env[c.name] = self.env[c.result] = here
        first = len(self.w.lines)
        self.w.indent += 1
        self.part = "earlier" if lp.index == "part" else "part"
        self.in_loop = True
        self.body(lp.body)
        self.in_loop = False
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
            self.w(f"for {self.passed} in T.serial(T.max({self.use('begin')}, 0) + slice_index, first, {self.k.slices}):")
        elif self.k.grid == "parts":
            self.w(f"for {self.passed} in T.serial({self.use('begin')}, stop):")
        else:
            self.w(f"for {self.passed} in T.serial(T.ceildiv(length, C)):")
        self.w.indent += 1
        if lp.step < 0:
            self.w(BACKWARDS)
        for text in self.chunk() if lp.index != "part" else []:
            self.line(text)
        self.w.indent -= 1
        self.w.lines += after

    def compared(self, i: str, sign: str, j: str) -> str:
        """A comparison of the row of an element with its column."""
        return f"{i} {sign} {j}"

    def chunk(self) -> list[str]:
        """The lines that compute the variables of a chunk that ops use."""
        lines = {"row": "row = start - b * L + chunk * C",
                 "rows": "rows = length - chunk * C"}
        if self.k.grid != "chunks":
            lines["slot"] = "slot = start // C + n + chunk"
            first, n = (f"T.truncdiv({x}, {y})" for x, y in (("start", f"C * {EVERY}"), ("chunk + 1", EVERY)))
            lines |= {f"{x.name}_t": f"{x.name}_t = {self.number(x.name, 'chunk')}" for x in self.p.tensors
                      if x.index == "numbers" and x.name in self.params}
            lines["checkpoint"] = f"checkpoint = T.cast({first} + {n} - 1, T.int64)"
        if "row" in self.uses:
            self.use("b")
        return [text for name, text in lines.items() if name in self.uses]

    # --- the whole ---
    def text(self) -> KernelText:
        """The kernel's text: head, buffers, body. EmitError if no pass has set its number of threads."""
        if not self.k.threads:
            raise EmitError(f"tilelang: kernel {self.k.name} has no number of threads; pass block_threads should have given one")
        chunks, parts = self.k.grid == "chunks", self.k.grid == "parts"
        # The chunk has tokens. The part has chunks, or is the first of its sequence.
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
        if self.k.blocks_per_sm:
            self.w(f"t.blocks_at_least({self.k.blocks_per_sm})")
        self.overlap()
        self.w.lines += clear
        self.open_block(*conditions)
        if parts:
            self.w(*(["begin = first"] if "begin" in self.uses and not self.warm_up else []))
        self.w(*at_chunk)
        return self.finished(body)

