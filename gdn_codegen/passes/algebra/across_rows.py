"""across_rows: computes ops across the rows of a tile by products with constant tiles. Only devices with cores (PTO) run it.

`cumsum`, `to_middle` and `from_middle` of a tile [C, K] read other rows than those that they compute, and each vector core
holds some of the rows. But these ops are linear: f(x) = f(I) @ x, where I is the identity. f(I) is a constant tile of zeros,
ones and minus ones, and the core that multiplies holds all rows. With two operands, f(x, y) = f(I, 0) @ x + f(0, I) @ y. The
operands stay float32, whose products the device sums in float32. The alternative, an exchange of rows between the vector cores,
needs memory, signals between them, and one load for each middle row.

`last` of a tile is a row of a value that another core computes. `transfer` loads just this row from the channel of the value. So
this pass makes a product of the operand, if it is none yet: its product with I.
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...ir.body import Body
from ...ir.core import Line, Op, Program
from ...ir.ops import OPS
from ...ir.types import Dim, Tensor
from ..common import rebuild_kernel, with_tensors
from ..stage import takes
from .vectorise import bounded


@takes("decomposed")
def across_rows(p: Program) -> Program:
    """`p` with products for ops across the rows of tiles. The constant tiles are added as tensors."""
    made: dict[str, Tensor] = {}
    kernels = []
    for k in p.kernels:
        sums = {o.out for o in k.ops if o.kind == "cumsum"}
        kernels.append(rebuild_kernel(p, k, partial(_rule, sums, made)))
    return with_tensors(replace(p, kernels=tuple(kernels)), *made.values())


def _rule(sums: set[str], made: dict[str, Tensor], o: Op, b: Body) -> str | None:
    """Append the products for `o`. None if it stays. sums: the values that are running sums, and so products. made: the constant
    tiles so far, by name. The rule adds to it."""
    if not OPS[o.kind].across_rows or b.types[o.args[0]].rank != 2 or o.attr("by_head"):
        return None
    if OPS[o.kind].entry:
        x = o.args[0] if o.args[0] in sums else _product(o, b, ["eye 1.0 0.0"], made)
        return b.op(o.kind, x, name=o.out, line=o.line)
    if o.kind == "cumsum":
        o = o.changed(args=(bounded(o, b),))
        return _product(o, b, [f"{'strictly_lower' if o.attr('exclusive') else 'lower'} 1.0 0.0"], made, o.out)
    if o.kind in ("to_middle", "from_middle"):
        return _product(o, b, [f"{o.kind}:{o.attr('size')} of {n}/{len(o.args)}" for n in range(len(o.args))], made, o.out)
    return None


def _product(o: Op, b: Body, fills: list[str], made: dict[str, Tensor], name: str = "") -> str:
    """Append the sum of the products of constant tiles and the operands of `o`. fills: how each constant tile is filled."""
    total: list[str] = []
    for n, (x, fill) in enumerate(zip(o.args, fills, strict=True), 1):
        rows = b.types[x].dims[0]
        tile = constant(b, fill, (rows, rows), made, o.line)
        total = [b.op("matmul", tile, x, *total, name=name if n == len(fills) else "", line=o.line)]
    return total[0]


def constant(b: Body, fill: str, dims: tuple[Dim, Dim], made: dict[str, Tensor], line: Line) -> str:
    """Append a load of a constant tile. fill: how it is filled. made: the constant tiles so far, by name."""
    kind, what, of = fill.split()
    tensor = "ones_mask" if what == of else kind.replace(":", "_") + ("_mask" if what != "of" else f"_of_{of.replace('/', '_')}")
    tensor += f"_{dims[1]}" if dims[1] != "C" else ""
    b.tensors[tensor] = made[tensor] = Tensor(tensor, "workspace", "const", "HV", dims, fill=fill)
    return b.op("load", name=b.fresh(tensor), tensor=tensor, line=line)
