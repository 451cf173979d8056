"""gate_free: inverts without the decay.

The decay D[i, j] = exp(x_i - x_j) is a conjugation by diag(exp(x)). So the inverse of I + B * D is the inverse of I + B, times
D entry by entry.
"""
from __future__ import annotations

from ....ir.core import Loop, Op, Program, types, uses
from ....schedule.schedule import Schedule
from ...common import walk_body
from ...match import matched
from .terms import factors, ops, product

DECAY = "exp(lower(x[:, None] - x[None, :], fill=-inf))"
NEEDS = f"unit_lower_inverse(strictly_lower(... * {DECAY}))"


def gate_free(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...] | None:
    """The walk's ops with the decay moved out of inverses. None if no inverted tile has a decay as a factor."""
    defs = {o.out: o for o in ops(loop)}
    count, tile = uses(loop.body), types(loop.body)
    b, decays = walk_body(p), {}
    for o in defs.values():  # tiles to be inverted that have a decay as a factor -> the decay
        found = matched("unit_lower_inverse(strictly_lower(x))", o, defs)
        if found is None or count[o.args[0]] > 1:
            continue
        of = factors(found["x"], defs)
        decay = next((f for f in of if matched(DECAY, defs.get(f), defs)), None)
        rest = [f for n, f in enumerate(of) if decay is None or n != of.index(decay)]
        if decay is not None and any(tile[f] == tile[o.out] for f in rest):  # another tile remains, which then gets the mask
            decays[o.args[0]] = decays[o.out] = decay
    if not decays:
        return None
    for o in ops(loop):
        decay = decays.get(o.out)
        if decay is None:
            b.copy(o)
        elif o.kind == "strictly_lower":
            rest = factors(o.args[0], defs)
            rest.remove(decay)
            b.op("strictly_lower", product(b, rest, o.line), line=o.line, name=o.out)
        else:
            free = b.op("unit_lower_inverse", o.args[0], line=o.line, name=b.fresh(f"{o.out}_free"))
            b.op("mul", free, decay, line=o.line, name=o.out)
    return b.finish()  # type: ignore[return-value]
