"""Two builds that make one call: the first one declines some calls, which the second one then computes.

Below the line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import torch

from .plan import Plan
from .tables import NativeCall


# --- copied from here on ---
def _launch_first(plan: Plan, first: Plan) -> None:
    """Let `plan` launch the kernels of `first` before its own. Both have the same arguments and results, and `first` declines
    calls by a counter (`Tables.declined`), which both share. The workspaces of `first` lie after all tensors of `plan`."""
    tables, others, place = plan.tables, first.tables, dict[int, int]()
    # neither copies what the other reads as it is, and strides have the same units
    read = [[x[1:] for x in p.expected] for p in (plan, first)]
    assert read[0] == read[1] and (plan.fits, tables.units) == (first.fits, others.units)
    assert not first.unread and not others.shared
    workspaces = range(others.place("workspaces").start, others.place("part_workspaces").stop)
    more: list[torch.Tensor] = []
    for n, name in enumerate(others.tensors):
        if n not in workspaces:
            place[n] = tables.tensors.index(name)
        elif name == others.declined:
            place[n] = tables.tensors.index(tables.declined)
        else:
            place[n] = len(tables.tensors) + len(more)
            more.append(first.kin[n - workspaces.start + len(others.outputs)])
    numbers = [list(tables.scalars).index(n) for n in others.scalars]
    launches = [(launch, [place[n] for n in tensors], [numbers[n] for n in used]) for launch, tensors, used in first.launches]
    plan.more, plan.launches = more, [*launches, *plan.launches]
    if plan.native is not None:
        sources = [*plan.native.sources, *(("workspace", x) for x in more)]
        plan.native = None if first.native is None else NativeCall(sources, plan.launches, plan.native.rows)
