"""unit: computes the ones on an inverse's diagonal as a sum.

An inverse M has ones on its diagonal. M @ X becomes X + M' @ X, where M' is M below the diagonal. X is rounded to 16 bit as an
operand of a product, but not as a term of a sum. A column goes through the inverse (`columns`).
"""
from __future__ import annotations

from ....ir.core import Loop, Op, Program
from ....schedule.schedule import Schedule
from ...common import walk_body
from .columns import Through, columns
from .terms import is_plain, ops, product

NEEDS = "a product of a unit_lower_inverse"


def unit(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...] | None:
    """The walk's ops with T @ y as y + strictly_lower(T) @ y. None if no product has an inverse as its left operand."""
    inverses = {o.out: o for o in ops(loop) if o.kind == "unit_lower_inverse"}
    moved, b = columns(s, loop), walk_body(p)
    stored = {o.args[0]: o.out for o in ops(loop) if o.kind == "strictly_lower" and o.args[0] in inverses}
    below: dict[str, str] = {}  # of each inverse
    through = Through(b, loop, moved)
    for o in ops(loop):
        if o.out in stored.values() and o.args[0] in below:
            continue
        if not is_plain(o) or o.args[0] not in inverses:
            through.copy(o)
            below |= {o.args[0]: o.out} if o.out in stored.values() else {}
            continue
        y = product(b, moved[o.out][1] if o.out in moved else [o.args[1]], o.line)
        if o.args[0] not in below:
            name = stored.get(o.args[0]) or b.fresh(f"{o.args[0]}_below")
            below[o.args[0]] = b.op("strictly_lower", o.args[0], line=inverses[o.args[0]].line, name=name)
        name = b.fresh(f"{o.out}_unscaled") if o.out in moved else o.out
        z = b.op("add", y, b.op("matmul", below[o.args[0]], y, line=o.line), line=o.line, name=name)
        if o.out in moved:
            through.multiplied(o, z)
    if not below:
        return None
    return b.finish()  # type: ignore[return-value]
