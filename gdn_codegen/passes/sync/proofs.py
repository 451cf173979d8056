"""proofs: the passes that hold a program against the checkers of prove/. They change nothing but the stage."""
from __future__ import annotations

from ...devices import Device, Groups
from ...ir.core import Program
from ...prove import happens_before, rings, storage
from ..stage import takes


@takes("placed")
def check_storage(p: Program) -> Program:
    """`p` itself; raises OverwrittenError where a buffer holds another value than the one that an op reads."""
    return storage.check_storage(p)


@takes("synchronised", "checked", gives="checked")
def check_waits(p: Program, device: Device) -> Program:
    """`p` itself; raises RaceError where its waits do not order all accesses of cores that share no memory."""
    return happens_before.check_waits(p, device)


@takes("synchronised", "checked", gives="checked")
def check_rings(p: Program, device: Groups) -> Program:
    """`p` itself; raises RaceError where its mbarriers do not order the warp groups of a kernel."""
    return rings.check_rings(p, device)
