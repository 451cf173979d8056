"""channels: tiles of a workspace between cores.

With two slots the iterations of a loop take them one after the other, so that who writes waits for the reads of the iteration
before the last, not of the last.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Program
from ..stage import takes


@takes("fed")
def channels(p: Program, slots: int) -> Program:
    """`p` with `slots` tiles in every workspace of index "block"."""
    return replace(p, tensors=tuple(replace(t, slots=slots) if t.index == "block" else t for t in p.tensors))
