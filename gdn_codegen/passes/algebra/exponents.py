"""exponents: what arguments of exp are sums of. Rules that join exponentials use it, and the check that none can overflow.

A running sum of log decays falls from token to token. So of two sums of the same terms, the one over more tokens is smaller. The
difference of the sum over more tokens less the other one is an exponent that is never positive.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import copysign
from typing import NamedTuple

from ...ir.core import Op
from ...ir.ops import OPS

Defs = Mapping[str, Op]


class Part(NamedTuple):
    """A term of a sum: `value`, as a column or row if `view` says so, times a constant and the numbers `by`."""

    times: float
    value: str
    view: str = ""
    by: tuple[str, ...] = ()

    def opposite(self) -> Part:
        """The same term with the other sign."""
        return self._replace(times=-self.times)


class Sum(NamedTuple):
    """A running sum over tokens of a chunk, or an entry of one. of: its terms, and numbers that multiply it. at: the row, "" for
    that of the tile or vector itself, "row" where tokens are columns, "last" for the last one. own: 1 if the row's token is in
    the sum. times: what else multiplies it."""

    of: tuple[str, ...]
    at: str
    own: int
    times: float = 1.0

    @property
    def sign(self) -> int:
        """1, or -1 for a sum that is subtracted."""
        return int(copysign(1, self.times))


def parts(defs: Defs, a: str, p: Part | None = None) -> list[Part]:
    """The terms of the value `a`, through sums, signs, columns, rows and multiples. p: what multiplies it, and its view."""
    o, p = defs.get(a), (p or Part(1.0, a))._replace(value=a)
    if o is None:
        return [p]
    if o.kind in ("add", "sub"):
        return parts(defs, o.args[0], p) + parts(defs, o.args[1], p if o.kind == "add" else p.opposite())
    if o.kind == "neg":
        return parts(defs, o.args[0], p.opposite())
    if o.kind in ("col", "row"):
        return parts(defs, o.args[0], p._replace(view=o.kind))
    numbers = [x for x in o.args if x in defs and defs[x].kind in ("const", "scalar")] if o.kind == "mul" else []
    if len(numbers) == 1:
        x, y = o.args if numbers[0] == o.args[0] else o.args[::-1]
        by = p.by if defs[x].kind == "const" else tuple(sorted((*p.by, x)))
        return parts(defs, y, p._replace(times=p.times * defs[x].attr("value", 1.0), by=by))
    return [p if o.type is None or o.type.rank else p._replace(view="")]


def exponent(defs: Defs, f: str) -> list[Part]:
    """The terms of the exponent of an exponential, or of a column or row of one. None of another value."""
    o = defs.get(f)
    view = o.kind if o is not None and o.kind in ("col", "row") else ""
    o = defs.get(o.args[0]) if o is not None and view else o
    return parts(defs, o.args[0], Part(1.0, "", view)) if o is not None and o.kind == "exp" else []


def left(all_parts: Iterable[Part]) -> list[Part]:
    """The terms without those that cancel."""
    out: list[Part] = []
    for x in all_parts:
        if x.opposite() in out:
            out.remove(x.opposite())
        else:
            out.append(x)
    return out


def sums(defs: Defs, all_parts: Iterable[Part]) -> Iterator[Sum]:
    """The running sums among terms of a sum, and those of which entries are among them."""
    for x in all_parts:
        o = defs.get(x.value)
        if o is not None and OPS[o.kind].entry:  # it is taken for the last one
            yield from (s._replace(at="last") for s in sums(defs, parts(defs, o.args[0], x)))
        elif o is not None and o.kind == "cumsum":
            yield Sum((*o.args, *x.by), x.view if x.view == "row" else "", int(not o.attr("exclusive")), x.times)


def opposite(defs: Defs, some: list[Part], others: list[Part]) -> bool:
    """Whether two sums have running sums of the same terms with opposite signs."""
    found = {(s.of, s.times) for s in sums(defs, some)}
    return any((s.of, -s.times) in found for s in sums(defs, others))


def falls(later: Sum, earlier: Sum, mask: str) -> bool:
    """Whether the first sum of log decays, less the second, is never positive: it has all of the second's tokens. mask: "lower"
    or "strictly_lower" where entries above the diagonal do not count."""
    more = later.own - earlier.own
    after = mask == "strictly_lower" and earlier.at == "row"  # the row's token is later than that of the column
    if (later.of, abs(later.times)) != (earlier.of, abs(earlier.times)) or earlier.at == "last" != later.at:
        return False
    if later.at == earlier.at:
        return more >= 0
    return (later.at == "last" or (later.at == "" and mask != "" and earlier.at == "row")) and more + after >= 0
