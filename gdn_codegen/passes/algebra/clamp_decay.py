"""clamp_decay: no term of a sum that exp takes is below what float32 can hold.

Decay is exp of a difference of running sums, G_i - G_j. A term of -inf makes that -inf - -inf, which is NaN, and one of -1e30
leaves no digits to those after it. So terms of such sums count as FLOOR where they are less: a token that forgets all still
does, exp of it being 0, and the sum keeps what digits it can.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Op, Program
from ...ir.decays import exponents
from ..common import walk_body
from ..stage import takes

#: Its exp is less than half of the least float32 above 0.
FLOOR = -105.0


@takes("traced")
def clamp_decay(p: Program) -> Program:
    """`p` with the terms of sums that exp takes bounded: from above where it takes a sum with a minus sign alone."""
    signs = exponents(p)
    if not signs:
        return p
    b = walk_body(p)
    for o in p.walk.body:
        assert isinstance(o, Op)
        if signs.get(o.out) == 1:
            b.op("cumsum", *o.args, name=o.out, line=o.line, least=FLOOR)
        elif signs.get(o.out) == -1:
            total = b.op("cumsum", b.op("neg", *o.args, line=o.line), line=o.line, least=FLOOR)
            b.op("neg", total, name=o.out, line=o.line)
        else:
            b.copy(o)
    return p.with_walk(replace(p.walk, body=b.finish()))
