"""Rules about sums and products: both are flat, in order; subtracted terms come last; a factor of all terms is outside."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ....ir.core import Op
from .rule import Condition, Rules

if TYPE_CHECKING:
    from ..terms import Terms

SUMS = Rules()

# differences: flat, in order; subtracted terms come last
SUMS.rule("a sum with a difference", "x + (y - z)", "(x + y) - z", "add")
SUMS.rule("a sum subtracted", "x - (y + z)", "(x - y) - z", "sub")
SUMS.rule("a difference subtracted", "x - (y - z)", "(x + z) - y", "sub")
SUMS.rule("order of what is subtracted", "(x - y) - z", "(x - z) - y", "sub", lambda t, x: t.before(x, "zy"))


def _unsorted(kind: str, *names: str) -> Condition:
    """The condition that two values are in the wrong order. names: first the two names, as one text, then names whose values
    must not be an op `kind`."""
    return lambda t, x: t.before(x, names[0]) and not any(t.is_a(kind, x[n]) for n in names[1:])


for _k, _op in (("add", "+"), ("mul", "*")):
    SUMS.rule(f"{_k} of {_k}", f"x {_op} (y {_op} z)", f"(x {_op} y) {_op} z", _k, ordered=True)
    SUMS.rule(f"order of {_k}", f"x {_op} y", f"y {_op} x", _k, _unsorted(_k, "yx", "x", "y"), ordered=True)
    SUMS.rule(f"order of more {_k}", f"(x {_op} y) {_op} z", f"(x {_op} z) {_op} y", _k, _unsorted(_k, "zy", "z"), ordered=True)
SUMS.rule("order of a maximum", "maximum(x, y)", "maximum(y, x)", "maximum", lambda t, x: t.before(x, "yx"), ordered=True)


def _without(factors: list[str], fewer: list[str]) -> list[str]:
    """`factors` without those of `fewer`. A factor that occurs n times in `fewer` is removed n times."""
    out = list(factors)
    for f in fewer:
        out.remove(f)
    return out


@SUMS.written("a factor of both terms", "add", "sub")
def _common(t: Terms, o: Op) -> str | None:
    """c * x + c * y becomes c * (x + y), where c is a number, a column or a row."""
    left, right = (t.factors(a) for a in o.args)
    small: list[str] = []
    for f in left:  # a factor that both have n times leaves n times
        if t.scales(f) and small.count(f) < right.count(f):
            small.append(f)
    rest = [_without(factors, small) for factors in (left, right)]
    if not small or not all(rest) or any(t.type[t.product(x, o.line)].dims != t.type[a].dims
                                         for x, a in zip(rest, o.args, strict=True)):
        return None
    inner = t.make(o.kind, tuple(t.product(x, o.line) for x in rest), line=o.line)
    return t.product([*small, inner], o.line)
