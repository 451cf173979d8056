"""stored_values: which values of a kernel have a buffer, and in which space. `place` uses it.

A value without a buffer is an expression inside its reader. These are numbers, row and column views, and cheap elementwise ops
with one reader. Other values get a buffer in the space that the device names for their kind.

Values that lie in registers until a later product has been computed cost registers. So where a product comes between, an
elementwise op that is the last reader of two tiles has a buffer, and a cast of a loaded tile is an expression in each reader.
"""
from __future__ import annotations

from functools import cached_property

from ...devices import Device
from ...ir.core import Kernel, Op, Program, loops, types, uses
from ...ir.ops import OF_ROWS, OPS
from ..uses import readers

#: Ops that read operands from the space of products' operands: how many of their first ones.
OPERANDS = {"matmul": 2, "diag_inverse": 1, "decayed_blocks": 4, "decayed_pairs": 4}
#: Ops whose operands device code addresses by itself: two tiles in 16 bits, and sums.
DECAYED = ("decayed_blocks", "decayed_pairs")


def is_view(o: Op) -> bool:
    """Whether threads need no storage for the value of `o`: a number, or entries that each reader computes."""
    return "threads" in OPS[o.kind].view


def over(o: Op, device: Device) -> bool:
    """Whether the result of `o` overwrites its first operand, which has no other reader. True for the inverse of a whole tile."""
    return o.kind == "diag_inverse" and o.attr("size") == device.solves_whole


class StoredValues:
    """The values of a kernel: their ops, readers and types. carried: carried values, and what they begin as and become."""

    def __init__(self, p: Program, k: Kernel, device: Device) -> None:
        """Collects the ops of `k` and who reads them."""
        self.device, self.sizes, self.type, self._stored = device, {**p.sizes, **k.sizes}, types(k.body), dict[Op, bool]()
        self.count, self.ops = uses(k.body), k.ops
        self.defs = {o.out: o for o in self.ops if o.out}
        self.place = {o: n for n, o in enumerate(self.ops)}
        self.readers = readers(k.body)
        self.all_carried = [c for lp in loops(k.body) for c in lp.carried]
        self.carried = {x for c in self.all_carried for x in (c.name, c.init, c.next, c.result)}
        self.one_token = any(o.attr("one_token") for o in self.ops)  # whether chunks are single tokens
        self.tokens = {o.attr("tokens") for o in self.ops if o.attr("tokens")}  # of a group
        self.begins = {lp.warm_up for lp in loops(k.body)}
        self.carried |= {o.args[1] for o in self.ops if o.kind == "load" and o.args[1:] and o.out in self.carried}

    def stored(self, o: Op) -> bool:
        """Whether the value of `o` has storage. Otherwise it is an expression in its reader."""
        known = self._stored.get(o)
        return known if known is not None else self._stored.setdefault(o, self._has_storage(o))

    def _has_storage(self, o: Op) -> bool:
        """What `stored` keeps for each op."""
        if o.out in self.carried or o.out in self.begins:
            return True
        if is_view(o) and o.out not in self.operands:
            return False
        if not OPS[o.kind].elementwise:
            return True
        if o.kind == "of_token" and self.type[o.out].rank == 0:
            return False  # each reader reads shared memory, so that no register holds the number
        if self.count.get(o.out, 0) != 1:
            return not self.cast_again(o)
        reader, n = self.readers[o.out][0]
        if self.device.operand != self.device.tile and n < OPERANDS.get(reader.kind, 0):
            return True
        if reader.kind == "matmul" and n == 2:
            return False
        if self.frees(o):
            return True
        if not OPS[reader.kind].elementwise and reader.kind != "store" and self.device.tile != "register":
            return True  # cumsum, last and row_sum need an operand in storage
        # A vector under a tile would be computed again for every column.
        return (self.device.vector != "register" and self.type[o.out].rank == 1 and reader.kind in ("col", "row")) \
            or (self.device.number != "register" and self.type[o.out].dims in ((), *((n,) for n in self.tokens)))

    def cast_again(self, o: Op) -> bool:
        """Whether `o` casts a loaded tile in shared memory for elementwise ops between which a product is computed."""
        x, readers = self.defs.get(o.args[0]), [r for r, _ in self.readers.get(o.out, [])]
        return (o.kind == "cast" and x is not None and x.kind == "load" and self.type[o.out].rank == 2
                and self.device.loaded != self.device.tile and len(readers) > 1 and all(OPS[r.kind].elementwise for r in readers)
                and self.product_between(*readers))

    def frees(self, o: Op) -> bool:
        """Whether `o` is the last reader of two tiles in registers, and its own reader comes after a later product."""
        (reader, _), = self.readers[o.out]
        if self.type[o.out].rank != 2 or not self.product_between(o, reader):
            return False
        return len([a for a in self.tiles_under(o) if all(self.place[r] <= self.place[o] for r, _ in self.readers[a])]) > 1

    def tiles_under(self, o: Op) -> set[str]:
        """The tiles with storage in registers that `o` reads, directly or through expressions."""
        out: set[str] = set()
        for x in (self.defs[a] for a in o.args if a in self.defs and self.type[a].rank == 2):
            if not self.stored(x):
                out |= self.tiles_under(x)
            elif x.kind != "load" or self.device.loaded == self.device.tile:
                out.add(x.out)
        return out

    def product_between(self, *ops: Op) -> bool:
        """Whether a product is computed after the first of `ops` and before the last."""
        first, last = min(self.place[o] for o in ops), max(self.place[o] for o in ops)
        return any(o.kind == "matmul" for o in self.ops[first + 1:last])

    @cached_property
    def operands(self) -> set[str]:
        """The values that must be in the operands' space: operands of products, and inverses of blocks."""
        made = {o.out for o in self.ops if o.kind == "diag_inverse"}  # most of its entries stay zero, and need no registers
        read = made | {a for o in self.ops for a in o.args[:OPERANDS.get(o.kind, 0)]}
        return read | {x for c in self.all_carried if c.name in read for x in (c.init, c.next)}

    def space(self, value: str) -> str:
        """The memory space of a value, which the device chooses by the kind of value."""
        o, d, t = self.defs.get(value), self.device, self.type[value]
        if t.rank == 0:
            return d.summed if o is not None and o.kind in OF_ROWS else d.number
        if self.one_token:  # what the iterations of a group of tokens read lies in shared memory
            group = t.dims[0] in self.tokens and (value in self.carried or (o is not None and o.kind == "move"))
            return d.vector if group else d.tile
        if t.rank == 1:
            return d.vector
        if o is not None and o.kind == "move":
            return str(o.attr("space"))
        if value in self.operands:
            return d.operand
        if (o is not None and OPS[o.kind].across_rows) or any(OPS[r.kind].across_rows for r, _ in self.readers.get(value, [])):
            return d.loaded
        if o is None or o.kind == "matmul" or value in self.carried:
            return d.product
        if any(r.kind == "if_negative" for r, _ in self.readers.get(value, [])):
            return d.tile  # a load for the next iteration, which waits for nothing until then
        return d.loaded if o.kind == "load" else d.tile

    def reads(self, o: Op, name: str) -> bool:
        """Whether `o` reads `name`, directly or through expressions inside `o`."""
        return any(a == name or (a in self.defs and not self.stored(self.defs[a]) and self.reads(self.defs[a], name))
                   for a in o.args)

    def all_readers(self, name: str) -> list[tuple[Op, int]]:
        """The ops that read `name`, with the index of the operand. Readers that are expressions are replaced by their own
        readers."""
        out = []
        for r, n in self.readers.get(name, []):
            out += [(r, n)] if not r.out or self.stored(r) else self.all_readers(r.out)
        return out
