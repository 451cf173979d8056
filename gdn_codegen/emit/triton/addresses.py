"""Addresses of tensors: pointers, masks and descriptors of an instance's tiles, and names of variables."""
from __future__ import annotations

import keyword
from typing import Any

from ...ir.core import Loop
from ...ir.types import Dim, Tensor, Tile
from ..base import CLEAR, EVERY, SUMMED, EmitError, Kernel, Op, Program, is_of_a_part, is_pool, strides, touched

#: Names that the text of kernels uses, so that no value may have them.
OWN = {"tl", "triton", "range", "float", "pid", "block", "hv", "h", "n", "b", "t", "start", "length", "row", "valid", "slot",
       "cu_seqlens", "row_next", "valid_next", "slot_next", "find_sequence", "N", "T", "batched", "H", "HV", "OPERAND", "rounded",
       "warm_up_length", "passed", "span", "size", "part", "earlier", "first", "begin", "stop", "slice_index", "checkpoint",
       "instance", "column", "columns", "rest", "row_rest", "valid_rest", "row_end", "clear_begin", "clear_end", EVERY, SUMMED}


class Addresses:
    """The addresses in one kernel. `uses` collects the names of variables that the text uses and the kernel's head must
    define."""

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        """No variable is used yet. `taken` has the names that the kernel's head uses. layout: "bthd" or "bhtd"."""
        self.p, self.k, self.layout = p, k, layout
        self.uses: dict[str, None] = {}
        self.part = "part"  # the variable with the part slot of current loads
        self.before_loops = False  # whether current ops work on the first chunk, before the loop over chunks
        self.piece: tuple[Any, ...] = ()  # a dim of which current loads and stores move a piece, its first index, its size
        self.column_loop = False  # whether current ops are in a loop over columns
        self.delay = 0  # how many tokens before the chunk current loads begin
        self.middle = 0  # half the rows of blocks of whose middle rows current loads load one for each row
        self.pieces: dict[str, tuple[Any, ...]] = {}  # of each variable with indices of one
        self.which = ""  # suffix of variables: "_next" for the next chunk, "_rest" for rows that no sequence covers
        self.described: dict[str, Tensor] = {}  # tensors that loops load by a descriptor
        self.warm_up = next((s.warm_up for s in k.body if isinstance(s, Loop)), "")
        self.taken = OWN | {f"{x}{d}" for d in p.sizes for x in ("", "B", "i_")} | {f"P{d}" for d, _ in p.extents}
        marks = (("", "_ptr"), ("has_", ""), (CLEAR, ""), ("", "_stride"), ("", "_n"), ("", "_t"), ("", "_width"), ("", "_rows"))
        self.taken |= {f"{x}{t.name}{y}" for t in touched(p, k) for x, y in marks}
        self.taken |= {x for t in touched(p, k) for x in strides(t)}

    def use(self, name: str) -> str:
        """Record that the kernel's head must define `name`, and return it."""
        self.uses[name] = None
        return name

    @property
    def passed(self) -> str:
        """The variable with the tokens that a walk has passed: the first token of the chunk, or in a walk back `passed`."""
        return "t" if self.k.step > 0 else "passed"

    def token(self, passed: str) -> str:
        """The first token of the chunk to which a walk back comes after so many tokens. passed: "" for none."""
        return f"tl.cdiv({self.use('length')}, {self.use('C')}) * C - C" + (f" - {passed}" if passed else "")

    def name(self, value: str) -> str:
        """The variable for a value or buffer. It gets a suffix if the kernel's text uses the name."""
        return f"{value}_" if value in self.taken or keyword.iskeyword(value) else value

    def dim(self, d: Dim) -> str:
        """The size of a dim in this kernel's tiles."""
        if isinstance(d, int):
            return str(d)
        return self.use(f"B{d}" if d == self.k.blocked_dim else self.tiled(d))

    def tiled(self, d: Dim) -> str:
        """The size of a dim in tiles, with all blocks of a blocked dim together."""
        return f"P{d}" if d in dict(self.p.extents) else str(d)

    def extent(self, t: Tensor, d: Dim) -> str:
        """The size of a dim of `t` in global memory."""
        if isinstance(d, int):
            return str(d)
        return self.use(self.tiled(d) if t.in_tiles else d)

    def index(self, d: Dim, axis: int, rank: int) -> str:
        """The indices along a dim in the whole tensor, broadcast as axis `axis` of a tile of rank `rank`."""
        if self.piece and d == self.piece[0]:
            self_index = "columns" if self.column_loop else self.use(f"i_{d}_{self.piece[1]}")
            if not self.column_loop:
                self.pieces[self_index] = self.piece
        elif isinstance(d, int):
            self_index = f"tl.arange(0, {d})"
        else:
            self_index = self.use(f"i_{d}")
            if self.delay and d == "C":
                self_index = f"({self_index} - {self.delay})"
            if self.middle and axis == 0:
                self_index = f"({self_index} // {2 * self.middle} * {2 * self.middle} + {self.middle - 1})"
        return self_index + ("" if rank == 1 else ("[:, None]", "[None, :]")[axis])

    def shape(self, t: Tile) -> str:
        """A tile's shape in Triton."""
        return f"[{', '.join(self.dim(d) for d in t.dims)}]"

    def kept_at(self, t: Tensor) -> str:
        """The number that says where the tile of `t` after the current chunk lies: one for each sequence, or for each chunk."""
        return self.use(f"{t.at}_t") if self.p.tensor(t.at).index == "numbers" else f"{t.at}_n"

    def number(self, name: str, chunk: str) -> str:
        """The integer of this sequence and a chunk in a tensor of integers."""
        return f"tl.load({name}_ptr + n * {name}_width + {chunk})"

    def lies_at(self, t: Tensor, chunk: str, slot: str) -> list[str]:
        """The terms of the address of a tile that lies where integers say."""
        stride = f"{t.over or t.name}_stride"
        if t.index == "sequence":
            return [f"{t.at}_n * {stride}"]
        size = " * ".join(self.extent(t, d) for d in t.dims)
        if self.p.tensor(t.at).index == "numbers":
            return [f"{slot or self.kept_at(t)} * {stride}"]
        self.use("C")
        return [f"{t.at}_n * {stride}", f"{chunk} * (HV * {size})"]

    def pointers(self, t: Tensor, transposed: bool, ahead: int = 0, last: bool = False, one_token: bool = False,
                 chunk: str = "t // C", slot: str = "") -> str:
        """Pointers to this instance's tile of `t`. ahead: to the next part's tile. transposed: to the transpose. last: to the
        last entry only. one_token: to the row of a chunk's only token. chunk: after which a checkpoint was stored, and `slot`, in
        which pool slot."""
        parts = [f"{t.over or t.name}_ptr"]
        head, heads = (self.use("h"), self.use("H")) if t.heads == "H" else ("hv", "HV")
        if t.strided:
            batch, token, far = (self.use(x) for x in strides(t))
            row = self.use(f"row{self.which}")
            parts.append(f"({self.use('b')} * {batch} + {row} * {token} + {head}.to(tl.int64) * {far})")
            if not one_token:
                parts.append(f"{self.index(t.dims[0], int(transposed), len(t.dims))}.to(tl.int64) * {token}")
            parts += self.columns(t, transposed, one_token)
        elif t.index == "token":
            row, width = self.use(f"row{self.which}"), [self.extent(t, d) for d in t.dims[1:]]
            at = f"({row} * {heads} + {head})" if self.layout == "bthd" else f"(({self.use('b')} * {heads} + {head}) * T + {row})"
            parts.append(" * ".join([at, *width]))
            stride = ([heads] if self.layout == "bthd" else []) + width
            if not one_token:
                rows = self.index(t.dims[0], int(transposed), len(t.dims))
                parts.append(" * ".join([rows, f"({' * '.join(stride)})" if len(stride) > 1 else stride[0]]) if stride else rows)
            parts += self.columns(t, transposed, one_token)
        elif t.index == "head":
            parts += [f"hv * {self.extent(t, t.dims[0])}", self.index(t.dims[0], 0, 1)]
        elif t.index in ("slot", "part", "sequence", "checkpoint"):
            size = [self.extent(t, d) for d in t.dims]
            at = {"slot": f"slot{self.which}", "part": f"({self.part} + 1)" if ahead else self.part, "sequence": "n.to(tl.int64)",
                  "checkpoint": "checkpoint"}[t.index]
            if t.index in ("slot", "checkpoint") and not t.at:
                self.use(at)
            if is_pool(t):
                parts += self.lies_at(t, chunk, slot)
            at = "hv" if t.at else f"({at} * HV + hv)"
            parts.append(" * ".join([at, f"({' * '.join(size)})"] if len(size) > 1 else [at, *size]))
            for axis, d in enumerate(t.dims):
                i = f"({self.dim(d)} - 1)" if last else self.index(d, axis ^ transposed, len(t.dims))
                parts.append(f"{i} * {size[1]}" if axis == 0 and len(size) == 2 else i)
        else:
            raise EmitError(f"triton has no address for tensor {t.name}: index {t.index}")
        return " + ".join(parts)

    def columns(self, t: Tensor, transposed: bool, one_token: bool) -> list[str]:
        """The indices of the columns of a tile of tokens, none for a vector of tokens."""
        return [self.index(d, 0 if one_token else 1 - transposed, 1 if one_token else 2) for d in t.dims[1:]]

    def rows(self, t: Tensor) -> str:
        """The variable with the descriptor of the sequence's rows of `t`. It is defined before the first loop."""
        for name in ("length", *(["b"] if self.layout == "bhtd" else []), *(("h", "H") if t.heads == "H" else ())):
            self.use(name)
        self.descriptor(t)  # records the names that it uses
        self.described[t.name] = t
        return f"{t.name}_rows"

    def descriptor(self, t: Tensor) -> str:
        """The line that makes a tensor descriptor of a sequence's rows of `t`."""
        head, heads = ("h", "H") if t.heads == "H" else ("hv", "HV")
        width = self.extent(t, t.dims[1])
        at = f"(start * {heads} + {head})" if self.layout == "bthd" else f"((b * {heads} + {head}) * T + {self.origin()})"
        far = f"{heads} * {width}" if self.layout == "bthd" else width
        tile = ", ".join(self.dim(d) for d in t.dims)
        base = f"{t.name}_ptr + {at} * {width}"
        return f"{t.name}_rows = tl.make_tensor_descriptor({base}, [length, {width}], [{far}, 1], [{tile}])"

    def mask(self, t: Tensor, transposed: bool, one_token: bool = False) -> str:
        """The mask of the elements that exist in memory, without rows past the sequence's end and without padding. "" for all.

        one_token: of the row of a chunk's only token. A sequence that has a chunk has that token."""
        first = one_token and self.before_loops  # of a number, or of a vector
        out = [f"({'0' if len(t.dims) == 1 else self.index('C', 0, 1)} < {self.use('length')})"] if first else []
        for n, (d, padded) in enumerate(zip(t.dims, self.p.padded(t), strict=True)):
            if n == 0 and one_token:
                continue
            along = ("[:, None]", "[None, :]")[n ^ transposed] if len(t.dims) > 1 + one_token else ""
            if padded:
                out.append(f"({self.index(d, 1, 1)} < {self.use(str(d))}){along}")
            elif n == 0 and t.index == "token":
                out.append(self.use(f"valid{self.which}") + along)
                if self.delay:
                    out.append(f"(t + {self.index(d, 0, 1)} >= 0){along}")
        return " & ".join(out)

    def when(self, t: Tensor, o: Op) -> list[str]:
        """The conditions under which `o` loads or stores a tile of `t`, besides the operand of a conditional load."""
        out = [f"has_{t.name}"] if t.optional else []
        if self.k.grid == "parts":
            if t.index == "sequence":
                out.append(f"{self.use('begin')} == 0" if o.kind == "load" else "first + size >= length")
            if o.attr("parts_ahead") and self.part == "part":
                out.append("first + size < length")
            if is_of_a_part(self.k, t, o):
                out.append(f"{self.passed} >= first")
        if t.index == "checkpoint" and t.at:
            out.append(f"{self.kept_at(t)} >= 0")
        elif t.index == "checkpoint":
            out += [f"(t // {self.use('C')} + 1) % {self.use(EVERY)} == 0", f"t + C <= {self.use('length')}"]
        return out

    def origin(self) -> str:
        """The index of a sequence's first token in its batch row, or in the packed tensor."""
        return "start - b * T" if "b" in self.uses else "start"
