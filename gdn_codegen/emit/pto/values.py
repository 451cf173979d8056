"""Names, buffers, addresses and C++ tiles of a kernel's values.

The tile of a value is declared once, with the address of its buffer. Its type is one of the layouts in the template.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from ...ir.core import Buffer, Loop, loops, types
from ...ir.ops import OPS
from ...ir.rings import rings
from ...ir.types import BYTES
from ..base import EVERY, Kernel, Op, Program, Stmt, numbers, strides, touched

CTYPE = {"int32": "int32_t", "float16": "half", "bfloat16": "bfloat16_t", "float32": "float"}
#: Names that the text of kernels uses, so that no value may have them.
OWN = {"N", "T", "H", "HV", "b", "n", "h", "hv", "h_1", "hv_1", "t", "c", "item", "first", "length", "rows", "part", "slot",
       "sub", "col", "heads", "mine", "iteration", "t_next", "rows_next", "part_next", "slot_next", "passed", "block", "batched",
       "slots", "ffts", "cu_seqlens", "workspace", "constants", "table", "table_bytes", "tile_at", "token_at", "token_stride",
       "sequence_of", "part_of", "group_flag", "all_flag", "fill_rows", "fill_tile", "fill_row", "fill_wide", "add_rows",
       "diagonal_stack", "stacked_product", "extract_blocks", "insert_blocks", "place", "event_id", "i",
       "from", "to", "valid", "some", "sums", "wide", "flat", "half", "float", "auto", "pto", "int", "new", "and", "or",
       "not", "xor", "do",
       "if", "for", EVERY, "view", "div", "exp", "log", "std", "this", "signed", "long", "short", "bool", "case", "catch", "char",
       "const", "constexpr", "default", "delete", "double", "else", "enum", "explicit", "export", "extern", "friend", "goto",
       "inline", "mutable", "namespace", "operator", "private", "protected", "public", "register", "sizeof", "static", "struct",
       "switch", "template", "throw", "try", "typedef", "typename", "union", "unsigned", "using", "virtual", "void", "volatile"}

#: Names of PTO-ISA, of the compiler and of the C library that the text uses, by what they begin with, and types of tiles.
THEIRS = re.compile(r"T[A-Z]{3}|PIPE_|EVENT_ID|CAST_|u?int\d|get_|set_|wait_flag|pipe_|ffts_|reinterpret_cast|NULL|DYNAMIC|"
                    r"(bfloat16_t|Gm|AICORE|PTO_\w+|(Ub|L1|Acc|Tile|Round)[A-Z]\w*)$")


def parameter(number: str) -> str:
    """The parameter for a caller's number. It gets a suffix if the kernel's text uses the name."""
    return f"{number}_" if number in OWN else number


@dataclass(frozen=True)
class Tile:
    """The tile of a value: its C++ type, and its address in bytes."""

    type: str
    address: str


def literal(x: float) -> str:
    """A number as a C++ literal."""
    if x in (float("inf"), float("-inf")):
        return "__builtin_inff()" if x > 0 else "-__builtin_inff()"
    return f"{x!r}f"


def counted(p: Program, k: Kernel) -> set[str]:
    """The loops with a counter, because signals or tiles of channels are used in rotation over the iterations."""
    slots = {t.name for t in p.tensors if t.slots > 1}
    here = {lp.index for lp in loops(k.body) for o in lp.body
            if isinstance(o, Op) and o.kind in ("load", "store") and o.attr("tensor") in slots}
    return {o.attr("loop") for o in k.ops if o.attr("loop")} | (here & {"item"})


def moves_all_heads(k: Kernel) -> bool:
    """Whether any load or store moves the values of all heads of an item."""
    return any(o.attr("heads") for o in k.ops)


def agents(k: Kernel) -> set[str]:
    """The agents that run ops of the kernel."""
    return {o.agent for o in k.ops if not OPS[o.kind].number}


class Values:
    """The values of one kernel."""

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        """The buffer of each value, and the names that no value may take. layout: of callers' tensors, "bthd" or "bhtd"."""
        self.p, self.k, self.layout = p, k, layout
        self.sizes = {**p.sizes, **k.sizes}
        self.buffers = {b.name: b for b in k.buffers}
        self.type = types(k.body)
        self.defs = {o.out: o for o in k.ops if o.out}
        self.where: dict[str, str] = {o.out: o.buffer for o in k.ops if o.buffer}
        self.results: dict[str, str] = {}  # name of a carried value after its loop -> its name in the loop
        for lp in loops(k.body):
            for c in lp.carried:
                self.where[c.name] = self.where[c.result] = self.where[c.init]
                self.results[c.result] = c.name
        ragged = {t.name for t in p.tensors if t.index == "token"}
        #: Values that are loaded from callers' tensors. The load declares the tile, with the number of rows that exist.
        self.raw = {o.out for o in k.ops if o.kind == "load" and o.attr("tensor") in ragged}
        self.head_rows: set[str] = set()
        for o in k.ops if layout == "bhtd" else ():
            if (o.kind == "load" and o.attr("heads")) or (o.kind == "valid" and o.args[0] in self.head_rows):
                self.head_rows.add(o.out)
        self.agent = ""
        self.inside: list[str] = []  # loops around the current statement
        self.which = ""  # the chunk of the current statement: "" for this one, "_next" for the next one
        self.ring = rings(k)
        #: Index of a loop -> the C++ variable that counts its iterations.
        self.count = {"item": "iteration", "chunk": "c" if k.step > 0 else "passed"}
        self.taken = OWN | {parameter(n) for n in numbers(k)}
        self.taken |= {f"{x}{t.name}{y}" for t in touched(p, k) for x, y in (("", "_gm"), ("has_", ""), ("", "_stride"))}
        self.taken |= {x for t in touched(p, k) for x in strides(t)}

    def name(self, value: str) -> str:
        """The C++ expression for a value: a literal, a parameter, or the name of its tile or of the value that it is a view
        of."""
        value = self.results.get(value, value)
        o = self.defs.get(value)
        if o is not None and o.kind == "const":
            return literal(o.attr("value"))
        if o is not None and o.kind == "scalar":
            nth = f"_{o.attr('head')}" if o.attr("head") else ""
            return f"{o.attr('tensor')}_gm[hv{nth}]" if o.attr("tensor") else parameter(o.attr("param"))
        if (o is not None and o.kind in ("row", "add_rows")) or (o is not None and o.kind == "cast" and not o.buffer):
            return self.name(o.args[0])
        return f"{value}_" if value in self.taken or THEIRS.match(value) else value

    def buffer(self, value: str) -> Buffer:
        """The buffer of a value, or of the value that it is a view of."""
        o = self.defs.get(value)
        if value not in self.where and o is not None:
            return self.buffer(o.args[0])
        return self.buffers[self.where[value]]

    def source(self, value: str) -> str:
        """The value whose buffer holds `value`: itself, or the value that it is a view of."""
        return value if value in self.where else self.source(self.defs[value].args[0])

    def address(self, value: str, plus: int = 0) -> str:
        """The address of a value in bytes, plus `plus`. In a buffer with slots it is the slot of this iteration."""
        b, (loop, ahead) = self.buffer(value), self.ring.get(self.source(value), ("", 0))
        start = hex(b.offset + plus)
        return f"{start} + {self.iteration(loop, ahead, b.slots)} * {prod(b.shape) * BYTES[b.dtype]}" if loop else start

    def iteration(self, loop: str, ahead: int, slots: int) -> str:
        """The slot of the loop's current iteration, or of the one `ahead` iterations later."""
        count = self.count[loop]
        return f"{f'({count} + {ahead})' if ahead else count} % {slots}"

    def is_number(self, value: str) -> bool:
        """Whether a value is a number."""
        return self.type[value].rank == 0

    def is_col(self, value: str) -> bool:
        """Whether a value is a column, which ops broadcast along rows."""
        return self.defs[value].kind == "col" if value in self.defs else False

    def is_wide(self, value: str) -> bool:
        """Whether a value is a vector in spread form, in which each entry has 32 bytes."""
        return self.type[value].rank == 1 and len(self.buffer(value).shape) == 2

    def whole(self, value: str) -> bool:
        """Whether a vector is complete on each core. For a view: whether its source is."""
        return self.buffer(value).shape[0] == self.type[value].shape(self.sizes)[0] if self.type[value].rank == 1 \
            else self.whole(self.defs[value].args[0])

    def by_head(self, value: str) -> bool:
        """Whether a tile with a column for each head lies transposed, with a row for each head as in the caller's tensor."""
        return value in self.head_rows

    def is_scratch(self, b: Buffer) -> bool:
        """Whether a buffer is the scratch of an op that uses it. A move of several heads does so only where they lie as rows."""
        o = self.defs.get(b.name.removesuffix("_scratch"))
        plain = o is not None and o.kind == "move" and not self.is_wide(o.args[0]) and not self.by_head(o.args[0])
        return b.name.endswith("_scratch") and not plain

    def parts(self, value: str) -> int:
        """The number of a tile's rows that this core holds."""
        return self.buffer(value).shape[0]

    def tile(self, value: str) -> Tile | None:
        """The tile of a value of the current agent. None if the value needs no declaration."""
        o = self.defs.get(value)
        if value not in self.where:
            if o is not None and o.kind == "col":
                source = self.buffer(value)
                n = source.shape[0] // 2 if self.whole(value) else source.shape[0]
                address = self.address(value) + (f" + sub * {n * 4}" if self.whole(value) else "")
                return Tile(f"UbCol<float, {n}>", address)
            if o is not None and o.kind == "segment":
                return Tile(f"UbTile<float, 1, {o.attr('size')}>", self.address(value, 4 * o.attr("start")))
            return None
        if o is not None and o.kind == "add_rows":
            return None  # that of its operand
        b = self.buffers[self.where[value]]
        ctype, shape = CTYPE[b.dtype], ", ".join(map(str, b.shape))
        if self.by_head(value):
            shape = ", ".join(map(str, b.shape[::-1]))
        if b.space == "UB":
            if self.type[value].rank == 1:
                kind = f"UbWide<{ctype}, {b.shape[0]}>" if len(b.shape) == 2 else f"UbTile<{ctype}, 1, {b.shape[0]}>"
                return Tile(kind, self.address(value))
            return Tile(f"UbTile<{ctype}, {shape}>", self.address(value))
        kind = {"L1": "L1Tile", "L0A": "TileLeft", "L0B": "TileRight", "L0C": "TileAcc"}[b.space]
        return Tile(f"{kind}<{ctype}, {shape}>", self.address(value))

    def tiles(self) -> dict[str, Tile]:
        """The current agent's values whose tiles are declared once: value -> tile."""
        out = {}
        for value in self.declarations(self.k.body):
            tile = self.tile(value)
            if tile is not None and value not in self.raw:
                out[value] = tile
        return out

    def iterations(self, value: str) -> str:
        """The loop whose iterations put a value in different slots, "" if there is none."""
        return self.ring.get(self.source(value), ("", 0))[0]

    def declarations(self, body: tuple[Stmt, ...]) -> list[str]:
        """The current agent's values that may need a declaration. A carried value has its name in the loop."""
        out: list[str] = []
        for s in body:
            if isinstance(s, Loop):
                out += [c.name for c in s.carried if self.buffer(c.name).agent == self.agent]
                out += self.declarations(s.body)
            elif s.out and s.agent == self.agent:
                out.append(s.out)
        return out
