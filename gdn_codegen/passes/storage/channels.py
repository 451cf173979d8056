"""channels: sets the slots of workspaces between cores. Only devices with cores (PTO) run it.

With two slots, iterations of a loop use them in turn. The writer then waits for the reads of the iteration before the last, not
for those of the last.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Program
from ..stage import takes


@takes("fed")
def channels(p: Program, slots: int) -> Program:
    """`p` with `slots` tiles in every workspace of index "block"."""
    return replace(p, tensors=tuple(replace(t, slots=slots) if t.index == "block" else t for t in p.tensors))
