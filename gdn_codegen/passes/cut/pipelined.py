"""pipelined: splits sequences into parts that follow one another, so that kernels of two parts overlap. `partition` calls it.

A kernel over chunks has an instance for each chunk, and occupies the whole GPU. The walk after it has one for each sequence,
value head and block of columns, and leaves multiprocessors idle where these are few. So a call launches both kernels once for
each part of the sequences (`Kernel.by_part`): all for the first part, then all for the next one. The kernel over chunks of the
next part runs beside the walk of this one, since kernels may start before earlier ones have ended (`overlapping`). The walk
stores each carried state for its launch for the next part.

Example: KDA with the groups (@operand), (@output, @state) and two parts
    before:  chunks of both parts, walk over both
    after:   chunks of part 0, walk over part 0, chunks of part 1 (beside the walk over part 0), walk over part 1
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device, Groups
from ...ir.body import Body
from ...ir.core import Kernel, Loop, Program, loops, types
from ...ir.types import Tensor
from ...schedule.schedule import Schedule, ScheduleError
from ..common import with_tensors


def pipelined(p: Program, s: Schedule, device: Device) -> Program:
    """`p` whose kernels are launched once for each part.

    Raises ScheduleError on devices where a kernel cannot start before the one before it has ended. The kernels must be some over
    chunks, and after them one walk from the first chunk to the last.
    """
    if not isinstance(device, Groups) or not device.starts_early:
        raise ScheduleError(f"schedule {s.name}: partition='pipelined' on {device.name}; accepted: None, 'exact', 'decay'")
    *before, k = p.kernels
    carried = [c for x in loops(k.body) for c in x.carried]
    if not before or any(x.grid != "chunks" for x in before) or k.grid != "sequences" or k.step < 0 or not carried:
        raise ScheduleError(f"schedule {s.name}: partition='pipelined' needs kernels over chunks, and after them one walk from "
                            f"the first chunk to the last; {p.name} has kernels over {', '.join(x.grid for x in p.kernels)}"
                            + (", and walks back" if k.step < 0 else ""))
    b = Body({t.name: t for t in p.tensors})
    b.taken |= b.tensors.keys()
    starts = {c.name: Tensor(b.fresh(f"{c.name}_start"), "workspace", "part", "HV", c.type.dims) for c in carried}
    b.tensors |= {t.name: t for t in starts.values()}
    kernels = (*(replace(x, by_part=True) for x in before), _walk(b, k, starts))
    return with_tensors(replace(p, kernels=kernels, forgets=""), *starts.values())


def _walk(b: Body, k: Kernel, starts: dict[str, Tensor]) -> Kernel:
    """The walk over a part. It starts from the states after the part before, and stores the states for the next part. b: empty,
    for its body. starts: by the name of each carried state, the tensor with that state before each part."""
    b.taken |= set(types(k.body))
    follows = b.op("warm_up_length", name=b.fresh("follows"))  # negative but for a sequence's first part
    results: dict[str, str] = {}
    for x in k.body:
        if not isinstance(x, Loop):
            b.copy(x)
            continue
        carried = tuple(replace(c, init=b.op("load", follows, c.init, name=b.fresh(f"{c.name}_part"), tensor=starts[c.name].name))
                        for c in x.carried)
        b.stmts.append(replace(x, carried=carried))
        b.types |= {c.result: c.type for c in carried}
        results |= {c.name: c.result for c in carried}
    for name, result in results.items():
        b.op("store", result, tensor=starts[name].name, parts_ahead=1)
    return replace(k, grid="parts", by_part=True, body=b.finish())
