"""check_exponents: refuses pages in which an exponent of log decays can be positive. All targets run it.

exp(-G) of a running sum G of log decays is infinite after a few tokens that forget. `canonical` joins it with another
exponential where it can (`rules/decays.py`). What is left is an error of the page, which names its line. It would only show with
some inputs.
"""
from __future__ import annotations

from collections.abc import Iterator

from ...ir.core import Op, Program
from ...ir.ops import TypeRuleError
from ...ir.ranges import ANY, ranges
from ..stage import takes
from .exponents import Defs, Part, Sum, falls, left, parts, sums

#: exp of a larger number may be infinite in float32.
LARGEST = 88.0
#: Ops of which the exponent may be an operand, or a part of one.
CHOOSES = ("maximum", "minimum", "valid", "lower", "strictly_lower")
#: What a page may write.
ACCEPTED = ("Accepted: exponents that are never positive, such as exp(last(G)[None, :] - G); for products of two tokens "
            "decayed_product(q, k, G), or lower((q * exp(G)) @ (k * exp(-G)).T); or a bound, as in exp(-maximum(G, -80.0))")
Terms = list[Sum]


@takes("traced")
def check_exponents(p: Program) -> Program:
    """`p` as it is. TypeRuleError for an exponent that can be positive though no log decay is.

    A running sum is one of log decays if it occurs with a plus sign in an exponent that does not have its opposite, too. If it
    only occurs so with a minus sign, its opposite is one of log decays.
    """
    ops = [o for o in p.walk.body if isinstance(o, Op)]
    defs, known = {o.out: o for o in ops if o.out}, ranges(ops)
    gates = {o.args[0] for o in ops if o.kind == "cumsum"}
    exps = [(o, *x) for o in ops if o.kind == "exp" and known.get(o.args[0], ANY)[1] > LARGEST
            for x in _exponents(defs, gates, o.args[0])]
    products = [o for o in ops if o.kind == "decayed_product"]
    signs = _signs([*(x for _, x, _ in exps), *(list(sums(defs, parts(defs, o.args[2]))) for o in products)])
    for o, terms, mask in [*exps, *((o, *_between_tokens(defs, gates, o)) for o in products)]:
        for of in dict.fromkeys(s.of for s in terms):
            mine = [s for s in terms if s.of == of]
            if not any(_never_positive(mine, sign, mask) for sign in signs.get(of, (1, -1))):
                raise TypeRuleError(f"{p.name}, {o.line} ({dict(p.source).get(o.line.number, '')}): got exp of a sum that grows "
                                    f"where the running sum of {of[0]} falls; it overflows if tokens forget much. {ACCEPTED}")
    return p


def _exponents(defs: Defs, gates: set[str], a: str, of: Part | None = None, mask: str = "") -> Iterator[tuple[Terms, str]]:
    """The running sums of the exponent `a`, with their signs, and the mask inside of exp; then those of what `a` may be instead.
    gates: the terms of running sums. One that occurs by itself is taken for a sum, too, which no other has in it. of: the term
    of a sum that `a` is a part of."""
    o = defs.get(a)
    if o is not None and o.kind in ("lower", "strictly_lower"):
        a, mask = o.args[0], o.kind
    terms = left(parts(defs, a, of))
    yield [*sums(defs, terms), *(Sum((x.value, *x.by), "gate", 0, x.times) for x in terms if x.value in gates)], mask
    for x in terms:
        o = defs.get(x.value)
        for inner in o.args if o is not None and o.kind in CHOOSES else ():
            yield from _exponents(defs, gates, inner, x, mask)


def _between_tokens(defs: Defs, gates: set[str], o: Op) -> tuple[Terms, str]:
    """The exponent of a `decayed_product` as `_exponents` gives it: sums at the row's token, less those at the column's."""
    later, earlier = (next(_exponents(defs, gates, a))[0] for a in (o.args[-1], o.args[2]))
    return ([*later, *(s._replace(times=-s.times, at=s.at or "row") for s in earlier)],
            "strictly_lower" if o.args[3:] else "lower")


def _signs(exponents: list[Terms]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """With which sign running sums are such of log decays. Both, if nothing tells."""
    found: dict[tuple[str, ...], set[int]] = {}
    for terms in exponents:
        for s in terms:
            alone = s.at != "gate" and not any(s.of == x.of and s.sign != x.sign for x in terms)
            found.setdefault(s.of, set()).update({s.sign} if alone else ())
    return {of: (-1,) if x == {-1} else (1, -1) if not x else (1,) for of, x in found.items()}


def _never_positive(terms: Terms, sign: int, mask: str) -> bool:
    """Whether an exponent is at most 0: each sum that it subtracts is a part of another one. sign: -1 if the opposites of the
    sums are log decays."""
    added = [s for s in terms if s.sign == sign]
    for s in (s for s in terms if s.sign != sign):
        whole = next((x for x in added if falls(x, s, mask)), None)
        if whole is None:
            return False
        added.remove(whole)
    return True
