"""split: separates the part of a product that depends on the state from the part that does not.

Take a product M @ (b * (y + z)) of a state-free M and a column b, where only z depends on the carried state. It becomes M' @ y
+ M' @ z with M' = M * b^T. y and z may have either sign. If the column goes through the inverse (`columns`), M' is the inverse of
the changed operand. Without a column a second product would gain nothing.
"""
from __future__ import annotations

from ....ir.body import Body
from ....ir.core import Line, Loop, Op, Program
from ....schedule.schedule import Schedule
from ...common import walk_body
from ...match import matches
from .columns import Through, columns
from .terms import ops, waiting

NEEDS = "a product of a state-free tile with b[:, None] * (y + z), z of the carried state"
#: Patterns, and whether y and whether z has a minus sign in them.
SUMS = (("m @ (b[:, None] * (y - z))", False, True), ("m @ (b[:, None] * (z - y))", True, False),
        ("m @ (b[:, None] * (y + z))", False, False))


def split(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...] | None:
    """The walk's ops with T @ (y - z), where only z depends on the state, as T @ y + T @ -z. None if the walk has no such
    product."""
    defs, b, waits = {o.out: o for o in ops(loop)}, walk_body(p), waiting(loop)
    found = {o.out: x for o in ops(loop) if (x := _sum(o, defs, waits))}
    if not found:
        return None
    moved = {n: x for n, x in columns(s, loop).items() if n in found}
    lows = {defs[defs[n].args[0]].args[0] for n in moved}  # of other products the column stays
    moved |= {n: x for n, x in columns(s, loop).items() if n in lows}
    through = Through(b, loop, moved)
    inverses = {defs[n].args[0] for n in moved if n in found}
    names: dict[str, str] = {}
    for o in ops(loop):
        if o.out in inverses:
            names[o.out] = b.op(o.kind, *o.args, line=o.line, name=b.fresh(f"{o.out}_scaled"))
        elif o.out in found:
            column, (y, minus_y), (z, minus_z) = found[o.out]
            weight = names.get(o.args[0], o.args[0])
            if weight == o.args[0]:
                weight = b.op("mul", weight, b.op("row", column, line=o.line), name=b.fresh(f"{weight}_scaled"), line=o.line)
            offset = b.op("matmul", weight, _signed(b, y, minus_y, o.line), name=b.fresh(f"{o.out}_offset"), line=o.line)
            more = b.op("matmul", weight, _signed(b, z, minus_z, o.line), line=o.line)
            name = b.fresh(f"{o.out}_unscaled") if o.out in moved else o.out
            both = b.op("add", offset, more, name=name, line=o.line)
            if o.out in moved:
                through.multiplied(o, both)
        else:
            through.copy(o)
    return b.finish()  # type: ignore[return-value]


def _sum(o: Op, defs: dict[str, Op], waits: set[str]) -> tuple[str, tuple[str, bool], tuple[str, bool]] | None:
    """The vector b, then y and z, each with whether it has a minus sign. None if `o` is no such product."""
    for text, minus_y, minus_z in SUMS:
        for x in matches(text, o, defs):
            if x["z"] in waits and not waits & {x["m"], x["y"], x["b"]}:
                return x["b"], (x["y"], minus_y), (x["z"], minus_z)
    return None


def _signed(b: Body, x: str, minus: bool, line: Line) -> str:
    return b.op("neg", x, line=line) if minus else x
