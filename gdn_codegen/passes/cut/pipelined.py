"""pipelined: splits sequences into parts that follow one another, so that kernels of two parts overlap. `partition` calls it.

A kernel over chunks has an instance for each chunk, and occupies the whole GPU. The walk after it has one for each sequence,
value head and block of columns, and leaves multiprocessors idle where these are few. So a call launches both kernels once for
each part of the sequences (`Kernel.by_part`): all for the first part, then all for the next one. The kernel over chunks of the
next part runs beside the walk of this one, since kernels may start before earlier ones have ended (`overlapping`). The walk
stores its state for its launch for the next part.

Example: KDA with the groups (@operand), (@output, @state) and two parts
    before:  chunks of both parts, walk over both
    after:   chunks of part 0, walk over part 0, chunks of part 1 (beside the walk over part 0), walk over part 1
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device, Groups
from ...ir.core import Kernel, Loop, Program, Stmt, loops
from ...schedule.schedule import Schedule, ScheduleError
from .parts import Parts


def pipelined(p: Program, s: Schedule, device: Device) -> Program:
    """`p` whose kernels are launched once for each part.

    Raises ScheduleError on devices where a kernel cannot start before the one before it has ended. The kernels must be some over
    chunks, and after them one walk from the first chunk to the last that carries one state [K, V].
    """
    if not isinstance(device, Groups) or not device.starts_early:
        raise ScheduleError(f"schedule {s.name}: partition='pipelined' on {device.name}; accepted: None, 'exact', 'decay'")
    *before, k = p.kernels
    walks = list(loops(k.body))
    carried = [c.name for x in walks for c in x.carried]
    if not before or any(x.grid != "chunks" for x in before) or k.grid != "sequences" or k.step < 0 or len(carried) != 1:
        raise ScheduleError(f"schedule {s.name}: partition='pipelined' needs kernels over chunks, and after them one walk from "
                            f"the first chunk to the last that carries one state; {p.name} has kernels over "
                            f"{', '.join(x.grid for x in p.kernels)}, the last one with {len(carried)} states")
    parts = Parts(p, s, k, next(x for x in walks if x.carried), {}, side_by_side=False)
    kernels = (*(replace(x, by_part=True) for x in before), _walk(parts, k))
    return replace(p, kernels=kernels, tensors=(*p.tensors, parts.start), forgets="")


def _walk(parts: Parts, k: Kernel) -> Kernel:
    """The walk over a part. It starts from the state after the part before, and stores the state for the next part."""
    b = parts.body(k)
    follows = b.op("warm_up_length", name=b.fresh("follows"))  # negative but for a sequence's first part
    init = b.op("load", follows, parts.initial(b), name=b.fresh(f"{parts.c.name}_part"), tensor=parts.start.name)
    body: list[Stmt] = []
    for x in k.body:
        if isinstance(x, Loop):
            x = replace(x, carried=tuple(replace(c, init=init) for c in x.carried))
        elif x.out == parts.c.init:
            continue
        body.append(x)
    after = parts.body(k)
    after.types[parts.c.result] = parts.c.type
    after.op("store", parts.c.result, tensor=parts.start.name, parts_ahead=1)
    return replace(k, grid="parts", by_part=True, body=(*b.finish(), *body, *after.finish()))
