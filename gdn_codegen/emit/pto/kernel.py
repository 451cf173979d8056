"""Writes one kernel: addresses, declarations, loops; the text of an op is a rule's.

A part an agent. Vector cores hold their part of a tile's rows, `sub` says which; a vector of C values is whole on each core.
A value's tile is declared once, at the address of its buffer, as a view of one of the layouts in the template.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...ir.core import Buffer, Loop, loops, rings, types
from ...ir.types import Tensor
from ..base import EVERY, Kernel, Op, Program, Rules, Stmt, Writer, blocks, numbers, strides, touched, walk

rule = Rules("pto", {
    "unit_lower_inverse": "decompose", "row_norm": "decompose", "softplus": "decompose", "diag_inverse": "decompose",
    "cumsum": "vectorise", "lower": "vectorise", "strictly_lower": "vectorise", "pairs": "vectorise",
    "eye": "vectorise", "from_quarters": "transfer", "neg": "vectorise", "sigmoid": "vectorise", "fence": "mbarriers",
    "drain": "mbarriers",
    "warm_up_length": "partition", "return_unless_negative": "partition", "claim_part": "partition",
    "diagonal": "norms_from_products"})

AGENTS = {"cube": "__DAV_C220_CUBE__", "vector": "__DAV_C220_VEC__"}
CTYPE = {"int32": "int32_t", "float16": "half", "bfloat16": "bfloat16_t", "float32": "float"}
WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4}
#: Names of the kernels' own text, which no value may take.
OWN = {"N", "T", "H", "HV", "b", "n", "h", "hv", "h_1", "hv_1", "t", "c", "item", "first", "length", "rows", "part", "slot",
       "sub", "col", "heads", "iteration", "t_next", "rows_next", "part_next", "slot_next", "block", "batched", "slots", "ffts",
       "cu_seqlens", "from", "to", "half", "float", "auto", "pto", "int", "new", "and", "or", "not", "xor", "do", "if", "for",
       EVERY, "view", "div", "exp", "log", "std", "this", "signed", "long", "short", "bool", "case", "catch", "char", "const",
       "constexpr", "default", "delete", "double", "else", "enum", "explicit", "export", "extern", "friend", "goto", "inline",
       "mutable", "namespace", "operator", "private", "protected", "public", "register", "sizeof", "static", "struct", "switch",
       "template", "throw", "try", "typedef", "typename", "union", "unsigned", "using", "virtual", "void", "volatile"}


#: What counts the iterations of a loop.
COUNT = {"item": "iteration", "chunk": "c"}


def parameter(number: str) -> str:
    """A caller's number among a kernel's parameters, out of the way of its own names."""
    return f"{number}_" if number in OWN else number


@dataclass(frozen=True)
class Tile:
    """A value's tile: its C++ type and byte address; `half` of the cores' rows where it is a view of a whole vector."""

    type: str
    address: str


def literal(x: float) -> str:
    if x in (float("inf"), float("-inf")):
        return "__builtin_inff()" if x > 0 else "-__builtin_inff()"
    return f"{x!r}f"


def braces(lines: list[str], head: str = "") -> list[str]:
    return [head + "{", *(f"    {x}" for x in lines), "}"]


class KernelWriter:
    """Writes one kernel."""

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        self.p, self.k, self.layout = p, k, layout
        self.sizes = {**p.sizes, **k.sizes}
        self.buffers = {b.name: b for b in k.buffers}
        self.type = types(k.body)
        self.defs = {o.out: o for o in walk(k.body) if o.out}
        self.where: dict[str, str] = {o.out: o.buffer for o in walk(k.body) if o.buffer}
        self.results: dict[str, str] = {}  # what a carried value is called after its loop -> in the loop
        for lp in loops(k.body):
            for c in lp.carried:
                self.where[c.name] = self.where[c.result] = self.where[c.init]
                self.results[c.result] = c.name
        ragged = {t.name for t in p.tensors if t.index == "token"}
        #: What is loaded from callers' tensors: its tile is declared where it is loaded, with as many rows as there are.
        self.raw = {o.out for o in walk(k.body) if o.kind == "load" and o.attr("tensor") in ragged}
        self.w = Writer(p, "//", 1)
        self.agent = ""
        self.inside: list[str] = []  # loops around the statement being written
        self.which = ""  # the chunk that it works for: this one, or "_next"
        self.ring = rings(k)
        self.taken = OWN | {parameter(n) for n in numbers(k)}
        self.taken |= {f"{x}{t.name}{y}" for t in touched(p, k) for x, y in (("", "_gm"), ("has_", ""), ("", "_stride"))}
        self.taken |= {x for t in touched(p, k) for x in strides(t)}

    def name(self, value: str) -> str:
        value = self.results.get(value, value)
        o = self.defs.get(value)
        if o is not None and o.kind == "const":
            return literal(o.attr("value"))
        if o is not None and o.kind == "scalar":
            lane = f"_{o.attr('lane')}" if o.attr("lane") else ""
            return f"{o.attr('tensor')}_gm[hv{lane}]" if o.attr("tensor") else parameter(o.attr("param"))
        if (o is not None and o.kind == "row") or (o is not None and o.kind == "cast" and not o.buffer):
            return self.name(o.args[0])
        return f"{value}_" if value in self.taken else value

    # --- what an operand is ---
    def buffer(self, value: str) -> Buffer:
        o = self.defs.get(value)
        if value not in self.where and o is not None:
            return self.buffer(o.args[0])
        return self.buffers[self.where[value]]

    def source(self, value: str) -> str:
        """The value whose buffer `value` is read from."""
        return value if value in self.where else self.source(self.defs[value].args[0])

    def address(self, value: str, plus: int = 0) -> str:
        """The byte address of a value, or of `plus` bytes further; of storage with slots, that of the iteration's."""
        b, (loop, ahead) = self.buffer(value), self.ring.get(self.source(value), ("", 0))
        start = hex(b.offset + plus)
        return f"{start} + {self.iteration(loop, ahead, b.slots)} * {prod(b.shape) * WIDTH[b.dtype]}" if loop else start

    def is_number(self, value: str) -> bool:
        return self.type[value].rank == 0

    def is_col(self, value: str) -> bool:
        return self.defs[value].kind == "col" if value in self.defs else False

    def is_wide(self, value: str) -> bool:
        return self.type[value].rank == 1 and len(self.buffer(value).shape) == 2

    def whole(self, value: str) -> bool:
        """Whether a vector is whole on each core."""
        return self.buffer(value).shape[0] == self.type[value].shape(self.sizes)[0] if self.type[value].rank == 1 \
            else self.whole(self.defs[value].args[0])

    def by_head(self, value: str) -> bool:
        """Whether a tile of several heads, a column each, lies as the caller's rows do: a row a head."""
        o = self.defs.get(value)
        if o is not None and o.kind == "valid":
            return self.by_head(o.args[0])
        return self.layout == "bhtd" and o is not None and bool(o.attr("heads")) and value in self.raw

    def parts(self, value: str) -> int:
        """Rows of a tile that this core holds."""
        return self.buffer(value).shape[0]

    # --- declarations ---
    def tile(self, value: str) -> Tile | None:
        """The tile that is declared for a value of the current agent."""
        o = self.defs.get(value)
        if value not in self.where:
            if o is not None and o.kind == "col":
                source = self.buffer(value)
                n = source.shape[0] // 2 if self.whole(value) else source.shape[0]
                address = self.address(value) + (f" + sub * {n * 4}" if self.whole(value) else "")
                return Tile(f"UbCol<float, {n}>", address)
            if o is not None and o.kind == "part":
                return Tile(f"UbTile<float, 1, {o.attr('size')}>", self.address(value, 4 * o.attr("start")))
            return None
        b = self.buffers[self.where[value]]
        ctype, shape = CTYPE[b.dtype], ", ".join(map(str, b.shape))
        if b.space == "UB":
            if self.type[value].rank == 1:
                kind = f"UbWide<{ctype}, {b.shape[0]}>" if len(b.shape) == 2 else f"UbTile<{ctype}, 1, {b.shape[0]}>"
                return Tile(kind, self.address(value))
            return Tile(f"UbTile<{ctype}, {shape}>", self.address(value))
        if self.by_head(value):
            shape = ", ".join(map(str, b.shape[::-1]))
        kind = {"L1": "L1Tile", "L0A": "TileLeft", "L0B": "TileRight", "L0C": "TileAcc"}[b.space]
        return Tile(f"{kind}<{ctype}, {shape}>", self.address(value))

    def declare(self) -> None:
        """The agent's tiles. Those in storage with slots get their addresses in each iteration."""
        for value, tile in self.tiles().items():
            self.w(f"{tile.type} {self.name(value)};")
            if not self.iterations(value):
                self.w(f"TASSIGN({self.name(value)}, {tile.address});")
        for b in self.k.buffers:
            if b.name.endswith("_scratch") and b.agent == self.agent:
                self.w(f"UbTile<{CTYPE[b.dtype]}, {b.shape[0]}, {b.shape[1]}> {b.name};",
                       f"TASSIGN({b.name}, {hex(b.offset)});")

    def tiles(self) -> dict[str, Tile]:
        """The agent's values with tiles that are declared once."""
        out = {}
        for value in self.declarations(self.k.body):
            tile = self.tile(value)
            if tile is not None and value not in self.raw:
                out[value] = tile
        return out

    def iterations(self, value: str) -> str:
        """The loop whose iterations move a value from slot to slot."""
        return self.ring.get(self.source(value), ("", 0))[0]

    def declarations(self, body: tuple[Stmt, ...]) -> list[str]:
        """Values of the agent, but a carried value goes by the name it has in the loop."""
        out: list[str] = []
        for s in body:
            if isinstance(s, Loop):
                out += [c.name for c in s.carried if self.buffer(c.name).agent == self.agent]
                out += self.declarations(s.body)
            elif s.out and s.agent == self.agent and s.kind not in ("const", "scalar", "last", "row"):
                out.append(s.out)
        return out

    # --- addresses in global memory ---
    def cols(self, t: Tensor) -> str:
        """How many columns of this instance's tile memory has."""
        n, mine = self.p.shape(t)[-1], t.tile.shape(self.sizes)[-1]
        if not self.p.padded(t)[-1]:
            return str(mine)
        return f"part_of({n}, col / {mine}, {mine})" if t.dims[-1] == self.k.split else str(n)

    def some(self, value: str, t: Tensor, columns: bool = False) -> tuple[str, str]:
        """Rows and columns that memory has of a tile of `t` with one tile a sequence: of this core's part, on a vector core,
        which is rows, or `columns`."""
        if columns:
            rows, all_of_them = self.p.shape(t)
            mine = self.buffer(value).shape[1]
            return str(rows), f"part_of({all_of_them}, sub, {mine})" if self.p.padded(t)[1] else str(mine)
        rows, mine = self.p.shape(t)[0], self.buffer(value).shape[0]
        if not self.p.padded(t)[0]:
            return str(mine), self.cols(t)
        return f"part_of({rows}, sub, {mine})" if self.agent == "vector" else str(rows), self.cols(t)

    def at(self, o: Op, row: str, more: str = "") -> tuple[str, str]:
        """Pointer to row `row` of the tile that `o` loads or stores, and elements from row to row. more: heads further."""
        t, lane = self.p.tensor(o.attr("tensor")), f"_{o.attr('lane')}" if o.attr("lane") else ""
        shape = self.p.shape(t)
        last = shape[-1] if len(shape) > 1 else 1
        shift = " + col" if self.k.split and t.dims[-1] == self.k.split else ""
        if self.k.split and len(t.dims) > 1 and t.dims[0] == self.k.split:
            shift = f" + col * {last}"
        if t.index == "token":
            heads, head = (t.heads, f"hv{lane}{more}" if t.heads == "HV" else f"h{lane}{more}")
            if t.strided:
                batch, token, far = strides(t)
                there = f"t{self.which}{f' + {row}' if row != '0' else ''}"
                place = f"b * {batch} + ({there}) * {token} + ({head}) * {far}"
                return f"{t.name}_gm + {place}{shift}", token
            place = f"token_at({heads}, {head}, {last}, b, T, t{self.which}{f' + {row}' if row != '0' else ''})"
            return f"{t.name}_gm + {place}{shift}", f"token_stride({heads}, {last})"
        size, c, every = prod(shape), self.p.sizes["C"], EVERY
        base = {"slot": f"(slot{self.which} * HV + hv{lane}) * {size}", "sequence": f"(n * HV + hv) * {size}",
                "checkpoint": f"((first / ({c} * {every}) + (c + 1) / {every} - 1) * HV + hv) * {size}",
                "block": f"{self.channel(t.slots, o.attr('ahead', 0))} * {size}", "const": ""}[t.index]
        if t.at:
            base = f"{t.at}_gm[n] * {t.over or t.name}_stride + hv * {size}"
        gm = f"{t.over or t.name}_gm"
        step = last if len(t.dims) > 1 else 1
        if o.attr("row") or o.attr("col"):
            row = str(o.attr("row") * step + o.attr("col"))
            return f"{gm} + {base} + {row}{shift}", str(step)
        terms = [gm, base, "" if row == "0" else f"{row} * {step}" if step != 1 else row]
        return " + ".join(x for x in terms if x) + shift, str(step)

    # --- iterations ---
    def iteration(self, loop: str, ahead: int, slots: int) -> str:
        """The slot that an iteration of a loop takes, or one so many iterations ahead."""
        count = COUNT[loop]
        return f"{f'({count} + {ahead})' if ahead else count} % {slots}"

    def channel(self, slots: int, ahead: int) -> str:
        """The tile of this core group in a workspace of so many tiles for each."""
        if slots == 1:
            return "get_block_idx()"
        return f"(get_block_idx() * {slots} + {self.iteration(self.inside[-1], ahead, slots)})"

    def event(self, o: Op) -> str:
        """The id of a signal or wait; of two that take turns, the iteration's."""
        flag = o.attr("id")
        if isinstance(flag, int):
            return f"EVENT_ID{flag}"
        even, odd = flag
        return f"{self.iteration(o.attr('loop'), o.attr('ahead', 0), 2)} ? EVENT_ID{odd} : EVENT_ID{even}"

    def counts(self, s: Loop) -> bool:
        """Whether some op must know how many iterations of the instances' loop there were."""
        here = {t.name for t in self.p.tensors if t.slots > 1}
        return any(o.attr("loop") == "item" for o in walk(self.k.body)) or any(
            isinstance(o, Op) and o.kind in ("load", "store") and o.attr("tensor") in here for o in s.body)

    def view(self, o: Op, row: str, rows: str, cols: int | str) -> str:
        pointer, stride = self.at(o, row)
        return f"view({pointer}, {rows}, {cols}, {stride})"

    # --- statements ---
    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, Loop):
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

    def items(self, s: Loop) -> None:
        n = blocks(self.p, self.k)
        over = "slots" if self.k.grid == "chunks" else "N"
        w = self.w
        heads = "HV" if self.k.lanes == 1 else f"((HV + {self.k.lanes - 1}) / {self.k.lanes})"
        items = f"{over} * {heads}{f' * {n}' if n > 1 else ''}"
        if self.counts(s):
            w("int64_t iteration = 0;")
        w(f"for (int64_t item = get_block_idx(); item < {items}; item += get_block_num()) {{")
        w.indent += 1
        one = "item" if n == 1 else f"item / {n}"
        if n > 1:
            w(f"const int64_t col = item % {n} * {self.k.sizes[self.k.split]};")
        w(f"const int64_t hv = {one} % {heads}{f' * {self.k.lanes}' if self.k.lanes > 1 else ''}, h = hv / (HV / H);")
        together = any(o.attr("heads") for o in walk(s.body))
        if together:
            w(f"const int64_t heads = HV - hv < {self.k.lanes} ? HV - hv : {self.k.lanes};")
        for i in range(1, 1 if together else self.k.lanes):
            w(f"const int64_t hv_{i} = hv + {i} < HV ? hv + {i} : HV - 1, h_{i} = hv_{i} / (HV / H);")
        size = self.p.sizes["C"]
        skip = [f"if ({self.p.skips}_gm[n] < 0) continue;"] if self.p.skips else []
        if self.k.grid == "chunks":
            w(f"const int64_t slot = {one} / {heads}, n = sequence_of(cu_seqlens, N, slot, {size});", *skip,
              "const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;",
              f"const int64_t c = slot - first / {size} - n;",
              f"if (c * {size} >= length) continue;")
            self.rows(size)
        else:
            w(f"const int64_t n = {one} / HV, b = n * batched;", *skip,
              "const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first;")
            if any(isinstance(o, Op) and o.attr("ahead") for o in s.body):
                self.chunk(size, "_next", "")
        self.body(s.body)
        if self.counts(s):
            w("++iteration;")
        w.indent -= 1
        w("}")
        w.line = 0

    def chunks(self, s: Loop) -> None:
        size, w = self.p.sizes["C"], self.w
        begin = "int64_t c = 0"
        if any(o.attr("loop") == s.index for o in walk(self.k.body)):  # read after the loop too
            w(f"{begin};")
            begin = ""
        w(f"for ({begin}; c * {size} < length; ++c) {{")
        w.indent += 1
        self.chunk(size)
        if any(isinstance(o, Op) and o.attr("ahead") and o.kind not in ("signal", "wait") for o in s.body):
            self.chunk(size, "_next", "c + 1")
        w(*(f"TASSIGN({self.name(v)}, {tile.address});" for v, tile in self.tiles().items() if self.iterations(v) == s.index))
        self.body(s.body)
        w.indent -= 1
        w("}")
        w.line = 0

    def chunk(self, size: int, which: str = "", c: str = "c") -> None:
        """Where chunk `c` of a sequence lies, "" for the first; `which` marks the names."""
        self.w(f"const int64_t slot{which} = first / {size} + n{f' + {c}' if c else ''};")
        self.rows(size, which, c)

    def rows(self, size: int, which: str = "", c: str = "c") -> None:
        """Its first token, and how many it has."""
        before = f"({c}) * {size}" if "+" in c else f"{c} * {size}" if c else ""
        left = f"length - {before}" if c else "length"
        rows = f"part_of({left}, 0, {size})" if which else f"{left} < {size} ? {left} : {size}"
        self.w(f"const int64_t t{which} = first - b * T{f' + {before}' if c else ''};", f"const int64_t rows{which} = {rows};")
        if self.agent == "vector":
            half = size // 2
            self.w(f"const int64_t part{which} = part_of(rows{which}, sub, {half});")

    def run(self) -> str:
        for agent, macro in AGENTS.items():
            if not any(o.agent == agent and o.kind not in ("const", "scalar") for o in walk(self.k.body)):
                continue
            self.agent, self.w.line = agent, 0
            self.w.indent = 0
            self.w(f"#if defined({macro})")
            self.w.indent = 1
            if agent == "vector":
                self.w("set_mask_norm();", "set_vector_mask(-1, -1);", "const int64_t sub = get_subblockid();")
            self.declare()
            self.body(self.k.body)
            self.w.indent = 0
            self.w("#endif")
        return self.w.text()
