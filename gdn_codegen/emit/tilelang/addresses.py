"""Addresses of tensors: an instance's tile of each tensor, its sizes, and the conditions of its loads and stores."""
from __future__ import annotations

from ...ir.types import BYTES, Dim, Tensor
from ..base import (
    EVERY,
    EmitError,
    Kernel,
    Loop,
    Op,
    Program,
    by_token,
    is_of_a_part,
    is_pool,
    stride_unit,
    strides,
    touched,
)

#: The index of a chunk's first token, which every chunk has.
FIRST = "0"


class Addresses:
    """The addresses in one kernel. `uses` collects the names of variables that the text uses and the kernel's head must
    define."""

    hv = "hv"  # the value head of the current op
    which = ""  # the suffix of variables of the chunk on which the current op works: "_next" one iteration ahead

    def __init__(self, p: Program, k: Kernel, layout: str) -> None:
        self.p, self.k, self.layout = p, k, layout
        self.uses: dict[str, None] = {}
        self.part = "part"  # the variable with the part slot of current loads
        self.one_token = by_token(k)
        self.warm_up = next((s.warm_up for s in k.body if isinstance(s, Loop)), "")
        self.params = {x.name: f"{x.name}{ {'input': '_in', 'output': '_out', 'workspace': ''}[x.role]}" for x in touched(p, k)}

    def use(self, name: str) -> str:
        """Record that the kernel's head must define `name`, and return it."""
        self.uses[name] = None
        return name

    @property
    def passed(self) -> str:
        """The variable with the chunks that a walk has passed: `chunk`, or in a walk back `passed`."""
        return "chunk" if self.k.step > 0 else "passed"

    def dim(self, d: Dim) -> str:
        """The size of a dim in this kernel's tiles."""
        return f"B{d}" if d == self.k.blocked_dim else self.tiled(d)

    def tiled(self, d: Dim) -> str:
        """The size of a dim in tiles, with all blocks of a blocked dim together."""
        return f"P{d}" if d in dict(self.p.extents) else str(d)

    def extents(self, t: Tensor) -> list[str]:
        """The sizes of the dims of a tile in global memory."""
        return [self.tiled(d) if t.in_tiles else str(d) for d in t.dims]

    def dtype(self, name: str) -> str:
        """The dtype in TileLang."""
        # On the CPU t.bfloat16 is float32 (device/memory.py).
        return "t.bfloat16" if name == "bfloat16" else f"T.{name}"

    def address(self, t: Tensor, index: tuple[str, ...], ahead: int = 0, chunk: str = "chunk", slot: str = "") -> str:
        """The element of `t` at `index` of this instance's tile, or of the next part's tile if `ahead`. chunk: after which a
        checkpoint was stored, and `slot`, in which pool slot."""
        cut = [f"block * {self.dim(d)} + {x}" if d == self.k.blocked_dim else x for d, x in zip(t.dims, index, strict=True)]
        if t.index == "token":
            cut[0] = self.use(f"row{self.which}") + (f" + {cut[0]}" if cut[0] != FIRST else "")
        return self.at(t, cut, ahead, chunk, slot)

    def inside(self, t: Tensor, index: tuple[str, ...]) -> list[str]:
        """The conditions under which the element at `index` of this instance's tile exists in memory: its row is in the
        sequence, and it is not in the padding."""
        rows = [f"{index[0]} < {self.use(f'rows{self.which}')}"] if t.index == "token" and index[0] != FIRST else []
        cut = [f"block * {self.dim(d)} + {x}" if d == self.k.blocked_dim else x for d, x in zip(t.dims, index, strict=True)]
        return rows + [f"{x} < {d}" for x, d, padded in zip(cut, t.dims, self.p.padded(t), strict=True) if padded]

    def tile(self, t: Tensor, piece: tuple[int, ...] = ()) -> str:
        """This instance's whole tile of `t`, as a slice. piece: the first column and the number of columns of a part of it."""
        cut = [f"block * {self.dim(d)}:(block + 1) * {self.dim(d)}" if d == self.k.blocked_dim else f"0:{x}"
               for d, x in zip(t.dims, self.extents(t), strict=True)]
        if piece:
            cut[-1] = f"{piece[0]}:{sum(piece)}"
        if t.index == "token":
            cut[0] = f"{self.use('row')}:{self.use('row')} + {self.dim(t.dims[0])}"
        return self.at(t, cut)

    def kept_at(self, t: Tensor) -> str:
        """The number that says where the tile of `t` after the current chunk lies: one for each sequence, or for each chunk."""
        return self.use(f"{t.at}_t") if self.p.tensor(t.at).index == "numbers" else f"{t.at}_n"

    def number(self, name: str, chunk: str) -> str:
        """The integer of this sequence and a chunk in a tensor of integers."""
        return f"T.cast({self.params[name]}[n, {chunk}], T.int64)"

    def at(self, t: Tensor, cut: list[str], ahead: int = 0, chunk: str = "chunk", slot: str = "") -> str:
        """`t`, indexed by the instance and by `cut`. cut: an index or a slice for each dim of the tile. For tokens, the first
        is the index of the token in its batch row. ahead: whether it is the next part's tile."""
        head = self.use("h") if t.heads == "H" else self.hv
        if t.index == "token":
            where = [self.use("b"), *((cut[0], head) if self.layout == "bthd" else (head, cut[0])), *cut[1:]]
        elif t.index == "slot":
            where = [self.use("slot"), head, *cut]
        elif is_pool(t):
            stride = f"{t.over or t.name}_stride"
            if self.one_token:  # slots are aligned to 16 bytes; threads move so many, if the compiler can see it
                unit = 16 // BYTES[t.dtype]
                stride = f"(T.truncdiv({stride}, {unit}) * {unit})"
            row = t.index == "checkpoint" and self.p.tensor(t.at).index == "number"
            at = f"{t.at}_n" if row or t.index == "sequence" else slot or self.kept_at(t)
            where = [f"{at} * {stride} + " + self.flat([f"{chunk} * HV + {head}" if row else head, *cut], t)]
        elif t.index == "checkpoint":
            where = [self.use("checkpoint"), head, *cut]
        elif t.index == "part":
            where = [f"{self.part} + 1" if ahead else self.part, head, *cut]
        elif t.index in ("sequence", "head"):
            where = [*(["n"] if t.index == "sequence" else []), head, *cut]
        else:
            raise EmitError(f"tilelang has no address for tensor {t.name}: index {t.index}")
        return f"{self.params[t.over or t.name]}[{', '.join(where)}]"

    def flat(self, index: list[str], t: Tensor) -> str:
        """The offset of an element of `t` from the start of the tiles of its sequence. index: head, then the dims of the tile."""
        out = index[0]
        for d, i in zip(t.dims, index[1:], strict=True):
            out = f"({out}) * {d} + {i}" if " + " in out else f"{out} * {d} + {i}"
        return out

    def shape(self, t: Tensor) -> str:
        """The shape of a whole tensor in global memory, for its declaration."""
        dims = self.extents(t)
        if t.index in ("number", "numbers"):
            return "(ends - 1,)" if t.index == "number" else f"(ends - 1, n_{t.name})"
        if is_pool(t) or t.index == "places":
            return f"(n_{t.name},)"
        if t.index == "token":
            lead = ["B", *(("L", t.heads) if self.layout == "bthd" else (t.heads, "L"))]
            dims = dims[1:]
        elif t.index in ("head", "counter"):
            lead = ["HV" if t.index == "head" else "1"]
        else:
            # A tensor that the caller leaves out has size 0 in this dim, and so has a workspace for parts that no kernel writes.
            own = t.optional or t.index in ("checkpoint", "part")
            lead = ["slots" if t.index == "slot" else f"n_{t.name}" if own else "ends - 1", t.heads]
        return f"({', '.join([*lead, *dims])}{',' if len(lead + dims) == 1 else ''})"

    def view(self, t: Tensor) -> str:
        """A view of a strided tensor with its strides. Parameters have strides in units of `stride_unit` elements, so that the
        compiler can derive the alignment that copies need."""
        unit = stride_unit(self.p, t)
        b, token, head = (x if unit == 1 else f"{x} * {unit}" for x in strides(t))
        far = [b, *((token, head) if self.layout == "bthd" else (head, token)), *("1" for _ in t.dims[1:])]
        return f"T.StridedTensor({self.shape(t)}, ({', '.join(far)}), {self.dtype(t.dtype)}, data={self.params[t.name]}.data)"

    def when(self, t: Tensor, o: Op) -> list[str]:
        """The conditions under which `o` loads or stores a tile of `t`, besides the operand of a conditional load."""
        out = [f"has_{t.name} != 0"] if t.optional else []
        if self.k.grid == "parts":
            if t.index == "sequence":
                out.append(f"{self.use('begin')} == 0" if o.kind == "load" else "(first + span) * C >= length")
            if o.attr("parts_ahead") and self.part == "part":
                out.append("(first + span) * C < length")
            if is_of_a_part(self.k, t, o):
                out.append(f"{self.passed} >= first")
        if t.index == "checkpoint" and t.at:
            out.append(f"{self.kept_at(t)} >= 0")
        elif t.index == "checkpoint":
            out += [f"T.truncmod(chunk + 1, {EVERY}) == 0", f"{self.use('rows')} >= C"]
        return out
