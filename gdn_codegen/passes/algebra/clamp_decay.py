"""clamp_decay: bounds the terms of running sums whose differences are exponents.

A decay is exp(G_i - G_j), where G is a running sum of log decays. A term of -inf makes the difference -inf - -inf, which is
NaN. A term of -1e30 leaves the sum no digits for later terms. So a term below FLOOR counts as FLOOR. exp(FLOOR) rounds to 0, so
a token that forgets everything still does, and the sum keeps its precision. All targets run this pass. Terms that a page or an
input form bounds by FLOOR or more stay as they are.

The sum of a vector without the token itself becomes the difference of the sum and the term, bounded alike.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Op, Program
from ...ir.decays import exponents
from ...ir.ranges import ANY, Range, ranges
from ..common import walk_body
from ..stage import takes

#: exp(FLOOR) is less than half of the smallest float32 above 0, so it rounds to 0.
FLOOR = -105.0


@takes("traced")
def clamp_decay(p: Program) -> Program:
    """`p` with the attribute `least=FLOOR` on running sums that occur in exponents."""
    ops = [o for o in p.walk.body if isinstance(o, Op)]
    known, terms = ranges(ops), {o.out: o.args[0] for o in ops if o.kind == "cumsum"}
    signs = {y: sign for y, sign in exponents(p).items() if not _in_bounds(known.get(terms[y], ANY), sign)}
    sums = [o for o in ops if o.kind == "cumsum"]
    if not signs and not any(o.attr("exclusive") for o in sums):
        return p
    b, done = walk_body(p), set[str]()
    for o in ops:
        if o.kind == "cumsum" and o.attr("exclusive") and b.types[o.args[0]].rank == 1:
            whole = next((x for x in sums if x.args == o.args and not x.attrs and x.out not in done), None)
            if whole is not None:  # it may come later
                _sum(whole, b, signs.get(o.out, 0))
                done.add(whole.out)
            _before(o, b, signs.get(o.out, 0))
        elif o.kind == "cumsum" and o.out not in done:
            _sum(o, b, signs.get(o.out, 0))
            done.add(o.out)
        elif o.kind != "cumsum":
            b.copy(o)
    return p.with_walk(replace(p.walk, body=b.finish()))


def _in_bounds(term: Range, sign: int) -> bool:
    """Whether terms of this range have the bound already. sign: that of their sum in exponents."""
    return term[0] >= FLOOR if sign > 0 else term[1] <= -FLOOR


def _sum(o: Op, b: Body, sign: int, name: str | None = None) -> str:
    """Append a running sum with bounded terms. sign: with which it occurs in exponents, 0 if in none. One that occurs only with a
    minus sign is negated, bounded and negated back, so its terms are bounded from above. name: of the value, if not that of o."""
    name, attrs = o.out if name is None else name, dict(o.attrs)
    if not sign:
        return b.op("cumsum", *o.args, name=name, line=o.line, **attrs)
    if sign > 0:
        return b.op("cumsum", *o.args, name=name, line=o.line, **attrs, least=FLOOR)
    total = b.op("cumsum", b.op("neg", *o.args, line=o.line), line=o.line, **attrs, least=FLOOR)
    return b.op("neg", total, name=name, line=o.line)


def _before(o: Op, b: Body, sign: int) -> None:
    """Append the running sum of a vector without the token itself. sign: as for `_sum`."""
    x = o.args[0]
    total = _sum(o.with_attrs(exclusive=None), b, sign, "")
    if sign > 0:
        x = b.op("maximum", x, b.op("const", value=FLOOR), line=o.line)
    elif sign < 0:
        x = b.op("minimum", x, b.op("const", value=-FLOOR), line=o.line)
    b.op("sub", total, x, name=o.out, line=o.line)
