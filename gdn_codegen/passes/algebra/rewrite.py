"""rewrite: computes products with an inverse in the schedule's form. `forms` has one module for each form."""
from __future__ import annotations

from collections.abc import Callable

from ...ir.core import Loop, Op, Program
from ...schedule.schedule import Schedule, ScheduleError
from ..common import with_walk_body
from ..stage import takes
from .forms import gate_free, split, unit, wy

Form = Callable[[Program, Schedule, Loop], "tuple[Op, ...] | None"]
FORMS: dict[str, tuple[Form, str]] = {
    "gate-free": (gate_free.gate_free, gate_free.NEEDS), "wy": (wy.wy, wy.NEEDS), "split": (split.split, split.NEEDS),
    "unit": (unit.unit, unit.NEEDS)}


@takes("traced")
def rewrite(p: Program, s: Schedule) -> Program:
    """`p` in the schedule's form.

    If the form does not apply to the page, a generic schedule leaves `p` as it is, so that it serves any page; in the place of
    "split" it has "unit" then, which takes no further product. For the form "gate-free", and for schedules that name values, this
    is a ScheduleError.
    """
    if s.form == "direct":
        return p
    form, needs = FORMS[s.form]
    body = form(p, s, p.walk)
    if body is None and s.generic and s.form == "split":
        body = unit.unit(p, s, p.walk)
    if body is None and s.generic and s.form != "gate-free":
        return p
    if body is None:
        raise ScheduleError(f"schedule {s.name}: form {s.form} needs {needs}, which {p.name} does not have")
    return with_walk_body(p, body)
