"""vector_operands: the operands of an elementwise op as a vector core takes them. `vectorise` uses it.

The first operand is a whole tile or vector. The second one may be a column or a number. There is no op on a row.
"""
from __future__ import annotations

from collections.abc import Mapping

from ...ir.body import Body
from ...ir.core import Op
from ...ir.types import Dim

COMMUTE = ("add", "mul", "maximum", "minimum")
BINARY = (*COMMUTE, "sub", "div")


def _broadcast(dims: tuple[Dim, ...], to: tuple[Dim, ...]) -> str:
    """How an operand of `dims` spreads over a result of dims `to`: as a "number", a "row" or a "col". "" if it does not."""
    if not dims:
        return "number" if to else ""
    if len(to) == 2 and dims != to:
        return "row" if dims[0] == 1 else "col"
    return ""


def with_second_broadcast(o: Op, b: Body, defs: Mapping[str, Op]) -> str | None:
    """Append an op of BINARY with two operands to `b`. Only its second operand is a column or a number. A row is expanded.

    defs: the op of each value. Returns the name of the result, None if `o` can stay as it is.
    """
    x, y = o.args
    assert o.type is not None
    dims = o.type.dims
    bx, by = _broadcast(b.types[x].dims, dims), _broadcast(b.types[y].dims, dims)
    if not bx and by in ("", "col", "number"):
        return None
    row = defs.get(y)
    if by == "row" and bx and o.kind == "sub" and row is not None and row.kind == "row":
        minus = b.op("mul", row.args[0], b.op("const", value=-1.0), line=o.line)  # cheaper than on a tile
        y = b.op("expand", b.op("row", minus, line=o.line), dims=dims, line=o.line)
        return b.op("add", y, x, name=o.out, line=o.line)
    if by == "row":
        y, by = b.op("expand", y, dims=dims, line=o.line), ""
    if bx == "row":
        x, bx = b.op("expand", x, dims=dims, line=o.line), ""
    if bx and not by and o.kind in COMMUTE:
        return b.op(o.kind, y, x, name=o.out, line=o.line)
    if bx and o.kind == "sub":  # s - y = -y + s
        minus = b.op("mul", y, b.op("const", value=-1.0), line=o.line)
        return b.op("add", minus, x, name=o.out, line=o.line)
    if bx == "col":
        x = b.op("mul", b.op("full", dims=dims, value=1.0), x, line=o.line)
    elif bx:
        x = b.op("expand", x, dims=dims, line=o.line)
    return b.op(o.kind, x, y, name=o.out, line=o.line)
