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
    products = {o.out for o in ops(loop) if is_plain(o) and o.args[0] in inverses}
    if not products:
        return None
    moved, b = columns(s, loop), walk_body(p)
    own = {o.args[0]: o.out for o in ops(loop)  # the page's own name of what is below an inverse's diagonal
           if o.kind == "strictly_lower" and o.args[0] in inverses and not o.attr("fill")}
    below: dict[str, str] = {}  # of each inverse
    through = Through(b, loop, moved)
    for o in ops(loop):
        if o.out in own.values() and o.args[0] in below:
            continue  # a product before it needed it
        if o.out not in products:
            through.copy(o)
            below |= {o.args[0]: o.out} if o.out in own.values() else {}
            continue
        y = product(b, moved[o.out][1] if o.out in moved else [o.args[1]], o.line)
        if o.args[0] not in below:
            name = own.get(o.args[0]) or b.fresh(f"{o.args[0]}_below")
            below[o.args[0]] = b.op("strictly_lower", o.args[0], line=inverses[o.args[0]].line, name=name)
        name = b.fresh(f"{o.out}_unscaled") if o.out in moved else o.out
        z = b.op("add", y, b.op("matmul", below[o.args[0]], y, line=o.line), line=o.line, name=name)
        if o.out in moved:
            through.multiplied(o, z)
    return b.finish()  # type: ignore[return-value]
