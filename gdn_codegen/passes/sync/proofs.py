"""proofs: passes that run the checkers of prove/. They return the program itself; the last one sets its stage."""
from __future__ import annotations

from ...devices import Cores, Device, Groups
from ...ir.core import Program
from ...prove import copies, happens_before, read_back, rings, storage
from ..stage import takes


@takes("placed")
def check_storage(p: Program) -> Program:
    """`p` itself. Raises OverwrittenError if a buffer may hold another value than the one that an op reads from it."""
    return storage.check_storage(p)


@takes("synchronised", "checked", gives="checked")
def check_waits(p: Program, device: Device) -> Program:
    """`p` itself. Raises RaceError if its waits do not order all accesses of cores that share no memory, or if no barrier orders
    the threads of one agent that read global memory which they have written, or no wait their asynchronous copies."""
    if isinstance(device, Cores):
        return happens_before.check_waits(p, device)
    return read_back.check_read_back(copies.check_copies(p))


@takes("synchronised", "checked", gives="checked")
def check_rings(p: Program, device: Groups) -> Program:
    """`p` itself. Raises RaceError if its mbarriers do not order the warp groups of a kernel, or if a kernel of one agent does
    not wait for its asynchronous copies."""
    return rings.check_rings(copies.check_copies(p), device)
