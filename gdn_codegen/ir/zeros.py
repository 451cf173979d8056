"""Rules for where the result of an op is zero on padding. The table in ir/ops.py gives each op one rule.

A tile may be larger than its data. Rows past a sequence's end are padding of C. Columns past the caller's tensor are padding of
K or V. The zero axes of a tile are the axes n for which every entry past the end along n is zero. A rule computes the zero axes
of the result: (attrs, types of the operands, zero axes of the operands) -> zero axes. Rules are exact: for an axis that is not
in the set, some operands give a result that is not zero on the padding.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .types import Tile

Axes = frozenset[int]
ZeroRule = Callable[[dict[str, Any], tuple[Tile, ...], tuple[Axes, ...]], Axes]
NONE: Axes = frozenset()
ROWS: Axes = frozenset((0,))
ALL: Axes = frozenset((0, 1))


def transpose(axes: Axes, transposed: bool = True) -> Axes:
    """The zero axes of a tile's transpose, or `axes` if not `transposed`."""
    return frozenset(1 - n for n in axes) if transposed else axes


def nowhere(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result may have any value on padding."""
    return NONE


def same(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result is zero where the operand is."""
    return zero[0]


def second(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result is zero where the second operand is."""
    return zero[1]


def transposed(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The zero axes of the operand, swapped."""
    return transpose(zero[0])


def rows(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """For a result with one entry for each row of the operand."""
    return zero[0] & ROWS if types[0].rank == 2 else NONE


def column_sums(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """For a result with one entry for each column of the operand, or in `parts` with several rows of them."""
    return zero[0] - ROWS if attrs.get("parts") else frozenset(n - 1 for n in zero[0] - ROWS)


def columns(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """For a result that is one row of the operand. A number has no padding."""
    return zero[0] - ROWS


def running_sums(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Columns of the operand, which are rows of the result by head."""
    return transpose(zero[0] - ROWS, bool(attrs.get("by_head")))


def columns_of(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """For a result that is one row of the operand, as a vector."""
    return frozenset(n - 1 for n in zero[0] - ROWS)


def delayed(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """For rows of the first operand, which may move to the padding, and vectors: columns that are zero in all operands."""
    return (zero[0] - ROWS) if all(0 in z for z in zero[1:]) else NONE


def diagonal(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Entry i is zero if row i or column i of the operand is zero."""
    return ROWS if zero[0] else NONE


def any_operand(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result is zero where any operand is."""
    return frozenset().union(*zero)


def all_operands(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result is zero where all operands are. An operand that is broadcast along an axis has no padding there."""
    return frozenset(n for n in ALL if all(n in z and n < t.rank and t.dims[n] != 1 for t, z in zip(types, zero, strict=True)))


def quotient(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result is zero where the dividend is, unless the divisor may also be zero on padding."""
    return NONE if zero[1] else zero[0]


def product(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """A row of a @ b is zero if the row of a is. A column is zero if the column of b is. An accumulator must be zero there,
    too."""
    a, b = transpose(zero[0], bool(attrs.get("ta"))), transpose(zero[1], bool(attrs.get("tb")))
    out = (a & ROWS) | (b - ROWS)
    return out & zero[2] if zero[2:] else out


def stacked(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Rows of the result are parts of the operand's rows."""
    return zero[0] & ROWS


def _below(axes: Axes) -> Axes:
    """The zero axes of a tile that is zero above its diagonal. If its rows past the end are zero, its columns there are,
    too."""
    return ALL if 0 in axes else axes


def lower(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """For an op that keeps the entries on or below the diagonal."""
    return _below(masked(attrs, types, zero))


def masked(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result is zero where the operand is, if masked entries become zero."""
    return NONE if attrs.get("fill") else zero[0]


def pairs(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """As `lower`, unless entries above the diagonal are kept, too."""
    return (masked if attrs.get("both") else lower)(attrs, types, zero)


def differences(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """For differences between rows: columns that are zero in all operands."""
    return frozenset.intersection(*zero) - ROWS


def decayed_product(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Row i is zero if row i of a is, and column j if row j of b is. Entries above the diagonal are zero."""
    return _below((zero[0] & ROWS) | transpose(zero[1] & ROWS))


def decayed_matmul(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Row i is zero if row i of p is. `transposed`: row j sums over rows i >= j, so that it is zero past the end if column j
    of p, or these rows of p or of the tile are. A column is zero if that of the tile is."""
    rows = zero[0] | (zero[1] & ROWS) if attrs.get("transposed") else zero[0] & ROWS
    return (ROWS if rows else NONE) | (zero[1] - ROWS)


def inverted(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """(I + x)^-1 has ones on the diagonal, also where x is zero. The optional vector scales all columns, including these
    ones."""
    scale = zero[1] if zero[1:] else NONE
    out = _below(zero[0]) if attrs.get("strict") else zero[0] & scale
    return out | transpose(scale)


def full(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result is zero everywhere if the value is 0."""
    return ALL if attrs["value"] == 0 else NONE


def identity(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The padding is zero if the attribute `within` limits the ones on the diagonal to the dim's extent in memory."""
    return ALL if attrs.get("within") else NONE


def valid(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Rows past the sequence's end are zero. With `given`, the op may leave the operand as it is, so that only its axes
    count."""
    return zero[0] if attrs.get("given") else zero[0] | ROWS
