"""PTO C++ for Ascend: rules that give the text of placed, synchronised ops. One function a kernel, a part an agent.

Vector cores hold their part of a tile's rows, `sub` says which; a vector of C values is whole on each core. A value's
tile is declared once, at the address of its buffer, as a view of one of the layouts in the template.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.core import Buffer, Kernel, Loop, Op, Program, Stmt, loops, types
from ..ir.types import Dim
from .base import EmitError, KernelText, Rules, Writer, blocks, numbers, touched, walk

rule = Rules("pto", {
    "unit_lower_inverse": "decompose", "row_norm": "decompose", "cumsum": "vectorise", "lower": "vectorise",
    "strictly_lower": "vectorise", "pairs": "vectorise", "diag_blocks": "vectorise", "eye": "vectorise",
    "quad": "transfer", "neg": "vectorise", "sigmoid": "vectorise"})

AGENTS = {"cube": "__DAV_C220_CUBE__", "vector": "__DAV_C220_VEC__"}
CTYPE = {"float16": "half", "bfloat16": "bfloat16_t", "float32": "float"}
WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4}
#: Names of the kernels' own text, which no value may take.
OWN = {"N", "T", "H", "HV", "b", "n", "h", "hv", "h_1", "hv_1", "t", "c", "item", "first", "length", "rows", "part", "slot",
       "sub", "col", "block", "batched", "slots", "ffts", "cu_seqlens", "from", "to", "half", "float", "auto", "pto", "int",
       "new", "and", "or", "not", "xor", "do", "if", "for", "view", "div", "exp", "log", "std", "this", "signed", "long", "short"}


@dataclass(frozen=True)
class Tile:
    """A value's tile: its C++ type and byte address; `half` of the cores' rows where it is a view of a whole vector."""

    type: str
    address: str


def _literal(x: float) -> str:
    if x in (float("inf"), float("-inf")):
        return "__builtin_inff()" if x > 0 else "-__builtin_inff()"
    return f"{x!r}f"


class _Kernel:
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
        self.w = Writer(p, "//", 1)
        self.agent = ""
        self.taken = OWN | {f"{t.name}_gm" for t in touched(p, k)} | {f"has_{t.name}" for t in touched(p, k)} \
            | set(numbers(k))

    def name(self, value: str) -> str:
        value = self.results.get(value, value)
        o = self.defs.get(value)
        if o is not None and o.kind == "const":
            return _literal(o.attr("value"))
        if o is not None and o.kind == "scalar":
            return str(o.attr("param"))
        if (o is not None and o.kind == "row") or (o is not None and o.kind == "cast" and not o.buffer):
            return self.name(o.args[0])
        return f"{value}_" if value in self.taken else value

    # --- what an operand is ---
    def buffer(self, value: str) -> Buffer:
        o = self.defs.get(value)
        if value not in self.where and o is not None:
            return self.buffer(o.args[0])
        return self.buffers[self.where[value]]

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
                address = hex(source.offset) + (f" + sub * {n * 4}" if self.whole(value) else "")
                return Tile(f"UbCol<float, {n}>", address)
            if o is not None and o.kind == "part":
                return Tile(f"UbTile<float, 1, {o.attr('size')}>", hex(self.buffer(value).offset + 4 * o.attr("start")))
            return None
        b = self.buffers[self.where[value]]
        ctype, shape = CTYPE[b.dtype], ", ".join(map(str, b.shape))
        if b.space == "UB":
            if self.type[value].rank == 1:
                kind = f"UbWide<{ctype}, {b.shape[0]}>" if len(b.shape) == 2 else f"UbTile<{ctype}, 1, {b.shape[0]}>"
                return Tile(kind, hex(b.offset))
            return Tile(f"UbTile<{ctype}, {shape}>", hex(b.offset))
        kind = {"L1": "L1Tile", "L0A": "TileLeft", "L0B": "TileRight", "L0C": "TileAcc"}[b.space]
        return Tile(f"{kind}<{ctype}, {shape}>", hex(b.offset))

    def declare(self) -> None:
        """The agent's tiles."""
        for value in self.declarations(self.k.body):
            tile = self.tile(value)
            o = self.defs.get(value)
            raw = o is not None and o.kind == "load" and o.attr("tensor") in self.ragged()
            if tile is not None and not raw:
                self.w(f"{tile.type} {self.name(value)};", f"TASSIGN({self.name(value)}, {tile.address});")
        for b in self.k.buffers:
            if b.name.endswith("_scratch") and b.agent == self.agent:
                self.w(f"UbTile<{CTYPE[b.dtype]}, {b.shape[0]}, {b.shape[1]}> {b.name};",
                       f"TASSIGN({b.name}, {hex(b.offset)});")

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

    def ragged(self) -> set[str]:
        return {t.name for t in self.p.tensors if t.index == "token"}

    # --- addresses in global memory ---
    def dim(self, d: Dim) -> int:
        return d if isinstance(d, int) else self.p.sizes[d]

    def at(self, o: Op, row: str) -> tuple[str, str]:
        """Pointer to row `row` of the tile that `o` loads or stores, and elements from row to row."""
        t, lane = self.p.tensor(o.attr("tensor")), f"_{o.attr('lane')}" if o.attr("lane") else ""
        last = self.dim(t.dims[-1]) if len(t.dims) > 1 else 1
        shift = " + col" if self.k.split and t.dims[-1] == self.k.split else ""
        if t.index == "token":
            heads, head = (t.heads, f"hv{lane}" if t.heads == "HV" else f"h{lane}")
            place = f"token_at({heads}, {head}, {last}, b, T, t{f' + {row}' if row != '0' else ''})"
            return f"{t.name}_gm + {place}{shift}", f"token_stride({heads}, {last})"
        size = 1
        for d in t.dims:
            size *= self.dim(d)
        base = {"slot": f"(slot * HV + hv{lane}) * {size}", "sequence": f"(n * HV + hv) * {size}",
                "block": f"get_block_idx() * {size}", "const": ""}[t.index]
        step = last if len(t.dims) > 1 else 1
        if o.attr("row") or o.attr("col"):
            row = str(o.attr("row") * step + o.attr("col"))
            return f"{t.name}_gm + {base} + {row}{shift}", str(step)
        terms = [f"{t.name}_gm", base, "" if row == "0" else f"{row} * {step}" if step != 1 else row]
        return " + ".join(x for x in terms if x) + shift, str(step)

    def view(self, o: Op, row: str, rows: str, cols: int) -> str:
        pointer, stride = self.at(o, row)
        return f"view({pointer}, {rows}, {cols}, {stride})"

    # --- statements ---
    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, Loop):
                if s.index == "item":
                    self.items(s)
                else:
                    self.chunks(s)
            elif s.agent == self.agent:
                self.w.at(s)
                self.w(*rule.of(s)(self, s))

    def items(self, s: Loop) -> None:
        n = blocks(self.p, self.k)
        over = "slots" if self.k.grid == "chunks" else "N"
        w = self.w
        heads = "HV" if self.k.lanes == 1 else f"((HV + {self.k.lanes - 1}) / {self.k.lanes})"
        items = f"{over} * {heads}{f' * {n}' if n > 1 else ''}"
        w(f"for (int64_t item = get_block_idx(); item < {items}; item += get_block_num()) {{")
        w.indent += 1
        one = "item" if n == 1 else f"item / {n}"
        if n > 1:
            w(f"const int64_t col = item % {n} * {self.k.sizes[self.k.split]};")
        w(f"const int64_t hv = {one} % {heads}{f' * {self.k.lanes}' if self.k.lanes > 1 else ''}, h = hv / (HV / H);")
        for i in range(1, self.k.lanes):
            w(f"const int64_t hv_{i} = hv + {i} < HV ? hv + {i} : HV - 1, h_{i} = hv_{i} / (HV / H);")
        size = self.p.sizes["C"]
        if self.k.grid == "chunks":
            w(f"const int64_t slot = {one} / {heads}, n = sequence_of(cu_seqlens, N, slot, {size});",
              "const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;",
              f"const int64_t c = slot - first / {size} - n;",
              f"if (c * {size} >= length) continue;")
            self.chunk(size)
        else:
            w(f"const int64_t n = {one} / HV, b = n * batched;",
              "const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first;")
        self.body(s.body)
        w.indent -= 1
        w("}")
        w.line = 0

    def chunks(self, s: Loop) -> None:
        size, w = self.p.sizes["C"], self.w
        w(f"for (int64_t c = 0; c * {size} < length; ++c) {{")
        w.indent += 1
        w(f"const int64_t slot = first / {size} + n + c;")
        self.chunk(size)
        self.body(s.body)
        w.indent -= 1
        w("}")
        w.line = 0

    def chunk(self, size: int) -> None:
        self.w(f"const int64_t t = first - b * T + c * {size};",
               f"const int64_t rows = length - c * {size} < {size} ? length - c * {size} : {size};")
        if self.agent == "vector":
            half = size // 2
            self.w(f"const int64_t part = part_of(rows, sub, {half});")

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


# --- rules: global memory ---
@rule("load")
def _load(k: _Kernel, o: Op) -> list[str]:
    t, b, name = k.p.tensor(o.attr("tensor")), k.buffer(o.out), k.name(o.out)
    ctype = CTYPE[b.dtype]
    if t.index == "token":
        if k.agent == "cube":
            return [f"L1Part<{ctype}, {b.shape[0]}, {b.shape[1]}> {name}(rows, {b.shape[1]});",
                    f"TASSIGN({name}, {hex(b.offset)});",
                    f"auto {name}_from = {k.view(o, '0', 'rows', b.shape[1])};", f"TLOAD({name}, {name}_from);"]
        if len(t.dims) == 1:
            return [f"UbWidePart<{ctype}, {b.shape[0]}> {name}(rows);", f"TASSIGN({name}, {hex(b.offset)});",
                    f"auto {name}_from = {k.view(o, '0', 'rows', 1)};", f"TLOAD({name}, {name}_from);"]
        return [f"UbPart<{ctype}, {b.shape[0]}, {b.shape[1]}> {name}(part, {b.shape[1]});",
                f"TASSIGN({name}, {hex(b.offset)});",
                "if (part > 0) {", f"    auto from = {k.view(o, f'sub * {b.shape[0]}', 'part', b.shape[1])};",
                f"    TLOAD({name}, from);", "}"]
    if len(t.dims) == 1:
        pointer, _ = k.at(o, "0")
        text = [f"auto from = view({pointer}, 1, {b.shape[0]}, {b.shape[0]});", f"TLOAD({name}, from);"]
    else:
        row = "0" if b.shape[0] == t.tile.shape(k.sizes)[0] else f"sub * {b.shape[0]}"
        text = [f"auto from = {k.view(o, row, str(b.shape[0]), b.shape[1])};", f"TLOAD({name}, from);"]
    return _braces(text, f"if (has_{t.name}) " if t.optional else "")


def _braces(lines: list[str], head: str = "") -> list[str]:
    return [head + "{", *(f"    {x}" for x in lines), "}"]


@rule("store")
def _store(k: _Kernel, o: Op) -> list[str]:
    t, value = k.p.tensor(o.attr("tensor")), o.args[0]
    b, name = k.buffer(value), k.name(value)
    ctype = CTYPE[b.dtype]
    if t.index == "token":
        if len(t.dims) == 1:
            raise EmitError(f"pto stores no caller's tensor of one value a token, and {t.name} is one")
        if k.agent == "cube":
            return _braces([f"AccPart<{ctype}, {b.shape[0]}, {b.shape[1]}> valid(rows, {b.shape[1]});",
                            f"TASSIGN(valid, {hex(b.offset)});",
                            f"auto to = {k.view(o, '0', 'rows', b.shape[1])};", "TSTORE(to, valid);"])
        return _braces([f"UbPart<{ctype}, {b.shape[0]}, {b.shape[1]}> valid(part, {b.shape[1]});",
                        f"TASSIGN(valid, {hex(b.offset)});",
                        f"auto to = {k.view(o, f'sub * {b.shape[0]}', 'part', b.shape[1])};", "TSTORE(to, valid);"],
                       "if (part > 0) ")
    if len(t.dims) == 1:  # each core stores its part
        n = b.shape[0] // 2 if k.whole(value) else b.shape[0]
        address = hex(b.offset) + (f" + sub * {n * WIDTH[b.dtype]}" if k.whole(value) else "")
        pointer, _ = k.at(o, f"sub * {n}")
        return _braces([f"UbTile<{ctype}, 1, {n}> mine;", f"TASSIGN(mine, {address});",
                        f"auto to = view({pointer}, 1, {n}, {n});", "TSTORE(to, mine);"])
    row = "0" if k.agent == "cube" else f"sub * {b.shape[0]}"
    return _braces([f"auto to = {k.view(o, row, str(b.shape[0]), b.shape[1])};", f"TSTORE(to, {name});"],
                   f"if (has_{t.name}) " if t.optional else "")


@rule("valid")
def _valid(k: _Kernel, o: Op) -> list[str]:
    raw, name, b = k.name(o.args[0]), k.name(o.out), k.buffer(o.out)
    if o.attr("given"):
        if k.agent != "vector":
            raise EmitError(f"pto reads the optional {o.attr('given')} with vector cores only")
        return [f"if (!has_{o.attr('given')}) TEXPANDS({name}, 0);"]
    if k.agent == "cube":
        return [f"if (rows < {b.shape[0]}) TFILLPAD({raw}, {raw});"]
    if k.is_wide(o.out):
        return [f"fill_wide({raw}, rows, {hex(b.offset)});"]
    source = k.defs.get(o.args[0])
    if source is None or source.kind != "load":  # a computed value: name its valid part
        shape, sizes = (f"1, {b.shape[0]}", "1, rows") if len(b.shape) == 1 else (f"{b.shape[0]}, {b.shape[1]}",
                                                                                f"part, {b.shape[1]}")
        if len(b.shape) == 1 and not k.whole(o.out):
            raise EmitError(f"pto takes valid of vectors that each core holds whole, and {o.out} is one a core's rows")
        fill = "fill_row(" if len(b.shape) == 1 else "fill_rows("
        return _braces([f"UbPart<float, {shape}> valid({sizes});", f"TASSIGN(valid, {hex(b.offset)});",
                        f"{fill}{name}, valid, {'rows' if len(b.shape) == 1 else f'part, {hex(b.offset)}'});"])
    return [f"fill_rows({name}, {raw}, part, {hex(b.offset)});"]


# --- rules: vector cores ---
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
SHORT = {"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "maximum": "MAX", "minimum": "MIN"}


@rule("add", "sub", "mul", "div", "maximum", "minimum")
def _binary(k: _Kernel, o: Op) -> list[str]:
    x, y = o.args
    out, a, b = k.name(o.out), k.name(x), k.name(y)
    if k.is_number(o.out):
        if o.kind in OPERATORS:
            return [f"const float {out} = {a} {OPERATORS[o.kind]} {b};"]
        return [f"const float {out} = {a} {'>' if o.kind == 'maximum' else '<'} {b} ? {a} : {b};"]
    if k.is_number(x):
        raise EmitError(f"pto takes a number as second operand only, and {o.out} has it first; vectorise turns it")
    if k.is_number(y):
        if o.kind == "sub":
            return [f"TADDS({out}, {a}, {b[1:] if b.startswith('-') else '-' + b});"]
        return [f"T{SHORT[o.kind]}S({out}, {a}, {b});"]
    if k.is_col(y):
        return [f"TROWEXPAND{SHORT[o.kind]}({out}, {a}, {b});"]
    lines = []
    if k.type[o.out].rank == 1 and not k.is_wide(o.out) and not k.whole(o.out):  # one's rows of a whole vector
        n = k.buffer(o.out).shape[0]
        for v in dict.fromkeys((x, y)):
            if k.whole(v):
                lines += [f"UbTile<float, 1, {n}> {k.name(v)}_mine_{out};",
                          f"TASSIGN({k.name(v)}_mine_{out}, {hex(k.buffer(v).offset)} + sub * {4 * n});"]
        a, b = (f"{k.name(v)}_mine_{out}" if k.whole(v) else k.name(v) for v in (x, y))
    return [*lines, f"T{SHORT[o.kind]}({out}, {a}, {b});"]


@rule("exp", "log", "rsqrt")
def _unary(k: _Kernel, o: Op) -> list[str]:
    if k.is_number(o.out):
        raise EmitError(f"pto has no {o.kind} of a number ({o.out}); apply it to the vector that the number comes from")
    return [f"T{o.kind.upper()}({k.name(o.out)}, {k.name(o.args[0])});"]


@rule("cast")
def _cast(k: _Kernel, o: Op) -> list[str]:
    if not o.buffer:
        return []  # the store that reads it rounds
    out, x = k.name(o.out), k.name(o.args[0])
    if k.agent == "cube":
        return [f"TMOV({out}, {x});"]
    mode = "CAST_NONE" if o.attr("to") == "float32" else "CAST_RINT"
    return [f"TCVT({out}, {x}, RoundMode::{mode});"]


@rule("const", "scalar", "col", "row", "part", "block")
def _view(k: _Kernel, o: Op) -> list[str]:
    return []


@rule("last")
def _last(k: _Kernel, o: Op) -> list[str]:
    x = o.args[0]
    return [f"const float {k.name(o.out)} = {k.name(x)}.GetValue({k.buffer(x).shape[0] - 1});"]


@rule("full")
def _full(k: _Kernel, o: Op) -> list[str]:
    return [f"TEXPANDS({k.name(o.out)}, {_literal(o.attr('value'))});"]


@rule("expand")
def _expand(k: _Kernel, o: Op) -> list[str]:
    x = o.args[0]
    if k.is_number(x):
        return [f"TEXPANDS({k.name(o.out)}, {k.name(x)});"]
    if k.is_col(x):
        raise EmitError(f"pto expands rows and numbers; {o.out} expands a column")
    return [f"TCOLEXPAND({k.name(o.out)}, {k.name(x)});"]


@rule("row_sum")
def _row_sum(k: _Kernel, o: Op) -> list[str]:
    b = k.buffer(o.out)
    return _braces([f"UbCol<float, {b.shape[0]}> sums;", f"TASSIGN(sums, {hex(b.offset)});",
                    f"TROWSUM(sums, {k.name(o.args[0])}, {o.out}_scratch);"])


@rule("join")
def _join(k: _Kernel, o: Op) -> list[str]:
    lines, at = [], k.buffer(o.out).offset
    for x in o.args:
        n = k.buffer(x).shape[0]
        lines += _braces([f"UbTile<float, 1, {n}> to;", f"TASSIGN(to, {hex(at)});", f"TMOV(to, {k.name(x)});"])
        at += 4 * n
    return lines


# --- rules: cube core, and moves ---
@rule("move")
def _move(k: _Kernel, o: Op) -> list[str]:
    x, out, b, source = o.args[0], k.name(o.out), k.buffer(o.out), k.buffer(o.args[0])
    if b.space in ("L0A", "L0B"):
        part = k.defs.get(x)
        if part is not None and part.kind == "block":
            if o.attr("transposed"):
                raise EmitError(f"pto takes blocks as they lie, and {o.out} is one transposed")
            return [f"TEXTRACT({out}, {k.name(part.args[0])}, {part.attr('row')}, {part.attr('col')});"]
        if not o.attr("transposed"):
            return [f"TEXTRACT({out}, {k.name(x)}, 0, 0);"]
        turned = f"{out}_from"
        return [f"L1View<{CTYPE[b.dtype]}, {b.shape[0]}, {b.shape[1]}> {turned};", f"TRESHAPE({turned}, {k.name(x)});",
                f"TEXTRACT({out}, {turned}, 0, 0);"]
    if k.is_wide(x) and not k.is_wide(o.out):
        return [f"TTRANS({out}, {k.name(x)}, {o.out}_scratch);"]
    if k.is_wide(o.out) and not k.is_wide(x):
        return _braces([f"UbTile<float, {b.shape[0]}, {b.shape[1]}> wide;", f"TASSIGN(wide, {hex(b.offset)});",
                        f"UbCol<float, {b.shape[0]}> flat;", f"TASSIGN(flat, {hex(source.offset)});",
                        "TROWEXPAND(wide, flat);"])
    return [f"TMOV({out}, {k.name(x)});"]


@rule("matmul")
def _matmul(k: _Kernel, o: Op) -> list[str]:
    out, left, right = k.name(o.out), k.name(o.args[0]), k.name(o.args[1])
    if len(o.args) == 3:
        return [f"TMATMUL_ACC({out}, {k.name(o.args[2])}, {left}, {right});"]
    return [f"TMATMUL({out}, {left}, {right});"]


# --- rules: waits ---
@rule("signal")
def _signal(k: _Kernel, o: Op) -> list[str]:
    src = str(o.attr("src"))
    if "." in src:
        return [f"ffts_cross_core_sync(PIPE_{src.split('.')[1]}, group_flag({o.attr('id')}));  // {o.attr('why')}"]
    return [f"set_flag(PIPE_{src}, PIPE_{o.attr('dst')}, EVENT_ID{o.attr('id')});  // {o.attr('why')}"]


@rule("wait")
def _wait(k: _Kernel, o: Op) -> list[str]:
    if "." in str(o.attr("src")):
        return [f"wait_flag_dev({o.attr('id')});  // {o.attr('why')}"]
    return [f"wait_flag(PIPE_{o.attr('src')}, PIPE_{o.attr('dst')}, EVENT_ID{o.attr('id')});  // {o.attr('why')}"]


@rule("barrier")
def _barrier(k: _Kernel, o: Op) -> list[str]:
    if o.attr("scope") != "device":
        return [f"pipe_barrier(PIPE_{o.attr('scope')});"]
    up, across, down = o.attr("ids")
    if k.agent == "vector":
        return ["pipe_barrier(PIPE_ALL);", f"ffts_cross_core_sync(PIPE_MTE3, group_flag({up}));", f"wait_flag_dev({down});"]
    return ["pipe_barrier(PIPE_ALL);", f"wait_flag_dev({up});", f"ffts_cross_core_sync(PIPE_FIX, all_flag({across}));",
            f"wait_flag_dev({across});", f"ffts_cross_core_sync(PIPE_FIX, group_flag({down}));"]


def emit(p: Program, layout: str) -> list[KernelText]:
    """The text of each launch, and what the template declares for it: parameters in order."""
    dtype = next((t.dtype for t in p.role("input") if len(t.dims) > 1 and t.index == "token"), "float32")
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[dtype]
    if p.launch == "single":
        return [_launched(p, p.kernels, layout, "all", f"{p.name}_{short}")]
    return [_launched(p, (k,), layout, k.name, f"{p.name}_{k.name}_{short}") for k in p.kernels]


def _launched(p: Program, kernels: tuple[Kernel, ...], layout: str, name: str, symbol: str) -> KernelText:
    """Kernels that run one after the other in one launch."""
    used = {t.name for k in kernels for t in touched(p, k)}
    given = tuple(t for t in p.tensors if t.name in used and t.index not in ("block", "const"))
    own = tuple(t for t in p.tensors if t.name in used and t.index in ("block", "const"))  # the launcher's, after the host's
    tensors = (*given, *own)
    scalars = tuple(dict.fromkeys(n for k in kernels for n in numbers(k)))
    ints = [f"int64_t {x}" for x in ("N", "T", "batched", "H", "HV", "slots", *(f"has_{t.name}" for t in tensors if t.optional))]
    plain = [*ints, *(f"float {x}" for x in scalars)]
    bytes_ = [f"uint8_t *{t.name}_bytes" for t in tensors] + ["uint8_t *cu_seqlens_bytes"]
    pointers = [(f"{t.name}_gm", CTYPE[t.dtype], f"{t.name}_bytes") for t in tensors]
    pointers.append(("cu_seqlens", "int32_t", "cu_seqlens_bytes"))
    ops = [o for k in kernels for o in walk(k.body)]
    stored, loaded = ({o.attr("tensor") for o in ops if o.kind == kind} for kind in ("store", "load"))
    texts = [_Kernel(p, k, layout).run() for k in kernels]
    grid = "chunks" if any(k.grid == "chunks" for k in kernels) else "sequences"
    return KernelText(name, grid, max(blocks(p, k) for k in kernels), given, scalars,
                      texts[0] if len(texts) == 1 else "\n".join(x for t in texts for x in ("{", t, "}")), {
        "symbol": symbol, "pointers": pointers,
        "over": "; ".join(f"{k.name} over {k.grid}" for k in kernels),
        "doc": [f"{t.name}: {t.role}, {t.index}, [{', '.join(map(str, t.dims))}] {t.dtype}"
                + (" (optional)" if t.optional else "") for t in tensors],
        "device_params": [*(f"__gm__ {x}" for x in bytes_), *plain, "uint64_t ffts"],
        "host_params": ["uint32_t block_dim", "void *stream", *bytes_, *plain],
        "names": [x.split()[-1].lstrip("*") for x in (*bytes_, *plain)] + ["ffts"],
        "kinds": [2 if t.name in stored & loaded else 1 if t.name in stored else 0 for t in tensors] + [0],
        "own": [t.name for t in own],
        "channels": [(t.name, t.tile.shape(p.sizes), t.dtype) for t in own if t.index == "block"],
        "constants": [(t.name, t.fill, t.tile.shape(p.sizes)[0], t.dtype) for t in own if t.index == "const"]})
