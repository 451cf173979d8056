"""Where the result of an op is zero on padding: a rule an op, by the table in ir/ops.py.

A tile may be larger than its data. Rows past a sequence's end are padding of C; columns past what memory has are padding of K or
V. An axis n of a tile is in its set of zero axes if every entry past the end along n is zero. A rule gives the set of the result:
(attrs, types of the operands, their sets) -> set. It is exact: of an axis that is not in the set
operands can be found with which the result has other values on padding.
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
    """The axes of a tile's transpose."""
    return frozenset(1 - n for n in axes) if transposed else axes


def nowhere(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """The result may have any value on padding."""
    return NONE


def same(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Zero where the operand is."""
    return zero[0]


def transposed(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Where the operand is zero, with axes swapped."""
    return transpose(zero[0])


def rows(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Of a result with an entry a row."""
    return zero[0] & ROWS


def columns(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Of a result that is one row; a number has no padding."""
    return zero[0] - ROWS


def diagonal(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Entry i is zero where row i is, or column i."""
    return ROWS if zero[0] else NONE


def any_operand(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Zero where one operand is."""
    return frozenset().union(*zero)


def all_operands(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Zero where all operands are. What is broadcast along an axis has no padding there."""
    return frozenset(n for n in ALL if all(n in z and n < t.rank and t.dims[n] != 1 for t, z in zip(types, zero, strict=True)))


def quotient(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Zero where the dividend is; not where the divisor is zero somewhere, too."""
    return NONE if zero[1] else zero[0]


def product(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Rows of a @ b are zero where those of a are, columns where those of b are; with an accumulator, where its are, too."""
    a, b = transpose(zero[0], bool(attrs.get("ta"))), transpose(zero[1], bool(attrs.get("tb")))
    out = (a & ROWS) | (b - ROWS)
    return out & zero[2] if zero[2:] else out


def _below(axes: Axes) -> Axes:
    """Of a tile that is zero above its diagonal: with rows past the end its columns there are zero, too."""
    return ALL if 0 in axes else axes


def lower(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Of what is kept on or below the diagonal."""
    return _below(masked(attrs, types, zero))


def masked(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Zero where the operand is, if what is masked becomes zero."""
    return NONE if attrs.get("fill") else zero[0]


def inverted(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """(I + x)^-1 has a one on the diagonal where x has zeros. A vector scales its columns, the ones with them."""
    scale = zero[1] if zero[1:] else NONE
    out = _below(zero[0]) if attrs.get("strict") else zero[0] & scale
    return out | transpose(scale)


def full(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Zero everywhere if the value is 0."""
    return ALL if attrs["value"] == 0 else NONE


def identity(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Zero off the diagonal's kept part, if the op says within which extent it is kept."""
    return ALL if attrs.get("within") else NONE


def valid(attrs: dict[str, Any], types: tuple[Tile, ...], zero: tuple[Axes, ...]) -> Axes:
    """Rows past the sequence's end are zero; with `given`, all are as they were where that tensor is there."""
    return zero[0] if attrs.get("given") else zero[0] | ROWS
