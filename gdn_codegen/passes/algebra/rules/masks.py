"""Rules about masks: they stand around products, and the mask of a decay is inside its exponential."""
from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ....ir.core import Op
from ..exponents import exponent, sums
from .rule import Rules

if TYPE_CHECKING:
    from ..terms import Terms

MASKS = Rules()
#: Of a mask in an exponent.
FILLED = (("fill", -inf),)

MASKS.rule("a mask of a factor", "lower(x) * y", "lower(x * y)", "mul")
MASKS.rule("a strict mask of a factor", "strictly_lower(x) * y", "strictly_lower(x * y)", "mul")
MASKS.rule("a masked exponential", "lower(exp(x))", "exp(lower(x, fill=-inf))", "lower")
MASKS.rule("a strictly masked exponential", "strictly_lower(exp(x))", "exp(strictly_lower(x, fill=-inf))", "strictly_lower")


@MASKS.written("a mask of a mask", "lower", "strictly_lower")
def _twice(t: Terms, o: Op) -> str | None:
    """Two masks with the same fill are the stricter one. So are the zeros of a mask and of exp(-inf), as the rules above move a
    mask of an exponential into it."""
    inner = t.defs.get(o.args[0])
    if inner is None or inner.kind not in ("lower", "strictly_lower") or (o.attr("fill") or 0.0) != (inner.attr("fill") or 0.0):
        return None
    kind = "lower" if o.kind == inner.kind == "lower" else "strictly_lower"
    return t.make(kind, inner.args, o.attrs, o.line)


@MASKS.written("a mask of decays", "lower", "strictly_lower")
def _decays(t: Terms, o: Op) -> str | None:
    """The mask of a product moves into the exponentials of its decays. Then a mask of the product that is no stricter is dropped.

    It is kept if another factor may be infinite above the diagonal, because 0 * inf is NaN.
    """
    factors = t.factors(o.args[0])
    bare = [f for f in factors if t.is_a("exp", f) and t.difference(t.defs[f].args[0])]
    masked = [t.make("exp", (t.make(_inner(t, o, f), t.defs[f].args, FILLED, o.line),), line=o.line) if f in bare else f
              for f in factors]
    goes = any(t.is_masked(f, o.kind) for f in masked) and all(t.is_masked(f) or t.in_range(f) for f in masked)
    if o.attrs or len(factors) == 1 or not (bare or goes):
        return None
    product = t.product(masked, o.line)
    return product if goes else t.make(o.kind, (product,), line=o.line)


def _inner(t: Terms, o: Op, f: str) -> str:
    """The mask inside the exponential f of a product that `o` masks. It is strict only where the diagonal is no decay: that of
    the difference of a sum without the token and one with it."""
    found = list(sums(t.defs, exponent(t.defs, f)))
    ahead = any(x.of == y.of and x.own < y.own for x in found for y in found if (x.at, y.at) == ("", "row"))
    return o.kind if ahead else "lower"
