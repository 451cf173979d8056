"""match: patterns of values, written in the notation of pages.

`matches("exp(lower(x[:, None] - x[None, :], fill=-inf))", o, defs)` tells whether the op `o` computes such a value, and what x
is then. A name in a pattern matches any value. A name that occurs twice matches the same value both times. A number matches a
constant. Attributes must be equal. The operands of sums, products and `maximum` may be in either order. `build` computes the
value of a pattern.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..ir.core import Op
from ..ir.notation import Pattern, pattern

COMMUTE = ("add", "mul", "maximum")
Found = dict[str, str]  # a pattern's name -> a value
Make = Callable[[str, tuple[str, ...], tuple[tuple[str, Any], ...]], str]  # op, operands, attributes -> the value


def matches(text: str, o: Op | None, defs: Mapping[str, Op], ordered: bool = False) -> Iterator[Found]:
    """All ways in which `o` matches the pattern `text`: for each, the values of the pattern's names.

    defs: the op of each value that the pattern may look into. ordered: whether operands must have the pattern's order.
    """
    if o is not None:
        yield from _op(pattern(text), o, defs, {}, ordered)


def matched(text: str, o: Op | None, defs: Mapping[str, Op]) -> Found | None:
    """The first of `matches`, or None."""
    return next(matches(text, o, defs), None)


def _op(p: Pattern, o: Op, defs: Mapping[str, Op], found: Found, ordered: bool) -> Iterator[Found]:
    """Matches of one op. A commutative op is tried with its operands in both orders."""
    if o.kind != p.kind or o.attrs != p.attrs or len(o.args) != len(p.args):
        return
    both = o.kind in COMMUTE and not ordered and o.args[0] != o.args[1]
    for args in (o.args, o.args[::-1])[: 1 + both]:
        yield from _all(p.args, args, defs, found, ordered)


def _all(patterns: tuple[Pattern, ...], args: tuple[str, ...], defs: Mapping[str, Op], found: Found,
         ordered: bool) -> Iterator[Found]:
    """Matches of several patterns with as many values."""
    if not patterns:
        yield found
        return
    for more in _value(patterns[0], args[0], defs, found, ordered):
        yield from _all(patterns[1:], args[1:], defs, more, ordered)


def _value(p: Pattern, a: str, defs: Mapping[str, Op], found: Found, ordered: bool) -> Iterator[Found]:
    """Matches of a pattern with a value: the op that defines it, or any value for a name."""
    if p.kind:
        if a in defs:
            yield from _op(p, defs[a], defs, found, ordered)
    elif found.get(p.name, a) == a:
        yield {**found, p.name: a}


def build(text: str, found: Found, make: Make) -> str:
    """The value of the pattern `text` for the values `found` of its names. make: creates one op and returns its value."""
    def value(p: Pattern) -> str:
        return make(p.kind, tuple(map(value, p.args)), p.attrs) if p.kind else found[p.name]
    return value(pattern(text))
