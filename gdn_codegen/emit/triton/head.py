"""The head of a kernel: the indices of an instance, from its program id, and the rows that it clears."""
from __future__ import annotations

from ..base import CLEAR, by_token, in_pairs, own_numbers, wrapped
from .addresses import Addresses

WIDTH = 120


class Head(Addresses):
    """The head of one kernel."""

    def clear(self) -> list[str]:
        """The lines that write zeros to this instance's share of the rows that no sequence covers.

        An instance is responsible for the tokens of its chunk, part or sequence. Instances of the last sequence are also
        responsible for the tokens past its end.
        """
        out: list[str] = []
        for t in self.p.clears(self.k):
            for name in ("N", "T", "batched", "C", "length"):
                self.use(name)
            self.which = "_rest"
            at, mask = self.pointers(t, False), self.mask(t, False)
            self.which = ""
            low, size = {"sequences": ("0", ""), "chunks": ("t", "C"), "parts": ("first", "size")}[self.k.grid]
            left_out = f"tl.where({self.p.skips}_n < 0, {low}, {{}})" if self.p.skips else "{}"
            wanted = f"{CLEAR}{t.name} != 0"
            out += [f"if ({wanted}) & (instance == 0):" if in_pairs(self.k) else f"if {wanted}:",
                    "    row_end = tl.where((batched == 0) & (n == N - 1), T - start, length).to(tl.int32)",
                    f"    clear_begin = {left_out.format(f'tl.maximum({low}, length)' if size else 'length')}",
                    f"    clear_end = {f'tl.minimum({low} + {size}, row_end)' if size else 'row_end'}",
                    "    for rest in range(clear_begin, clear_end, C):",
                    f"        row_rest = {self.origin()} + rest",
                    f"        valid_rest = {self.index('C', 0, 1)} < clear_end - rest",
                    *(f"        {x}" for x in wrapped(f"tl.store({at}, 0.0, mask={mask})", WIDTH - 12))]
        return out

    def head(self, clear: list[str]) -> list[str]:
        """The lines that compute an instance's head, sequence, and chunk or part from its program id. clear: lines that come
        before the points where an instance without work ends."""
        out = self.instance_of_grid()
        ends: list[str] = [] if clear else out  # the lines that end an instance without work
        ragged = {"row", "valid", "slot", "length", "checkpoint", "row_next", "slot_next"} & set(self.uses)
        if self.k.grid != "sequences":
            ragged = {"length"}
        for t in own_numbers(self.p, self.k):
            first = f" * {t.name}_width" + (f" + {t.at}_n - 1" if t.at else "") if t.index == "numbers" else ""
            out.append(f"{t.name}_n = tl.load({t.name}_ptr + n{first}).to(tl.int64)")
            ends += [f"if {t.name}_n < 0:", "    return"] if t.name == self.p.skips else []
        if "b" in self.uses:
            out.append(f"b = (n * {self.use('batched')}).to(tl.int64)")
            self.use("T")
        if ragged and by_token(self.k):  # the ends of equal rows need no load
            first, end = (f"tl.load(cu_seqlens + {at}, mask={self.use('batched')} == 0, other=0)" for at in ("n", "n + 1"))
            out += [f"start = tl.where(batched != 0, n.to(tl.int64) * {self.use('T')}, {first})",
                    f"length = tl.where(batched != 0, T, {end} - start).to(tl.int32)"]
        elif ragged:
            out += ["start = tl.load(cu_seqlens + n).to(tl.int64)",
                    "length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)"]
        if self.k.grid == "chunks":
            out.append("t = ((slot - start // C - n) * C).to(tl.int32)")
            ends += ["if t >= length:", "    return"]
        if self.k.grid == "parts":
            out.append("first = ((part - start // size - n) * size).to(tl.int32)")
            ends += ["if first >= tl.maximum(length, 1):", "    return"]
            out += ["stop = tl.minimum(first + size, length)"] if "stop" in self.uses else []
            out += ["begin = first"] if "begin" in self.uses and not self.warm_up else []
        if {"valid", "valid_next"} & set(self.uses):
            self.use("i_C")
        for d in self.p.sizes:
            if f"i_{d}" in self.uses:
                out.append(f"i_{d} = block * B{d} + tl.arange(0, B{d})" if d == self.k.blocked_dim
                           else f"i_{d} = tl.arange(0, {self.dim(d)})")
        out += [f"{i} = {f'{first} + ' if first else ''}tl.arange(0, {size})" for i, (_, first, size) in self.pieces.items()]
        return [*out, *clear, *ends] if clear else out

    def instance_of_grid(self) -> list[str]:
        """The lines that compute the block of the blocked dim, the head, and the chunk, part or sequence from the program id."""
        dim = self.k.blocked_dim
        out = ["pid = tl.program_id(0)"]
        if in_pairs(self.k):
            out += ["instance = pid // (tl.num_programs(0) // 2)", "pid = pid % (tl.num_programs(0) // 2)"]
        if dim:
            count = f"({self.use(self.tiled(dim))} // {self.use(f'B{dim}')})"
            out += [f"block = pid % {count}", f"pid = pid // {count}"]
        if self.k.slices > 1:
            out += [f"slice_index = pid % {self.k.slices}", f"pid = pid // {self.k.slices}"]
        out.append(f"hv = pid % {self.use('HV')}")
        if "h" in self.uses:
            out.append(f"h = hv // (HV // {self.use('H')})")
        if self.k.grid == "chunks":
            return [*out, "slot = (pid // HV).to(tl.int64)",
                    f"n = find_sequence(cu_seqlens, slot, {self.use('N')}, {self.use('C')})"]
        if self.k.grid == "parts":
            return [*out, f"size = {self.use('C')} * {self.use('span')}", "part = (pid // HV).to(tl.int64)",
                    f"n = find_sequence(cu_seqlens, part, {self.use('N')}, size)"]
        return [*out, "n = pid // HV"]
