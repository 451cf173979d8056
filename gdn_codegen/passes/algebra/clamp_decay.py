"""clamp_decay: bounds the terms of running sums whose differences are exponents.

A decay is exp(G_i - G_j), where G is a running sum of log decays. A term of -inf makes the difference -inf - -inf, which is
NaN. A term of -1e30 leaves the sum no digits for later terms. So a term below FLOOR counts as FLOOR. exp(FLOOR) rounds to 0, so
a token that forgets everything still does, and the sum keeps its precision. All targets run this pass.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Op, Program
from ...ir.decays import exponents
from ..common import walk_body
from ..stage import takes

#: exp(FLOOR) is less than half of the smallest float32 above 0, so it rounds to 0.
FLOOR = -105.0


@takes("traced")
def clamp_decay(p: Program) -> Program:
    """`p` with the attribute `least=FLOOR` on running sums that occur in exponents.

    A sum that occurs only with a minus sign is negated, bounded and negated back, so its terms are bounded from above.
    """
    signs = exponents(p)
    if not signs:
        return p
    b = walk_body(p)
    for o in p.walk.body:
        assert isinstance(o, Op)
        if signs.get(o.out) == 1:
            b.op("cumsum", *o.args, name=o.out, line=o.line, **dict(o.attrs), least=FLOOR)
        elif signs.get(o.out) == -1:
            total = b.op("cumsum", b.op("neg", *o.args, line=o.line), line=o.line, **dict(o.attrs), least=FLOOR)
            b.op("neg", total, name=o.out, line=o.line)
        else:
            b.copy(o)
    return p.with_walk(replace(p.walk, body=b.finish()))
