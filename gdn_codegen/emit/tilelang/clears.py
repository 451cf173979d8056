"""Zeros in the rows that no sequence covers: which instance of a kernel writes them, and the statements that do."""
from __future__ import annotations

from ...ir.types import Tensor
from ..base import CLEAR, UNITS, Writer, in_pairs
from .tiles import Tiles


class Clears(Tiles):
    """The clearing of one kernel. items: whether a block takes several instances, one after the other (a loop over items)."""

    items = False

    def clear(self) -> list[str]:
        """The lines that clear counters, and write zeros to this instance's share of the rows that no sequence covers. In a loop
        over items, the agent that stores a tensor clears its rows."""
        self.w = Writer(self.p, "#", 3)
        self.w(*(f"{self.params[o.attr('tensor')]}[0] = 0" for o in self.k.ops if o.kind == "clear_counter"))
        for t in self.p.clears(self.k) if not self.items else ():
            self.clear_rows(t)
        return self.w.lines

    def clear_rows(self, t: Tensor) -> None:
        """Print the statements that write zeros to this instance's share of the rows of `t` that no sequence covers.

        An instance is responsible for the tokens of its chunk, part or sequence. Instances of the last sequence are also
        responsible for the tokens past its end. If a kernel chose the parts, all share these (`clear_past_the_end`).
        """
        for name in ("b", "length"):
            self.use(name)
        low, high = {"sequences": ("0", "row_end"), "chunks": ("chunk * C", "T.min(chunk * C + C, row_end)"),
                     "parts": ("first * C", "T.min((first + span) * C, row_end)")}[self.k.grid]
        begin = "length" if self.k.grid == "sequences" else f"T.max({low}, length)"
        if self.p.skips:
            begin = f"T.if_then_else({self.p.skips}_n < 0, {low}, {begin})"
        half = " and half == 0" if in_pairs(self.k) else ""
        host = f" and {UNITS} == 0" if self.k.places else ""
        kept = "{}" if self.items else "T.alloc_var(T.int32, init={})"  # a loop would not initialise a variable again
        self.w(f"if {CLEAR}{t.name} != 0{half}:",
               f"    row_end = T.if_then_else(batched == 0 and n + 1 == ends - 1{host}, L - start, length)",
               f"    clear_begin = {kept.format(begin)}",
               f"    clear_end = {kept.format(high)}",
               "    for rest in T.serial(T.ceildiv(T.max(clear_end - clear_begin, 0), C)):",
               "        row = start - b * L + clear_begin + rest * C",
               "        rows = clear_end - clear_begin - rest * C")
        self.w.indent += 2
        for head in range(self.k.batch.in_body):
            self.zeros(t, head)
        self.w.indent -= 2

    def zeros(self, t: Tensor, head: int) -> None:
        """Print a loop that writes zeros to the first `rows` rows of the current tile."""
        self.hv, self.order = f"hv + {head}" if head else type(self).hv, "parallel"
        index = self.loop(t.dims)
        inside = self.inside(t, index)
        for n, x in enumerate(inside):
            self.line(f"{'    ' * n}if {x}:")
        self.line(f"{'    ' * len(inside)}{self.address(t, index)} = 0")
        self.end(t.dims)

    def clear_past_the_end(self, t: Tensor) -> None:
        """Print the statements by which all instances clear rows of `t` past the last sequence, if a kernel chose the parts."""
        half = " and half == 0" if in_pairs(self.k) else ""
        self.w(f"if {UNITS} != 0 and {CLEAR}{t.name} != 0{half}:",
               "    b = 0",
               "    past = cu_seqlens[ends - 1]",
               "    share = T.ceildiv(T.ceildiv(T.max(L - past, 0), parts), C)",
               "    for rest in T.serial(share):",
               "        row = past + (part * share + rest) * C",
               "        rows = T.min(L - row, C)")
        self.w.indent += 2
        self.zeros(t, 0)
        self.w.indent -= 2
