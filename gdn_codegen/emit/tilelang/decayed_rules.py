"""Rules for `decayed_blocks` and `decayed_pairs`. Device code addresses their operands in shared memory."""
from __future__ import annotations

from math import isinf

from ...ir.types import GROUP
from ..base import EmitError, Op
from .kernel import KernelWriter, rule
from .rules import grouped
from .tiles import Value

#: The rows of a tile: each of four warps has 16.
ROWS = 64


@rule("decayed_blocks", statement=True)
def decayed_blocks(w: KernelWriter, o: Op, p: Value, x: Value, g: Value, *before: Value) -> None:
    """p is square and swizzled. x may be padded instead."""
    held = w.buffers[p.buffer]
    if o.attr("size") != ROWS or held.shape != (ROWS, ROWS) or held.pad:
        raise EmitError(f"tilelang: {o.kind} ({o.out}, {o.line}) has blocks of {o.attr('size')} rows, and a square tile of "
                        f"{held.shape}, padded by {held.pad}; accepted: {ROWS} rows, and {(ROWS, ROWS)} without padding")
    _expect(w, o, (p, x), (g, *before))
    options = [*_before(w, before), _limit(o), *(["transposed=True"] if o.attr("transposed") else [])]
    w.line(f"t.decayed_blocks({', '.join([*(w.name(y.buffer) for y in (p, x, g)), w.name(o.buffer), *options])})")


@rule("decayed_pairs", statement=True)
def decayed_pairs(w: KernelWriter, o: Op, a: Value, b: Value, g: Value, *before: Value) -> None:
    """One or two products with the same second operand. Their first operands lie alike."""
    if row := w.gather(o):
        tiles = [w.env[y.args[0]] for y in row]
        lie = {(x.shape, x.pad) for x in (w.buffers[y.buffer] for y in tiles)}
        if len(lie) > 1:
            raise EmitError(f"tilelang: {o.kind} ({o.out}, {o.line}) runs beside another one, and their tiles have shapes and "
                            f"padding {sorted(lie)}; accepted: equal ones. Pass layouts should have given them")
        _expect(w, o, (*tiles, b), (g, *before))
        given = [grouped([w.name(x.buffer) for x in tiles]), w.name(b.buffer), w.name(g.buffer),
                 grouped([w.name(y.buffer) for y in row]), w.dim(g.dims[1])]
        w.line(f"t.decayed_pairs({', '.join([*given, *_before(w, before), _limit(o)])})")


def _before(w: KernelWriter, before: tuple[Value, ...]) -> list[str]:
    """The argument for sums before each row, if there are any."""
    return [f"before={w.name(x.buffer)}" for x in before]


def _limit(o: Op) -> str:
    """The argument for the largest exponent."""
    return "bounded=True" if isinf(o.attr("limit")) else f"limit={o.attr('limit')!r}"


def _expect(w: KernelWriter, o: Op, tiles: tuple[Value, ...], sums: tuple[Value, ...]) -> None:
    """Print checks of how tiles lie in memory. EmitError for other threads, rows or dtypes than device code has."""
    held, of_sums = ([w.buffers[y.buffer] for y in some] for some in (tiles, sums))
    if any(x.shape[0] != ROWS for x in held) or {x.dtype for x in held} not in ({"float16"}, {"bfloat16"}) \
            or {(x.dtype, x.pad) for x in of_sums} != {("float32", of_sums[0].pad)} or w.k.threads % GROUP:
        found = ", ".join(f"{x.shape} in {x.dtype}, padded by {x.pad}" for x in (*held, *of_sums))
        raise EmitError(f"tilelang: {o.kind} ({o.out}, {o.line}) has {w.k.threads} threads, and tiles {found}; accepted: a "
                        f"multiple of {GROUP} threads, {ROWS} rows, one dtype of 16 bits, and sums in float32 that lie alike")
    for name, rows in {w.name(x.name): x.pad or x.shape[1] % 64 for x in held}.items():  # `layouts` has others swizzled
        w.line(f"t.expect_{'rows' if rows else 'swizzled'}({name})")
    for x in of_sums:
        w.line(f"t.expect_rows({w.name(x.name)})")
