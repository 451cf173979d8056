"""vectorise: replaces ops that a vector core does not have. Only devices with cores (PTO) run it.

A vector core has elementwise ops on two tiles, on a tile and a column, and on a tile and a number. It also has an op that
expands a row to a tile. So this pass makes these replacements:
- A row operand is expanded, and so is a column that is to become a tile. Only the second operand may be a column or a number
  (`vector_operands`).
- A mask becomes a product with a constant tile of zeros and ones. A mask with fill -inf becomes a sum with a constant tile.
- `cumsum` sums the rows of a masked tile.
- f(last(x)) becomes last(f(x)), because there is no exp of a number. For f of a caller's number, the number becomes a vector
  first.
- neg is a product with -1. sigmoid(x) is exp(-log(1 + exp(-x))).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir.body import Body
from ...ir.core import Line, Op, Program
from ...ir.ops import OPS
from ...ir.types import Dim, Tensor
from ...schedule.schedule import ScheduleError
from ..common import rebuild_kernel, with_tensors
from ..stage import takes
from .vector_operands import BINARY, with_second_broadcast

BLOCK = 64  # a tile of 64 x 64 float32 numbers is 16 KiB; each core holds it whole
MASKS = ("lower", "strictly_lower", "pairs", "diagonal_blocks")


@takes("decomposed")
def vectorise(p: Program) -> Program:
    """`p` with ops that a vector core has. Constant mask tiles are added as tensors."""
    made: dict[str, Tensor] = {}
    kernels = []
    for k in p.kernels:
        rules = _Rules(p.sizes["C"], made)
        k = rebuild_kernel(p, k, rules.sink_entry)
        rules.defs = {o.out: o for o in k.ops}
        kernels.append(rebuild_kernel(p, k, rules))
    return with_tensors(replace(p, kernels=tuple(kernels)), *made.values())


class _Rules:
    """The rule for one op: masks become products or sums with constant tiles, and numbers become second operands. It returns
    None where the op stays.

    chunk: tokens of a chunk. made: the constant tiles so far, by name. The rule adds to it.
    """
    def __init__(self, chunk: int, made: dict[str, Tensor]) -> None:
        self.chunk, self.made = chunk, made
        self.entries: dict[str, Op] = {}  # an entry of a vector -> the op that reads it
        self.defs: dict[str, Op] = {}

    def sink_entry(self, o: Op, b: Body) -> str | None:
        """f(last(x)) becomes last(f(x)) for an elementwise f of one operand, also for other ops that read an entry. f of another
        number is computed on a vector of that number."""
        if OPS[o.kind].entry and b.types[o.args[0]].rank == 1:
            self.entries[o.out] = o
        elif o.kind in ("exp", "log", "rsqrt", "sigmoid", "neg") and o.args[0] in self.entries:
            read = self.entries[o.args[0]]
            return self.entry(o, read, b.op(o.kind, *read.args, line=o.line, **dict(o.attrs)), b)
        elif o.kind in ("exp", "log", "rsqrt", "sigmoid") and not b.types[o.args[0]].rank:  # computed on a vector of the number
            wide = b.op("expand", o.args[0], dims=("C",), line=o.line)
            return self.entry(o, Op("last", ""), b.op(o.kind, wide, line=o.line, **dict(o.attrs)), b)
        return None

    def entry(self, o: Op, read: Op, x: str, b: Body) -> str:
        """Compute `o` as the entry of `x` that `read` reads of its operand."""
        self.entries[o.out] = replace(read, args=(x,))
        return b.op(read.kind, x, name=o.out, line=o.line, **dict(read.attrs))

    def mask(self, b: Body, kind: str, kept: float, other: float, dims: tuple[Dim, ...], line: Line) -> str:
        """Load a constant mask tile. kept: its entries where `kind` keeps the operand. other: all other entries."""
        name = f"{kind.replace(':', '_')}_mask" if (kept, other) == (1, 0) else f"{kind.replace(':', '_')}_fill"
        if dims != ("C", "C"):
            if dims[0] != "C" or not isinstance(dims[1], int):
                raise ScheduleError(f"{name}: got a tile of dims {dims}; accepted on a vector core: C x C, and stacks of blocks")
            name = f"{name}_of_{dims[1]}"
        t = Tensor(name, "workspace", "const", "HV", dims, "float32", fill=f"{kind} {float(kept)!r} {float(other)!r}")
        b.tensors[name] = self.made[name] = t
        return b.op("load", name=b.fresh(name), tensor=name, line=line)

    def __call__(self, o: Op, b: Body) -> str | None:
        """Puts the replacement of `o` into `b` and returns the name of its value. None if a vector core has the op as it is."""
        def op(kind: str, *args: str, **attrs: Any) -> str:
            return b.op(kind, *args, line=o.line, **attrs)

        def number(x: float) -> str:
            return b.op("const", value=x)

        x = o.args[0] if o.args else ""
        if o.kind in MASKS:
            dims, size = b.types[x].dims, o.attr("size")
            kind = f"{o.kind}:{size}" if size else o.kind
            if o.attr("fill"):
                return b.op("add", x, self.mask(b, kind, 0.0, o.attr("fill"), dims, o.line), name=o.out, line=o.line)
            return b.op("mul", x, self.mask(b, kind, 1.0, 0.0, dims, o.line), name=o.out, line=o.line)
        if o.kind == "eye":
            assert o.type is not None
            return self.mask(b, "eye", 1.0, 0.0, o.type.dims, o.line)
        if o.kind == "neg":
            return b.op("mul", x, number(-1.0), name=o.out, line=o.line)
        if o.kind == "sigmoid":
            y = op("add", op("exp", op("mul", x, number(-1.0))), number(1.0))
            return b.op("exp", op("mul", op("log", y), number(-1.0)), name=o.out, line=o.line)
        if o.kind == "cumsum" and not o.attr("by_head"):
            return self.cumsum(o, b)
        if o.kind == "expand" and self.defs[x].kind == "col":
            assert o.type is not None
            return b.op("mul", b.op("full", dims=o.type.dims, value=1.0, line=o.line), x, name=o.out, line=o.line)
        if o.kind in BINARY and len(o.args) == 2:
            return with_second_broadcast(o, b, self.defs)
        return None

    def cumsum(self, o: Op, b: Body) -> str:
        """Entry i is the sum of row i of a masked tile whose rows are all x. Blocks of 64 entries add the total of the blocks
        before.

        If x is zero after an entry, all later entries are equal to it bit for bit. A scan in log2(C) steps does not guarantee
        that.
        """
        size = min(self.chunk, BLOCK)
        name = f"lower_{size}_mask"
        b.tensors[name] = self.made[name] = Tensor(name, "workspace", "const", "HV", (size, size), fill="lower 1.0 0.0")
        mask = b.op("load", name=b.fresh(name), tensor=name, line=o.line)
        x, sums = bounded(o, b), list[str]()
        for start in range(0, self.chunk, size):
            segment = b.op("row", b.op("segment", x, start=start, size=size, line=o.line), line=o.line)
            tile = b.op("mul", b.op("expand", segment, dims=(size, size), line=o.line), mask, line=o.line)
            total = b.op("row_sum", tile, line=o.line)
            sums.append(b.op("add", total, b.op("last", sums[-1], line=o.line), line=o.line) if sums else total)
        return b.op("join", *sums, dim="C", name=o.out, line=o.line)


def bounded(o: Op, b: Body) -> str:
    """The terms of a running sum, none below its `least`."""
    def op(kind: str, *args: str) -> str:
        return b.op(kind, *args, line=o.line, agent=o.agent)

    x = o.args[0]
    if o.attr("least") is None:
        return x
    zero = op("mul", op("exp", x), b.op("const", agent=o.agent, value=0.0))
    x = op("maximum", x, b.op("const", agent=o.agent, value=o.attr("least")))
    return op("add", x, zero)  # maximum may drop a NaN on a vector core; exp(x) * 0 keeps it and is 0 for -inf
