"""moved_rows: computes ops that move rows of a tile by products with constant tiles. Only devices with cores (PTO) run it.

Each vector core holds some rows of a tile, and the core that multiplies has all of them. `delay` by n tokens is a product with
the tile that has ones on the n-th diagonal below the main one, and `advance` one with its transpose. That tile is a piece of an
identity with more columns than rows, from column n on. In float32 such a product is exact. The rows that `delay` takes instead of
earlier tokens are added, each times a vector that is 1 for its token and else 0.

`latest` is the sum of the rows times a vector that is 1 for the chunk's last token. An entry that is not finite then reaches all
that read the row, as it does in products.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Op, Program
from ...ir.types import Tensor
from ...schedule.schedule import ScheduleError
from ..common import rebuild_kernel, with_tensors
from ..stage import takes

#: By how many tokens rows may move: the columns that the identity has beyond its rows.
MOST = 16


@takes("decomposed")
def moved_rows(p: Program) -> Program:
    """`p` without `delay`, `advance` and `latest`. The constant tiles are added as tensors."""
    made: dict[str, Tensor] = {}
    identity = Tensor("moving_mask", "workspace", "const", "HV", ("C", p.sizes["C"] + MOST), fill="eye 1.0 0.0")

    def rule(o: Op, b: Body) -> str | None:
        if o.kind == "delay":
            return _delayed(o, b, identity, made)
        if o.kind == "advance":
            return _product(o, b, o.attr("by"), identity, made, o.out)
        return _latest(o, b) if o.kind == "latest" else None

    kernels = tuple(rebuild_kernel(p, k, rule) for k in p.kernels)
    return with_tensors(replace(p, kernels=kernels), *made.values())


def _product(o: Op, b: Body, by: int, identity: Tensor, made: dict[str, Tensor], name: str = "") -> str:
    """Append the product of a piece of the identity, and the first operand of `o`. by: how many tokens its rows move.
    ScheduleError for more than MOST."""
    if by > MOST:
        raise ScheduleError(f"{o.kind}: got {by} tokens ({o.line}); accepted on vector cores: up to {MOST}")
    b.tensors[identity.name] = made[identity.name] = identity
    moving = b.op("load", name=b.fresh(f"moving_{by}"), tensor=identity.name, piece=(by, "C"), line=o.line)
    return b.op("matmul", moving, o.args[0], name=name, ta=o.kind == "advance", line=o.line)


def _tokens(o: Op, b: Body) -> str:
    """Append a vector with 1 for each token of the chunk, and 0 past the sequence's end."""
    one = b.op("expand", b.op("const", value=1.0), dims=b.types[o.args[0]].dims[:1], line=o.line)
    return b.op("valid", one, line=o.line)


def _delayed(o: Op, b: Body, identity: Tensor, made: dict[str, Tensor]) -> str:
    """Append the product that moves rows down, and the sums with the rows that come first."""
    rows = o.args[1:]
    total = _product(o, b, len(rows), identity, made)
    number = b.op("cumsum", _tokens(o, b), line=o.line)  # from 1
    for n, row in enumerate(rows, 1):
        far = b.op("add", number, b.op("const", value=float(-n)), line=o.line)
        far = b.op("maximum", far, b.op("mul", far, b.op("const", value=-1.0), line=o.line), line=o.line)
        here = b.op("mul", b.op("minimum", far, b.op("const", value=1.0), line=o.line), b.op("const", value=-1.0), line=o.line)
        here = b.op("add", here, b.op("const", value=1.0), line=o.line)
        term = b.op("mul", b.op("row", row, line=o.line), b.op("col", here, line=o.line), line=o.line)
        total = b.op("add", total, term, name=o.out if n == len(rows) else "", line=o.line)
    return total


def _latest(o: Op, b: Body) -> str:
    """Append the sum of the rows, each times 1 if its token is the last of the chunk, and else times 0."""
    one = _tokens(o, b)
    number = b.op("cumsum", one, line=o.line)
    left = b.op("sub", number, b.op("last", number, line=o.line), line=o.line)  # 0 for the last token, and past it
    here = b.op("maximum", b.op("add", left, b.op("const", value=1.0), line=o.line), b.op("const", value=0.0), line=o.line)
    here = b.op("mul", here, one, line=o.line)
    rows = b.op("mul", o.args[0], b.op("col", here, line=o.line), line=o.line)
    return b.op("column_sum", rows, name=o.out, line=o.line)
