"""overlapping: lets each kernel start before the one before it has ended. For TileLang on sm_90a (programmatic dependent launch).

Each kernel but the last allows the next one to start as soon as its own blocks have started. Each kernel but the first waits,
before it touches memory that earlier kernels use, until all earlier ones have ended and their writes are visible. So the next
kernel's launch, its barriers and the search for its sequence take no time of their own. An earlier kernel has ended only if the
one before it has, because all its threads wait for that. The first kernel of a call starts as usual, after all work before it.

A walk has few blocks, which leave multiprocessors idle. A kernel over chunks after it that touches no memory of the walk runs
beside it ("beside"). Its blocks need not wait, since all blocks of the walk have waited for earlier kernels before they let it
start. One block waits nevertheless, so that the kernel ends after the walk: in a CUDA graph what comes next depends on this
kernel alone. The kernel after that starts as usual, after all earlier ones ("ended").

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Groups
from ...ir.core import Kernel, Program
from ..stage import takes


@takes("checked")
def overlapping(p: Program, device: Groups) -> Program:
    """`p` with `launch="overlapping"` if it has several kernels and the device can start them early."""
    if not device.starts_early or len(p.kernels) < 2:
        return p
    out = list(p.kernels[:2])
    for k in p.kernels[2:]:
        before = out[-1]
        start = "ended" if before.start == "beside" else "beside" if _beside(k, before) else ""
        out.append(replace(k, start=start))
    return replace(p, launch="overlapping", kernels=tuple(out))


def _beside(k: Kernel, before: Kernel) -> bool:
    """Whether `k`, over chunks, touches nothing that the walk `before` writes, and writes nothing that it reads."""
    if k.grid != "chunks" or before.grid == "chunks":
        return False
    (read, written), (read_before, written_before) = map(_touched, (k, before))
    return not (read | written) & written_before and not written & read_before


def _touched(k: Kernel) -> tuple[set[str], set[str]]:
    """The tensors that a kernel reads, and those that it writes."""
    named = [(o, o.attr("tensor")) for o in k.ops if o.attr("tensor")]
    return {n for o, n in named if o.kind != "store"}, {n for o, n in named if o.kind == "store"}
