"""Writes one kernel: addresses, masks, loops, its head; what an op computes is a rule's."""
from __future__ import annotations

import keyword
import math
from itertools import groupby

from ...ir.core import loops
from ...ir.ops import AHEAD, OWN_PART
from ...ir.types import Dim, Tensor, Tile
from ..base import (
    CLEAR,
    EVERY,
    SUMMED,
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
    integers,
    is_of_a_part,
    numbers,
    strides,
    touched,
    walk,
    wrapped,
)

rule = Rules("triton", {"unit_lower_inverse": "decompose", "row_norm": "decompose", "softplus": "decompose",
                        "diag_inverse": "decompose", "move": "place", "part": "vectorise", "join": "vectorise",
                        "block": "decompose", "from_quarters": "decompose",
                        "signal": "synchronise", "wait": "synchronise", "barrier": "synchronise",
                        "fence": "mbarriers", "drain": "mbarriers", "transpose": "warp_groups"})

WIDTH = 120
#: Names of the kernels' own text, which no value may take.
OWN = {"tl", "triton", "range", "float", "pid", "block", "hv", "h", "n", "b", "t", "start", "length", "row", "valid", "slot",
       "cu_seqlens", "row_next", "valid_next", "slot_next", "find_sequence", "N", "T", "batched", "H", "HV", "OPERAND", "rounded",
       "warm_up_length", "span", "size", "part", "earlier", "first", "begin", "stop", "nth", "checkpoint", "half", "rest",
       "row_rest", "valid_rest", "room", "low", "high", EVERY, SUMMED}


class KernelWriter:
    """Writes one kernel. `uses` collects the names of the kernel's own that rules ask for."""

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        self.p, self.k, self.layout = p, k, layout
        self.w = Writer(p, "#", 1)
        self.env: dict[str, Text] = {}
        self.type: dict[str, Tile] = {}
        self.uses: dict[str, None] = {}
        self.part = "part"  # the part slot of what is loaded now
        self.which = ""  # "_next" for the chunk that follows, "_rest" for rows that no sequence covers
        self.own_alone = False  # whether a loop has no iterations but those of the walk's own part
        self.described: dict[str, Tensor] = {}  # tensors whose rows a descriptor stands for
        self.warm_up = next((s.warm_up for s in k.body if isinstance(s, Loop)), "")
        self.taken = OWN | {f"{x}{d}" for d in p.sizes for x in ("", "B", "i_")} | {f"P{d}" for d, _ in p.extents}
        marks = (("", "_ptr"), ("has_", ""), (CLEAR, ""), ("", "_stride"), ("", "_n"), ("", "_rows"))
        self.taken |= {f"{x}{t.name}{y}" for t in touched(p, k) for x, y in marks}
        self.taken |= {x for t in touched(p, k) for x in strides(t)}

    def use(self, name: str) -> str:
        self.uses[name] = None
        return name

    def name(self, value: str) -> str:
        """The variable of a value or buffer, out of the way of the kernel's own names."""
        return f"{value}_" if value in self.taken or keyword.iskeyword(value) else value

    def dim(self, d: Dim) -> str:
        """The size of a dim as a tile sees it."""
        if isinstance(d, int):
            return str(d)
        return self.use(f"B{d}" if d == self.k.split else self.tiled(d))

    def tiled(self, d: Dim) -> str:
        """The size of a dim of tiles, blocks of a split dim taken together."""
        return f"P{d}" if d in dict(self.p.extents) else str(d)

    def extent(self, t: Tensor, d: Dim) -> str:
        """The size of a dim of `t` in memory."""
        if isinstance(d, int):
            return str(d)
        return self.use(self.tiled(d) if t.role == "workspace" else d)

    def index(self, d: Dim, axis: int, rank: int) -> str:
        """Indices along a dim in the whole tensor, shaped for axis `axis` of `rank`."""
        if isinstance(d, int):
            self_index = f"tl.arange(0, {d})"
        else:
            self_index = self.use(f"i_{d}")
        return self_index + ("" if rank == 1 else ("[:, None]", "[None, :]")[axis])

    def shape(self, t: Tile) -> str:
        return f"[{', '.join(self.dim(d) for d in t.dims)}]"

    # --- addresses ---
    def pointers(self, t: Tensor, transposed: bool, ahead: int = 0, last: bool = False) -> str:
        """Pointers to this instance's tile of `t`, or to that of the next part; or to its transpose, or its last row."""
        parts = [f"{t.over or t.name}_ptr"]
        head, heads = (self.use("h"), self.use("H")) if t.heads == "H" else ("hv", "HV")
        if t.strided:
            batch, token, far = (self.use(x) for x in strides(t))
            row = self.use(f"row{self.which}")
            parts.append(f"({self.use('b')} * {batch} + {row} * {token} + {head}.to(tl.int64) * {far})")
            parts.append(f"{self.index(t.dims[0], int(transposed), len(t.dims))}.to(tl.int64) * {token}")
            parts += [self.index(d, 1 - transposed, 2) for d in t.dims[1:]]
        elif t.index == "token":
            row, width = self.use(f"row{self.which}"), [self.extent(t, d) for d in t.dims[1:]]
            at = f"({row} * {heads} + {head})" if self.layout == "bthd" else f"(({self.use('b')} * {heads} + {head}) * T + {row})"
            parts.append(" * ".join([at, *width]))
            stride = ([heads] if self.layout == "bthd" else []) + width
            rows = self.index(t.dims[0], int(transposed), len(t.dims))
            parts.append(" * ".join([rows, f"({' * '.join(stride)})" if len(stride) > 1 else stride[0]]) if stride else rows)
            parts += [self.index(d, 1 - transposed, 2) for d in t.dims[1:]]
        elif t.index in ("slot", "part", "sequence", "checkpoint"):
            size = [self.extent(t, d) for d in t.dims]
            at = {"slot": f"slot{self.which}", "part": f"({self.part} + 1)" if ahead else self.part, "sequence": "n.to(tl.int64)",
                  "checkpoint": "checkpoint"}[t.index]
            if t.index in ("slot", "checkpoint"):
                self.use(at)
            if t.at:
                parts.append(f"{t.at}_n * {t.over or t.name}_stride")
            at = "hv" if t.at else f"({at} * HV + hv)"
            parts.append(" * ".join([at, f"({' * '.join(size)})"] if len(size) > 1 else [at, *size]))
            for axis, d in enumerate(t.dims):
                i = f"({self.dim(d)} - 1)" if last else self.index(d, axis ^ transposed, len(t.dims))
                parts.append(f"{i} * {size[1]}" if axis == 0 and len(size) == 2 else i)
        else:
            raise EmitError(f"triton has no address for tensor {t.name}: index {t.index}")
        return " + ".join(parts)

    def rows(self, t: Tensor) -> str:
        """The descriptor of the sequence's rows of `t`."""
        for name in ("length", *(["b"] if self.layout == "bhtd" else []), *(("h", "H") if t.heads == "H" else ())):
            self.use(name)
        self.descriptor(t)  # which uses more
        self.described[t.name] = t
        return f"{t.name}_rows"

    def descriptor(self, t: Tensor) -> str:
        head, heads = ("h", "H") if t.heads == "H" else ("hv", "HV")
        width = self.extent(t, t.dims[1])
        at = f"(start * {heads} + {head})" if self.layout == "bthd" else f"((b * {heads} + {head}) * T + {self.origin()})"
        far = f"{heads} * {width}" if self.layout == "bthd" else width
        tile = ", ".join(self.dim(d) for d in t.dims)
        base = f"{t.name}_ptr + {at} * {width}"
        return f"{t.name}_rows = tl.make_tensor_descriptor({base}, [length, {width}], [{far}, 1], [{tile}])"

    def mask(self, t: Tensor, transposed: bool) -> str:
        """The rows of a sequence, where `t` holds tokens; less than a tile, where memory has less."""
        out = []
        for n, (d, padded) in enumerate(zip(t.dims, self.p.padded(t), strict=True)):
            along = ("[:, None]", "[None, :]")[n ^ transposed] if len(t.dims) > 1 else ""
            if padded:
                out.append(f"({self.use(f'i_{d}')} < {self.use(str(d))}){along}")
            elif n == 0 and t.index == "token":
                out.append(self.use(f"valid{self.which}") + along)
        return " & ".join(out)

    def when(self, t: Tensor, o: Op) -> list[str]:
        """On what it depends whether a tile of `t` is moved at all, beside a load's operand."""
        out = [f"has_{t.name}"] if t.optional else []
        if self.k.grid == "parts":
            if t.index == "sequence":
                out.append(f"{self.use('begin')} == 0" if o.kind == "load" else "first + size >= length")
            if o.attr("parts_ahead") and self.part == "part":
                out.append("first + size < length")
            if is_of_a_part(self.k, t, o) and not self.own_alone:
                out.append("t >= first")
        if t.index == "checkpoint":
            out += [f"(t // {self.use('C')} + 1) % {self.use(EVERY)} == 0", f"t + C <= {self.use('length')}"]
        return out

    # --- statements ---
    def instance(self, body: tuple[Stmt, ...]) -> None:
        """All of the kernel."""
        for ahead, group in groupby(body, lambda s: isinstance(s, Op) and bool(s.attr(AHEAD))):
            if ahead:
                self.first_turn(tuple(group))
            else:
                self.body(tuple(group))

    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, Loop):
                self.loop(s)
                continue
            emit = rule.of(s)
            if s.type is not None:
                self.type[s.out] = s.type
            if s.kind in ("load", "store", "return_unless_negative", "claim_part"):
                self.w.at(s)
                self.which = "_next" if s.attr(AHEAD) else ""
                emit(self, s)
                self.which = ""
                self.begins(s.out)
                continue
            text = emit(self, s, *(self.env[a] for a in s.args))
            if s.buffer:
                self.w.at(s)
                if text.code != self.name(s.buffer):  # else it lies there already
                    self.line(f"{self.name(s.buffer)} = {text}")
                text = Text(self.name(s.buffer))
            self.env[s.out] = text
            self.begins(s.out)

    def begins(self, value: str) -> None:
        """Once the warm-up length of a part is known, say where its walk begins."""
        if value and value == self.warm_up:
            self.line(f"begin = first - tl.maximum({self.env[value]}, 0).to(tl.int32) * {self.use('C')}")

    def loop(self, lp: Loop) -> None:
        at = len(self.w.lines)
        self.carried_loop(lp)
        here = [line for t in self.described.values() for line in wrapped(self.descriptor(t), WIDTH - 4)]
        self.w.lines[at:at] = [f"    {line}" for line in here]
        self.described.clear()

    def carried_loop(self, lp: Loop) -> None:
        """Its carried values and its iterations."""
        for c in lp.carried:
            self.type[c.name] = self.type[c.result] = c.type
            name = Text(self.name(c.name))
            if self.env[c.init].code != name.code:
                self.line(f"{name} = {self.env[c.init]}")
            self.env[c.name] = self.env[c.result] = name
        if lp.index == "part":
            self.part = "earlier"
            self.iterations(lp, lp.body, "earlier", "part - first // size", "part")
            self.part = "part"
            return
        if lp.index == "before":
            begin = f"tl.maximum({self.use('begin')}, 0) + nth * {self.use('C')}"
            self.iterations(lp, lp.body, "t", begin, "first", self.k.slices)
            return
        begin, stop = ("begin", "stop") if self.k.grid == "parts" else ("0", "length")
        if begin == "begin":
            self.use(begin)
        always = tuple(o for o in lp.body if isinstance(o, Op) and not o.attr(OWN_PART))
        self.own_alone = len(always) < len(lp.body)
        if self.own_alone:
            self.iterations(lp, always, "t", begin, "first")
            begin = "first"
        self.iterations(lp, lp.body, "t", begin, self.use(stop))
        self.own_alone = False

    def iterations(self, lp: Loop, body: tuple[Stmt, ...], index: str, begin: str, stop: str, step: int = 1) -> None:
        """A loop over `body`, and what is known of each of its chunks, or of of every `step`-th one."""
        size = self.use("C") + (f" * {step}" if step > 1 else "")
        over = f"{begin}, {stop}" if index == "earlier" else f"{begin}, {stop}, {size}"
        self.w(f"for {index} in range({over}):")
        self.w.indent += 1
        first = len(self.w.lines)
        self.body(body)
        for c in lp.carried:
            if self.env[c.next].code != self.env[c.name].code:
                self.line(f"{self.env[c.name]} = {self.env[c.next]}")
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        self.w(*([*self.chunk(), *self.following("t + C")] if index == "t" else []))
        self.w.lines += after
        self.w.indent -= 1

    def chunk(self) -> list[str]:
        """What is known of the chunk whose first token is t."""
        lines = {"row": f"row = {self.origin()} + t",
                 "valid": f"valid = {self.index('C', 0, 1) if 'valid' in self.uses else ''} < length - t",
                 "slot": "slot = start // C + n + t // C",
                 "checkpoint": f"checkpoint = start // (C * {EVERY}) + (t // C + 1) // {EVERY} - 1"}
        if self.k.grid == "chunks":
            del lines["slot"]
        return [text for name, text in lines.items() if name in self.uses]

    def following(self, t: str) -> list[str]:
        """What is known of the chunk for which loads work an iteration ahead, whose first token is `t` ("" for
        none); past the last chunk its slot again, which is there."""
        following = f"tl.minimum({t}, tl.maximum(length - 1, 0)) // C" if t else ""
        lines = {"row_next": " + ".join(["row_next = " + self.origin(), *([t] if t else [])]),
                 "valid_next": f"valid_next = {' + '.join([*([t] if t else []), 'i_C'])} < length",
                 "slot_next": " + ".join(["slot_next = start // C + n", *([following] if t else [])])}
        return [text for name, text in lines.items() if name in self.uses]

    def origin(self) -> str:
        """The row of a sequence's first token."""
        return "start - b * T" if "b" in self.uses else "start"

    def first_turn(self, ops: tuple[Stmt, ...]) -> None:
        """What works an iteration ahead, for the first iteration."""
        begin = self.use("begin") if self.k.grid == "parts" else ""
        first = len(self.w.lines)
        self.body(ops)
        after, self.w.lines = self.w.lines[first:], self.w.lines[:first]
        self.w(*self.following(begin))
        self.w.lines += after

    def line(self, text: str) -> None:
        self.w(*wrapped(text, WIDTH - 4 * self.w.indent))

    # --- the whole ---
    def text(self) -> KernelText:
        self.instance(self.k.body)
        clear = self.clear()
        chunk = self.chunk() if self.k.grid == "chunks" else []
        head = Writer(self.p, "#", 1)
        head(*self.head(clear), *chunk)
        tensors = touched(self.p, self.k)
        ints = integers(self.p, self.k)
        flags, far = [x for x in ints if x.startswith("has_")], [x for x in ints if "_stride" in x]
        tiles = [f"P{d}" for d, _ in self.p.extents]
        shape = [x for x in ("H", "HV", *self.p.sizes, *tiles, f"B{self.k.split}") if x in self.uses]
        plain = [f"{t.name}_ptr" for t in tensors] + ["cu_seqlens", *(self.name(s) for s in numbers(self.k))]
        sizes = [x for x in ("N", "T", "batched", "span", EVERY, SUMMED) if x in self.uses]
        sizes += [x for x in ints if x.startswith(CLEAR)]
        fixed = [*flags, *shape, *(["OPERAND"] if "OPERAND" in self.uses else [])]
        block = {f"B{d}": n for d, n in self.k.dims}
        params = [*plain, *sizes, *far, *(f"{x}: tl.constexpr" for x in fixed)]
        return KernelText(self.k.name, self.k.grid, blocks(self.p, self.k), tensors, numbers(self.k),
                          "\n".join([*head.lines, *self.w.lines]),
                          {"params": params, "sizes": sizes, "block": block, "warps": self.warps(), "ints": ints,
                           "halves": self.halves(), "rounds": "OPERAND" in self.uses,
                            "described": any(o.attr("described") for o in walk(self.k.body))})

    def clear(self) -> list[str]:
        """Zeros into this instance's part of the rows that no sequence covers. A sequence's instances have the tokens from its
        first on; those past the last sequence's end are that one's."""
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
            out += [f"if ({wanted}) & (half == 0):" if self.halves() else f"if {wanted}:",
                    "    room = tl.where((batched == 0) & (n == N - 1), T - start, length).to(tl.int32)",
                    f"    low = {left_out.format(f'tl.maximum({low}, length)' if size else 'length')}",
                    f"    high = {f'tl.minimum({low} + {size}, room)' if size else 'room'}",
                    "    for rest in range(low, high, C):",
                    f"        row_rest = {self.origin()} + rest",
                    f"        valid_rest = {self.index('C', 0, 1)} < high - rest",
                    *(f"        {x}" for x in wrapped(f"tl.store({at}, 0.0, mask={mask})", WIDTH - 12))]
        return out

    def head(self, clear: list[str]) -> list[str]:
        """From the program id to the head, the sequence and, in a grid over chunks, the chunk. clear: what an instance does
        before it may end."""
        split = self.k.split
        out = ["pid = tl.program_id(0)"]
        ends: list[str] = [] if clear else out  # where an instance ends that has nothing else to do
        if self.halves():
            out += ["half = pid // (tl.num_programs(0) // 2)", "pid = pid % (tl.num_programs(0) // 2)"]
        if split:
            count = f"({self.use(self.tiled(split))} // {self.use(f'B{split}')})"
            out += [f"block = pid % {count}", f"pid = pid // {count}"]
        if self.k.slices > 1:
            out += [f"nth = pid % {self.k.slices}", f"pid = pid // {self.k.slices}"]
        out.append(f"hv = pid % {self.use('HV')}")
        if "h" in self.uses:
            out.append(f"h = hv // (HV // {self.use('H')})")
        ragged = {"row", "valid", "slot", "length", "checkpoint", "row_next", "slot_next"} & set(self.uses)
        if self.k.grid == "chunks":
            out += ["slot = (pid // HV).to(tl.int64)", f"n = find_sequence(cu_seqlens, slot, {self.use('N')}, {self.use('C')})"]
            ragged = {"length"}
        elif self.k.grid == "parts":
            out += [f"size = {self.use('C')} * {self.use('span')}", "part = (pid // HV).to(tl.int64)",
                    f"n = find_sequence(cu_seqlens, part, {self.use('N')}, size)"]
            ragged = {"length"}
        else:
            out.append("n = pid // HV")
        for t in touched(self.p, self.k):
            if t.index == "number":
                out.append(f"{t.name}_n = tl.load({t.name}_ptr + n).to(tl.int64)")
                ends += [f"if {t.name}_n < 0:", "    return"] if t.name == self.p.skips else []
        if "b" in self.uses:
            out.append(f"b = (n * {self.use('batched')}).to(tl.int64)")
            self.use("T")
        if ragged:
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
                out.append(f"i_{d} = block * B{d} + tl.arange(0, B{d})" if d == split
                           else f"i_{d} = tl.arange(0, {self.dim(d)})")
        return [*out, *clear, *ends] if clear else out

    def halves(self) -> bool:
        return any(o.kind == "claim_part" for o in walk(self.k.body))

    def warps(self) -> int:
        """Eight where what a walk carries has 128 x 128 entries, about 64 float32 registers a thread; two where no product has
        more than 32 x 32, which more would only hand to each other; else four."""
        sizes = {**self.p.sizes, **self.k.sizes}
        carried = [math.prod(c.type.shape(sizes)) for lp in loops(self.k.body) for c in lp.carried]
        products = [math.prod(o.type.shape(sizes)) for o in walk(self.k.body) if o.kind == "matmul" and o.type]
        if max(carried, default=0) >= 128 * 128:
            return 8
        return 2 if max(products, default=32 * 32) <= 32 * 32 else 4
