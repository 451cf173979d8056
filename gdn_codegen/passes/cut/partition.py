"""partition: divides a sequence into parts that run side by side. For devices with thread blocks; it refuses devices with
cores.

The state after a part is affine in the state before it: S' = M S + N. Kernels that walk sequences become kernels over parts.
Three kernels come before the first of them (`summaries`). All are made from its walk:
- N: the walk for the state alone, from a zero state. It stores the last state. The first part of a sequence starts from the
  initial state. If the part's walk has a warm-up, N has it too, and is then the state after the part itself.
- M: the same, without terms that do not depend on S, with K columns in place of V, from the identity. Where S only has
  its rows scaled, M is the vector of these numbers, in float32: a product would round the state once for each part.
- The fold: S <- M S + N over the parts before this one. The result is the state from which the part's walk starts.

"exact": the walk of a part begins at its first chunk, with the state of the fold. "decay": the walk has a warm-up. It starts
some chunks before the part, from a zero state, and stores nothing for them. The op `warm_up_length` finds how many chunks the
gates need to forget the state before. If the warm-up would take longer than the summaries, the part starts from the fold.
Summaries are computed only where a part needs them. In a call without kernels for summaries each warm-up may reach back to the
sequence's start. In a call with them a head that forgets slowly starts all its parts from the fold: N of a part near the start
would have the warm-up too, and all later parts would wait for it.

The warm-up length tells the two cases apart. It is a number of chunks, or -1 for the state of the fold. The summary N of a part
is needed if the next part's length is -1. M is needed if the part's own length is -1 too.

"short": the walk has a warm-up of at most SHORT tokens, and there are no summaries. Where the gates of some head need a longer
one, all walks end at once: a kernel before them sets a counter. The build declines the call, and another one with `if_declined`
computes it.

"pipelined": the parts follow one another (`pipelined`).

A final state that overwrites the initial one is stored by a kernel of its own, after the walks. Otherwise the last part could
overwrite the initial state before another part has read it.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...devices import Cores, Device, Groups
from ...devices.part_cost import of_chunks
from ...ir.core import Kernel, Loop, Op, Program, loops
from ...schedule.schedule import Schedule, ScheduleError
from ..stage import takes
from .parts import Parts
from .pipelined import pipelined
from .summaries import SUMMARIES, declines

#: log(1 / f), where f is the fraction of the state that may be lost at a part's start: 1/32 of the dtype's rounding.
BOUND = {"float16": 16 * 0.6931471805599453, "bfloat16": 13 * 0.6931471805599453, "float32": 29 * 0.6931471805599453}

#: The most tokens of a short warm-up.
SHORT = 128


@takes("cut")
def partition(p: Program, s: Schedule, device: Device, dtype: str) -> Program:
    """`p` in parts, or `p` itself if the schedule has no partition.

    Raises ScheduleError on a device with cores or without a model of the cost of parts, and, but for "pipelined", for pages
    without exactly one state [K, V] that is affine in the state before.
    """
    if not s.partition:
        return p
    if isinstance(device, Cores) or device.part_cost is None:
        raise ScheduleError(f"schedule {s.name}: partition={s.partition!r}; accepted for {device.target} is None")
    if s.partition == "pipelined":
        return pipelined(p, s, device)
    short = s.partition == "short"
    if short and not isinstance(device, Groups):
        raise ScheduleError(f"schedule {s.name}: partition='short' on {device.name}; accepted: None, 'exact', 'decay'")
    first = next((k for k in p.kernels if k.grid == "sequences"), None)
    walks = [x for k in p.kernels if k.grid == "sequences" for x in loops(k.body)]
    states = {c.name for x in walks for c in x.carried}  # all walks start from the summaries of the first walk
    if first is None or len(states) != 1:
        raise ScheduleError(f"schedule {s.name}: partition={s.partition!r} needs one carried state; {p.name} has {len(states)}")
    forgets = begins(f"{p.forgets}_ws", device, dtype, p.sizes["C"], walks[0].step, short) if p.forgets else {}
    parts = Parts(p, s, first, walks[0], forgets, isinstance(device, Groups) and device.starts_early)
    longest_first = s.longest_first and device.splits_warm_up
    kernels: list[Kernel] = []
    for k in p.kernels:
        if k is first:
            kernels += [kernel(parts) for kernel in ((declines,) if short else SUMMARIES)]
        kernels += _walk(parts, k, longest_first) if k.grid == "sequences" else [k]
    if parts.declined:
        clear = Op("clear_counter", "", (), (("tensor", parts.declined.name),))
        kernels[0] = replace(kernels[0], body=(clear, *kernels[0].body))
    return replace(p, kernels=tuple(kernels), tensors=(*p.tensors, *parts.made), forgets="")


def begins(tensor: str, device: Device, dtype: str, chunk: int, step: int, short: bool = False) -> dict[str, Any]:
    """Attributes of `warm_up_length` for parts of a walk with this step: the tensor that it sums, the bound to reach, and the
    longest warm-up of a call with summaries: in parts, and in chunks more than a part; of short ones in chunks."""
    assert device.part_cost is not None
    longest = {"longest": longest_short(chunk)} if short else {
        "most": longest_warm_up(device), "limit": of_chunks(device.part_cost, chunk).warm_up_limit}
    return {"tensor": tensor, "bound": round(BOUND[dtype], 6), **longest, **({"step": step} if step < 0 else {})}


def longest_short(chunk: int) -> int:
    """The longest of short warm-ups, in chunks of `chunk` tokens."""
    return max(1, SHORT // chunk)


def longest_warm_up(device: Device) -> int:
    """The longest warm-up of a call with summaries, in lengths of a part. It takes as long as the two that it saves."""
    assert device.part_cost is not None
    return round(2 * device.part_cost.summary_us / device.part_cost.chunk_us)


def _walk(parts: Parts, k: Kernel, longest_first: bool) -> list[Kernel]:
    """The walk over a part's chunks, and kernels that copy a final state over the initial one."""
    b = parts.body(k)
    if parts.declined:
        b.op("return_if_set", tensor=parts.declined.name)
        warm_up = b.op("warm_up_length", name=b.fresh("warm_up"), **parts.forgets)
    elif parts.forgets and not parts.side_by_side:
        # without summaries, no kernel before this one has computed the length
        warm_up = b.op("warm_up_length", name=b.fresh("warm_up"), **parts.forgets, kept=parts.warm_up.name)
    else:
        warm_up = parts.length(b)
    if longest_first and parts.forgets:
        b.op("claim_part", warm_up)
    init = before = parts.initial(b)
    if not parts.declined:
        init = b.op("load", warm_up, before, name=b.fresh(f"{parts.c.name}_part"), tensor=parts.start.name)
    body, moves = [], []
    for x in k.body:
        if isinstance(x, Loop):
            x = replace(x, carried=tuple(replace(c, init=init) for c in x.carried), warm_up=warm_up if parts.forgets else "")
        elif x.out == parts.c.init:
            continue
        elif x.attr("tensor") in parts.over:
            last = parts.body(k)
            if parts.declined:
                last.op("return_if_set", tensor=parts.declined.name)
            last.op("store", last.op("load", name=parts.c.result, tensor=parts.end.name), **dict(x.attrs))
            moves.append(Kernel(parts.end.name, "sequences", last.finish(), **parts.blocks))  # type: ignore[arg-type]
            x = replace(x, attrs=()).with_attrs(tensor=parts.end.name)
        body.append(x)
    return [replace(k, grid="parts", body=(*b.finish(), *body)), *moves]
