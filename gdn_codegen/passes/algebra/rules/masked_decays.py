"""A rule about products of tokens: (q * exp(G)) @ (k * exp(-G)).T, masked, is a `decayed_product`, which cannot overflow."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ....ir.core import Line, Op
from ..exponents import Part, exponent, left, sums
from .decays import total
from .rule import Rules

if TYPE_CHECKING:
    from ..terms import Terms

MASKED_DECAYS = Rules()


@MASKED_DECAYS.written("a masked product of decayed tokens", "lower", "strictly_lower")
def _decayed(t: Terms, o: Op) -> str | None:
    """(a * exp(x)) @ (b * exp(-x)).T is the decayed product of a and b by x. Where x is a running sum without the token, and the
    other one with it, the mask has to be strict."""
    factors = t.factors(o.args[0])
    for n, f in enumerate(factors):
        m = t.defs.get(f)
        if o.attrs or m is None or m.kind != "matmul" or m.attrs != (("tb", True),) or len(m.args) != 2:
            continue
        (x, up), (y, down) = (_apart(t, a, o.line) for a in m.args)
        decays = _decays(t, left(up), left(down), o.kind, o.line)
        if not x or not y or any(t.type[s].dims != t.type[x].dims for s in decays) or not decays:
            continue
        product = t.product([*factors[:n], t.make("decayed_product", (x, y, *decays), line=o.line), *factors[n + 1:]], o.line)
        rest = factors[:n] + factors[n + 1:]
        bare = (o.kind == "lower" or len(decays) > 1) and all(t.is_masked(g) or t.in_range(g) for g in rest)
        return product if bare else t.make(o.kind, (product,), line=o.line)
    return None


def _apart(t: Terms, a: str, line: Line) -> tuple[str, list[Part]]:
    """The factors of a tile without exponentials, as a product, and the terms of the exponents. "" where no tile is left."""
    factors = t.factors(a)
    of = [exponent(t.defs, f) for f in factors]
    kept = [f for f, x in zip(factors, of, strict=True) if not any(sums(t.defs, x))]
    tile = any(t.type[f].dims == t.type[a].dims for f in kept)
    return t.product(kept, line) if tile else "", [y for f, x in zip(factors, of, strict=True) if f not in kept for y in x]


def _decays(t: Terms, up: list[Part], down: list[Part], mask: str, line: Line) -> tuple[str, ...]:
    """The last operands of the decayed product of tokens that exponentials of `up` and of `down` scale. () if the exponents are
    no differences between two tokens."""
    rows = [x for x in (*up, *down) if x.view == "row"]
    up, down = ([x for x in side if x.view != "row"] for side in (up, down))
    own, others = list(sums(t.defs, up)), list(sums(t.defs, down))
    if left(rows) or not own or not others:
        return ()
    both = total(t, [x.opposite() for x in down], line)
    if sorted(up) == sorted(x.opposite() for x in down):
        return (both,)
    pair = len(up) == len(down) == 1 and own[0]._replace(own=1) == others[0]._replace(times=-others[0].times)
    return (both, total(t, up, line)) if pair and mask == "strictly_lower" and not own[0].own else ()
