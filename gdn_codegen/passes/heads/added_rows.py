"""added_rows: computes running sums of several heads by additions of rows. For devices with cores (PTO).

The sums are `cumsum` with `by_head`, which `heads_by_columns` makes. Each becomes ops on a tile with a row for each token and a
column for each head. `synchronise` derives the waits between them, as between all ops, and the checkers see them.

All groups of rows are summed at once, row by row. Then each row adds the sum of the groups before its own: first the last rows of
the groups, one after another, and then all others, which read only last rows. So if x is zero after an entry, all later entries
are equal to it bit for bit.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...devices import Cores
from ...ir.body import Body
from ...ir.core import Op, Program
from ..algebra.vectorise import bounded
from ..common import rebuild_kernels
from ..stage import takes

GROUPS = 8  # a row of each, of eight float32 numbers, are the 256 bytes that a vector unit computes at a time


@takes("fed")
def added_rows(p: Program, device: Cores) -> Program:
    """`p` with additions of rows for running sums of several heads."""
    return rebuild_kernels(p, lambda k: lambda o, b: _sums(o, b, p.sizes["C"], device) if o.attr("by_head") else None)


def _sums(o: Op, b: Body, rows: int, device: Cores) -> str:
    """Puts the running sums `o` of a tile of `rows` rows into `b`, and returns the name of its value."""
    def op(kind: str, *args: str, name: str, **attrs: Any) -> str:
        return b.op(kind, *args, name=name, line=o.line, agent=o.agent, **attrs)

    def add(x: str, **places: int) -> str:
        return op("add_rows", x, name=b.fresh(f"{o.out}_part"), **places)

    # additions work in place, so they get a copy, which also has its rows in order where a caller's memory has columns in order
    x = op("move", o.args[0], name=b.fresh(f"{o.args[0]}_rows"), space=device.home[o.agent])
    x, group = bounded(replace(o, args=(x,)), b), rows // GROUPS
    for i in range(1, group):
        x = add(x, to=i, of=i - 1, count=GROUPS, step=group, width=1)
    for i in range(1, GROUPS):
        x = add(x, to=(i + 1) * group - 1, of=i * group - 1, count=1, step=1, width=1)
    if group > 1:
        x = add(x, to=group, of=group - 1, count=GROUPS - 1, step=group, width=group - 1)
    return op("transpose", x, name=o.out)
