"""boundaries: drops the boundaries of a traced program that the schedule does not use. All targets run it first.

A gradient has one after each input form of the contract, and one before the derivative of each form. A schedule that names a role
of NAMES gives forms, or their derivatives, kernels of their own. Then `cut` drops the boundaries. With other schedules the rules
of `canonical` see a form and its readers together.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable

from ...ir.core import Op, Program
from ...schedule.schedule import Schedule
from ..common import with_walk_body
from ..stage import takes

#: The roles that are defined by boundaries.
NAMES = {"@converted", "@normed", "@core", "@elementwise"}


@takes("traced")
def boundaries(p: Program, s: Schedule) -> Program:
    """`p`, without boundaries if no group of `s` has a role of NAMES."""
    ops = [o for o in p.walk.body if isinstance(o, Op)]
    if NAMES & {n for g in s.kernels for n in g} or not any(o.kind == "boundary" for o in ops):
        return p
    return with_walk_body(p, tuple(without_boundaries(ops, {p.forgets, *(c.next for c in p.walk.carried)})))


def without_boundaries(ops: Iterable[Op], kept: Collection[str] = ()) -> list[Op]:
    """The ops without boundaries. A value before a boundary gets the name of that after it, unless none of the ops computes it,
    or it is one of `kept`."""
    ops = list(ops)
    names: dict[str, str] = {}
    made = {o.out for o in ops if o.kind != "boundary"} - set(kept)
    for o in ops:
        if o.kind == "boundary":
            (a,) = o.args
            before, behind = (a, o.out) if a in made and a not in names else (o.out, names.get(a, a))
            names[before] = behind
    return [s.renamed(names).changed(out=names.get(s.out, s.out)) for s in ops if s.kind != "boundary"]
