"""overlapping: lets each kernel start before the one before it has ended. For TileLang on sm_90a (programmatic dependent launch).

Each kernel but the last allows the next one to start as soon as its own blocks have started. Each kernel but the first waits,
before it touches memory that earlier kernels use, until all earlier ones have ended and their writes are visible. So the next
kernel's launch, its barriers and the search for its sequence take no time of their own. An earlier kernel has ended only if the
one before it has, because all its threads wait for that. The first kernel of a call starts as usual, after all work before it.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...ir.core import Program
from ..stage import takes


@takes("checked")
def overlapping(p: Program, device: Groups) -> Program:
    """`p` with `launch="overlapping"` if it has several kernels and the device can start them early."""
    return replace(p, launch="overlapping") if device.starts_early and len(p.kernels) > 1 else p
