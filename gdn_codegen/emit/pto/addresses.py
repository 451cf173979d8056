"""Addresses of tensors: pointers to the tiles of an instance, views of them, and slots of the current iteration."""
from __future__ import annotations

from math import prod

from ...ir.types import Dim, Tensor, Tile
from ..base import EVERY, WIDTH_OF, Op, strides
from .values import Values


class Addresses(Values):
    """The addresses in global memory for one kernel."""

    # --- addresses in global memory ---
    def cols(self, t: Tensor, piece: tuple[int, Dim] | None = None) -> str:
        """The number of columns of this instance's tile that exist in memory, or of a piece of them."""
        n, mine = self.p.shape(t)[-1], t.tile.shape(self.sizes)[-1]
        if piece:
            return str(min(n - piece[0], Tile(piece[1:]).shape(self.sizes)[0]))
        if not self.p.padded(t)[-1]:
            return str(mine)
        return f"part_of({n}, col / {mine}, {mine})" if t.dims[-1] == self.k.blocked_dim else str(n)

    def some(self, value: str, t: Tensor, columns: bool = False, piece: tuple[int, Dim] | None = None) -> tuple[str, str]:
        """The numbers of rows and columns of a state's tile that exist in memory. On a vector core: those of the core's part of
        the tile.

        columns: the tile is distributed over the cores by columns, not by rows. piece: of the columns, as for `cols`.
        """
        (rows, cols), (high, wide) = self.p.shape(t), self.buffer(value).shape
        past = [" - col" if d == self.k.blocked_dim else "" for d in t.dims]  # memory has fewer than a block in the last one
        if columns:
            valid = f"part_of({rows}{past[0]}, 0, {high})" if past[0] else str(rows)
            return (valid if self.p.padded(t)[0] else str(high),
                    f"part_of({cols}{past[1]}, sub, {wide})" if self.p.padded(t)[1] else str(wide))
        if not self.p.padded(t)[0]:
            return str(high), self.cols(t, piece)
        part = "sub" if self.agent == "vector" else "0"
        split = self.agent == "vector" or past[0]
        return f"part_of({rows}{past[0]}, {part}, {high})" if split else str(rows), self.cols(t, piece)

    def exists(self, value: str, t: Tensor, columns: bool = False) -> str:
        """The condition that some of this core's part of a state's tile exists in memory: of the last block a core may have no
        row, or column. "" if some always does. columns: as for `some`."""
        if self.agent != "vector" or not self.p.padded(t)[columns] or t.dims[columns] != self.k.blocked_dim:
            return ""
        return f"{self.some(value, t, columns)[columns]} > 0"

    def at(self, o: Op, row: str, more: str = "") -> tuple[str, str]:
        """A pointer to row `row` of the tile that `o` loads or stores, and the stride of rows in elements. more: added to the
        head."""
        t, nth = self.p.tensor(o.attr("tensor")), f"_{o.attr('head')}" if o.attr("head") else ""
        shape = self.p.shape(t)
        last = shape[-1] if len(shape) > 1 else 1
        shift = " + col" if self.k.blocked_dim and t.dims[-1] == self.k.blocked_dim else ""
        if self.k.blocked_dim and len(t.dims) > 1 and t.dims[0] == self.k.blocked_dim:
            shift = f" + col * {last}"
        shift += f" + {o.attr('piece')[0]}" if o.attr("piece") else ""
        if t.index == "token":
            heads, head = (t.heads, f"hv{nth}{more}" if t.heads == "HV" else f"h{nth}{more}")
            if t.strided:
                batch, token, far = strides(t)
                there = f"t{self.which}{f' + {row}' if row != '0' else ''}"
                place = f"b * {batch} + ({there}) * {token} + ({head}) * {far}"
                return f"{t.name}_gm + {place}{shift}", token
            place = f"token_at({heads}, {head}, {last}, b, T, t{self.which}{f' + {row}' if row != '0' else ''})"
            return f"{t.name}_gm + {place}{shift}", f"token_stride({heads}, {last})"
        size, c, every = prod(shape), self.p.sizes["C"], EVERY
        base = {"slot": f"(slot{self.which} * HV + hv{nth}) * {size}", "sequence": f"(n * HV + hv) * {size}",
                "checkpoint": f"((first / ({c} * {every}) + (c + 1) / {every} - 1) * HV + hv) * {size}",
                "block": f"{self.channel(t.slots, o.attr('ahead', 0))} * {size}", "head": f"hv{nth} * {size}",
                "const": ""}[t.index]
        if t.at:
            by_row = t.index == "checkpoint" and self.p.tensor(t.at).index == "number"  # of a sequence's states
            base = f"{self.kept_at(t)} * {t.over or t.name}_stride + {'(c * HV + hv)' if by_row else 'hv'} * {size}"
        gm = f"{t.over or t.name}_gm"
        step = last if len(t.dims) > 1 else 1
        if o.attr("row") or o.attr("col"):
            row = str(o.attr("row") * step + o.attr("col"))
            return f"{gm} + {base} + {row}{shift}", str(step)
        terms = [gm, base, "" if row == "0" else f"{row} * {step}" if step != 1 else row]
        return " + ".join(x for x in terms if x) + shift, str(step)

    def kept_at(self, t: Tensor) -> str:
        """The slot or row of a tensor that lies where integers say: the sequence's, or for a checkpoint the chunk's."""
        if t.index == "checkpoint" and self.p.tensor(t.at).index == "numbers":
            return f"{t.at}_gm[n * {t.at}{WIDTH_OF} + c]"
        return self.own_number(t.at)

    def own_number(self, name: str) -> str:
        """A sequence's own number in a tensor of integers: of several, the first or the one that another tensor counts."""
        t = self.p.tensor(name)
        nth = f" + {t.at}_gm[n] - 1" if t.at else ""
        return f"{name}_gm[n * {name}{WIDTH_OF}{nth}]" if t.index == "numbers" else f"{name}_gm[n]"

    def view(self, o: Op, row: str, rows: str, cols: int | str) -> str:
        """A view of global memory: `rows` x `cols` elements of the tensor that `o` moves, beginning at row `row` of its tile."""
        pointer, stride = self.at(o, row)
        return f"view({pointer}, {rows}, {cols}, {stride})"

    def channel(self, slots: int, ahead: int) -> str:
        """The index of this core group's tile in a channel with `slots` tiles for each core group."""
        if slots == 1:
            return "get_block_idx()"
        return f"(get_block_idx() * {slots} + {self.iteration(self.inside[-1], ahead, slots)})"

    def event(self, o: Op) -> str:
        """The event id of a signal or wait. If it has two ids, even and odd iterations use them in turn."""
        flag = o.attr("id")
        if isinstance(flag, int):
            return f"EVENT_ID{flag}"
        even, odd = flag
        return f"{self.iteration(o.attr('loop'), o.attr('ahead', 0), 2)} ? EVENT_ID{odd} : EVENT_ID{even}"
