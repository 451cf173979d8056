"""The memory of a launch: which tensors have a pointer of their own, and which are regions of a workspace or of constants.

A launch takes few arguments. All tiles between kernels and between cores are regions of one workspace, and all masks lie in one
tensor of constants. Where a region begins depends on the call's sizes. So the launcher works that out, and hands the kernel a
table, which also has the strides of strided tensors.
"""
from __future__ import annotations

from math import prod

from ...ir.types import BYTES, Tensor
from ..base import Kernel, Program, strides, touched
from .values import CTYPE

#: Index of a tensor in the workspace -> what has a tile of it: a chunk slot or a sequence and value head, or a core group.
EACH = {"slot": "slot", "sequence": "sequence", "block": "group"}
#: Masks begin at multiples of this many bytes.
ALIGN = 512


class Memory:
    """The tensors of one launch, in the program's order. given: those that have a pointer. regions: of the workspace. constants:
    masks. masks: the first byte of each. strides: the parameters that the table has after the regions. pointers: the parameters.
    """

    def __init__(self, p: Program, kernels: tuple[Kernel, ...]) -> None:
        """Sorts the tensors that these kernels touch. Masks get their places."""
        self.p = p
        used = {t.name for k in kernels for t in touched(p, k)}
        tensors = [t for t in p.tensors if t.name in used]
        self.regions = tuple(t for t in tensors if t.role == "workspace" and t.index in EACH)
        self.constants = tuple(t for t in tensors if t.index == "const")
        self.given = tuple(t for t in tensors if t not in self.regions and t not in self.constants)
        self.strides = tuple(x for t in tensors for x in strides(t))
        self.stored, self.loaded = ({t.over or t.name for k in kernels for o in k.ops if o.kind == kind
                                     for t in [p.tensor(o.attr("tensor"))]} for kind in ("store", "load"))
        self.masks, at = {}, 0
        for t in self.constants:
            self.masks[t.name] = at
            at += -(-prod(t.tile.shape(p.sizes)) * BYTES[t.dtype] // ALIGN) * ALIGN
        shared = {"workspace": self.regions, "constants": self.constants, "table_bytes": (*self.regions, *self.strides)}
        self.pointers = [*(f"{t.name}_bytes" for t in self.given), *(n for n, x in shared.items() if x), "cu_seqlens_bytes"]

    def kind(self, t: Tensor) -> int:
        """The simulator's kind of a tensor: 0 read, 1 written, 2 written and read by the launch, 3 the same in place."""
        if t.name not in self.stored & self.loaded:
            return int(t.name in self.stored)
        return 2 if t.role == "workspace" else 3

    def declarations(self) -> dict[str, str]:
        """The lines that declare what a kernel's text may name, by name. A line may use the names of earlier ones."""
        found = {"table": _pointer("int64_t", "table", "table_bytes")}
        found |= {f"{t.name}_gm": _pointer(CTYPE[t.dtype], f"{t.name}_gm", f"{t.name}_bytes") for t in self.given}
        found |= {f"{t.name}_gm": _pointer(CTYPE[t.dtype], f"{t.name}_gm", f"workspace + table[{n}]")
                  for n, t in enumerate(self.regions)}
        found |= {f"{t.name}_gm": _pointer(CTYPE[t.dtype], f"{t.name}_gm", f"constants + {self.masks[t.name]}")
                  for t in self.constants}
        found["cu_seqlens"] = _pointer("int32_t", "cu_seqlens", "cu_seqlens_bytes")
        return found | {x: f"const int64_t {x} = table[{n}];" for n, x in enumerate(self.strides, len(self.regions))}

    def doc(self) -> list[str]:
        """A line for each tensor: its role, what it has a tile for, and the tile."""
        where = {**dict.fromkeys(self.regions, ", in workspace"), **dict.fromkeys(self.constants, ", in constants")}
        return [f"{t.name}: {t.role}, {t.index}, [{', '.join(map(str, t.dims))}] {t.dtype}{where.get(t, '')}"
                + (" (optional)" if t.optional else "") for t in (*self.given, *self.regions, *self.constants)]


def _pointer(of: str, name: str, bytes: str) -> str:
    """The declaration of a pointer to elements of type `of`."""
    return f"__gm__ {of} *{name} = reinterpret_cast<__gm__ {of} *>({bytes});"
