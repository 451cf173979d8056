"""vectorise: rewrites what a vector unit lacks.

A vector unit has elementwise ops of two tiles, of a tile and a column, of a tile and a number; a row becomes a tile by
an op of its own. So: a row is expanded; a masking op is a product with a mask (or, with a fill of -inf, a sum) that the
host made; cumsum sums masked rows; last moves behind what is elementwise, since a number has no exp, and a caller's number
is made a vector for that; neg is a product with -1; sigmoid(x) is exp(-log(1 + exp(-x))).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir.builder import Body
from ...ir.core import Op, Program, walk
from ...ir.types import Dim, Tensor
from ...schedule.schedule import ScheduleError
from ..common import rebuild_kernel, with_tensors
from ..stage import takes

COMMUTE = ("add", "mul", "maximum", "minimum")
BLOCK = 64  # a tile of this side, whole on each core, is 16 KiB
MASKS = ("lower", "strictly_lower", "pairs")


@takes("decomposed")
def vectorise(p: Program) -> Program:
    """`p` in ops that a vector unit has."""
    made: dict[str, Tensor] = {}
    kernels = []
    for k in p.kernels:
        rules = _Rules(p.sizes["C"], made)
        k = rebuild_kernel(p, k, rules.sink_last)
        rules.defs = {o.out: o for o in walk(k.body)}
        kernels.append(rebuild_kernel(p, k, rules))
    return with_tensors(replace(p, kernels=tuple(kernels)), *made.values())


class _Rules:
    """The rule of one op: masks become products or sums with constant tiles, numbers come second. None where the op stays.

    chunk: tokens of a chunk. made: the constant tiles so far, to which new ones are added.
    """
    def __init__(self, chunk: int, made: dict[str, Tensor]) -> None:
        self.chunk, self.made = chunk, made
        self.lasts: dict[str, str] = {}  # last(x) -> x
        self.defs: dict[str, Op] = {}

    def sink_last(self, o: Op, b: Body) -> str | None:
        """f(last(x)) becomes last(f(x)) for an elementwise f of one operand; f of another number, f of a vector of it."""
        if o.kind == "last" and b.types[o.args[0]].rank == 1:
            self.lasts[o.out] = o.args[0]
        elif o.kind in ("exp", "log", "rsqrt", "sigmoid", "neg") and o.args[0] in self.lasts:
            f = b.op(o.kind, self.lasts[o.args[0]], line=o.line, **dict(o.attrs))
            self.lasts[o.out] = f
            return b.op("last", f, name=o.out, line=o.line)
        elif o.kind in ("exp", "log", "rsqrt", "sigmoid") and not b.types[o.args[0]].rank:  # of a vector of it
            f = b.op(o.kind, b.op("expand", o.args[0], dims=("C",), line=o.line), line=o.line, **dict(o.attrs))
            self.lasts[o.out] = f
            return b.op("last", f, name=o.out, line=o.line)
        return None

    def mask(self, b: Body, kind: str, kept: float, other: float, dims: tuple[Dim, ...], line: int) -> str:
        """A mask tile loaded from memory."""
        name = f"{kind.replace(':', '_')}_mask" if (kept, other) == (1, 0) else f"{kind.replace(':', '_')}_fill"
        if dims != ("C", "C"):
            raise ScheduleError(f"a mask over {dims}: only C x C tiles are masked")
        t = Tensor(name, "workspace", "const", "HV", dims, "float32", fill=f"{kind} {float(kept)!r} {float(other)!r}")
        b.tensors[name] = self.made[name] = t
        return b.op("load", name=b.fresh(name), tensor=name, line=line)

    def __call__(self, o: Op, b: Body) -> str | None:
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
        if o.kind == "cumsum":
            return self.cumsum(o, b)
        if o.kind in (*COMMUTE, "sub", "div") and len(o.args) == 2:
            return self.binary(o, b)
        return None

    def cumsum(self, o: Op, b: Body) -> str:
        """Row i of a tile of x, masked, sums to entry i; blocks of 64, each after the total of those before. Entries after
        which x is zero come out equal to the bit, which a scan in log2(C) steps does not give."""
        size = min(self.chunk, BLOCK)
        name = f"lower_{size}_mask"
        b.tensors[name] = self.made[name] = Tensor(name, "workspace", "const", "HV", (size, size), fill="lower 1.0 0.0")
        mask = b.op("load", name=b.fresh(name), tensor=name, line=o.line)
        x, sums = o.args[0], list[str]()
        if o.attr("least") is not None:  # a vector unit need not keep a NaN in a maximum; exp does, and is 0 of -inf
            zero = b.op("mul", b.op("exp", x, line=o.line), b.op("const", value=0.0), line=o.line)
            x = b.op("maximum", x, b.op("const", value=o.attr("least")), line=o.line)
            x = b.op("add", x, zero, line=o.line)
        for start in range(0, self.chunk, size):
            part = b.op("row", b.op("part", x, start=start, size=size, line=o.line), line=o.line)
            tile = b.op("mul", b.op("expand", part, dims=(size, size), line=o.line), mask, line=o.line)
            total = b.op("row_sum", tile, line=o.line)
            sums.append(b.op("add", total, b.op("last", sums[-1], line=o.line), line=o.line) if sums else total)
        return b.op("join", *sums, dim="C", name=o.out, line=o.line)

    def binary(self, o: Op, b: Body) -> str | None:
        """The second operand may be a column or a number; a row is expanded."""
        x, y = o.args
        out = o.type
        assert out is not None
        tx, ty = b.types[x], b.types[y]

        def broadcast(t: object, dims: tuple[Dim, ...]) -> str:
            if not dims:
                return "number" if out.dims else ""
            if out.rank == 2 and dims != out.dims:
                return "row" if dims[0] == 1 else "col"
            return ""

        bx, by = broadcast(x, tx.dims), broadcast(y, ty.dims)
        if not bx and by in ("", "col", "number"):
            return None
        row = self.defs.get(y)
        if by == "row" and bx and o.kind == "sub" and row is not None and row.kind == "row":
            minus = b.op("mul", row.args[0], b.op("const", value=-1.0), line=o.line)  # a vector, cheaper than a tile
            y = b.op("expand", b.op("row", minus, line=o.line), dims=out.dims, line=o.line)
            return b.op("add", y, x, name=o.out, line=o.line)
        if by == "row":
            y, by = b.op("expand", y, dims=out.dims, line=o.line), ""
        if bx == "row":
            x, bx = b.op("expand", x, dims=out.dims, line=o.line), ""
        if bx and not by and o.kind in COMMUTE:
            return b.op(o.kind, y, x, name=o.out, line=o.line)
        if bx and o.kind == "sub":  # s - y = -y + s
            minus = b.op("mul", y, b.op("const", value=-1.0), line=o.line)
            return b.op("add", minus, x, name=o.out, line=o.line)
        if bx == "col":
            x = b.op("mul", b.op("full", dims=out.dims, value=1.0), x, line=o.line)
        elif bx:
            x = b.op("expand", x, dims=out.dims, line=o.line)
        return b.op(o.kind, x, y, name=o.out, line=o.line)
