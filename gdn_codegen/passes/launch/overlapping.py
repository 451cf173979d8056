"""overlapping: lets each kernel start before the one before it has ended. For TileLang on sm_90a (programmatic dependent launch).

Each launch but the last allows the next one to start as soon as its own blocks have started. Each but the first waits, before it
touches memory that earlier ones use, until these have ended and their writes are visible. So the next kernel's launch, its
barriers and the search for its sequence take no time of their own. An earlier kernel has ended only if the one before it has,
because threads of it wait for that. The first launch of a call starts, or waits first, after all work before it.

How a kernel waits is its `start`:
- "": all its blocks wait first, and then let the next kernel start. So when a block of the next one starts, all kernels before
  this one have ended.
- "agents": the last kernel, if it walks whole sequences with several agents. Each agent waits by itself, before its first access
  to memory that an earlier kernel of the call uses, and at its end if instances may have no chunk. So tiles that callers pass
  are loaded while earlier kernels run. What was before the call has ended by then, as the first kernel starts after it.
- "beside": its blocks do not wait for kernels that may still run, since they share no memory with these. Or they do only where
  a number is negative, before they read what such a kernel wrote for them: a walk of a part that starts from summaries. The
  first block waits in any case, so that the kernel ends after those before it: the kernel after it, or in a CUDA graph what
  comes next, waits for this kernel alone.
- "next_part": the first kernel of a part (`pipelined`). Its blocks do not wait for the walk of the part before: both use only
  tensors with tiles of chunks, and each the tiles of its own part. At its end the first block waits, so that the kernel ends
  after that walk. In the first part all blocks wait first.
- "unless_summed": as "beside" in a call with summaries. In a call without them other kernels come before it, and all its blocks
  wait first.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...devices import Groups
from ...ir.core import Kernel, Loop, Op, Program, Stmt, walk
from ..stage import takes

WRITES = "store", "clear_counter", "claim_item", "set_if_negative", "choose_parts"
#: The indices of tensors with a tile for each chunk.
BY_CHUNK = "token", "slot"
#: The grids of kernels that leave multiprocessors idle, by the grid of a kernel that may run beside them.
IDLE = {"chunks": ("parts", "sequences"), "parts": ("parts",)}


@takes("checked")
def overlapping(p: Program, device: Groups) -> Program:
    """`p` with `launch="overlapping"` if it has several kernels and the device can start them early."""
    if not device.starts_early or len(p.kernels) < 2:
        return p
    if p.kernels[0].by_part:
        first, *_, last = p.kernels
        start = "next_part" if all(p.tensor(n).index in BY_CHUNK for n in _shared(p, first, [last])) else ""
        return replace(p, launch="overlapping", kernels=(replace(first, start=start), *p.kernels[1:]))
    out = list(p.kernels[:1])
    for k in p.kernels[1:]:
        out.append(_early(p, k, out))
    return replace(p, launch="overlapping", kernels=(*out[:-1], _by_agents(p, out[-1], out[:-1])))


def _early(p: Program, k: Kernel, before: Sequence[Kernel]) -> Kernel:
    """`k`, whose blocks wait for those of the kernels before it that may still run only where they have to."""
    if len(before) < 2 or before[-1].grid not in IDLE.get(k.grid, ()) or all(map(_is_summary, before)):
        return k
    shared = _shared(p, k, _running(before, summed=True))
    if shared:
        guarded = None if k.places in shared else _guarded(p, k, shared)
        if guarded is None:
            return k
        k = guarded
    needed = _shared(p, k, _running(before, summed=False)) and not _is_summary(k)
    return replace(k, start="unless_summed" if needed else "beside")


def _running(kernels: Sequence[Kernel], summed: bool) -> Sequence[Kernel]:
    """Those of `kernels`, all of a call with or without summaries, that may run when blocks of the next one start: the last one
    whose blocks wait first, and those after it. The first kernel waits for none, but what was before it has ended."""
    of_call = [k for k in kernels if summed or not _is_summary(k)]
    waits = ("",) if summed else ("", "unless_summed")
    return of_call[max(n for n, k in enumerate(of_call) if k.start in waits):]


def _is_summary(k: Kernel) -> bool:
    """Whether calls without summaries leave `k` out."""
    return any(o.kind == "return_unless_negative" for o in k.ops)


def _guarded(p: Program, k: Kernel, shared: set[str]) -> Kernel | None:
    """`k` with a wait where a number is negative, before it touches the memory `shared`. None if it also does so otherwise: all
    accesses have to come after an op that ends the instance unless that number is negative, or be loads under it."""
    of = {s.kind: n for n, s in enumerate(k.body) if isinstance(s, Op) and s.kind in ("return_unless_negative", "claim_part")}
    ends = of.get("return_unless_negative", len(k.body))
    early = [o for o in walk(k.body[:ends]) if _memory(p, o) in shared]
    numbers = {o.args[0] if o.kind == "load" and o.args else "" for o in early}
    if ends < len(k.body):
        end = k.body[ends]
        assert isinstance(end, Op)
        numbers.add(end.args[0])
    made = {s.out: n for n, s in enumerate(k.body) if isinstance(s, Op) and s.out}
    if len(numbers) != 1 or not numbers <= made.keys() or (early and ends < len(k.body)):
        return None
    (number,) = numbers
    at = 1 + max(made[number], ends if ends < len(k.body) else 0, of.get("claim_part", 0))
    by = k.body[made[number]]
    assert isinstance(by, Op)
    return replace(k, body=(*k.body[:at], Op("await_kernels", "", (number,), agent=by.agent), *k.body[at:]))


def _shared(p: Program, k: Kernel, others: Sequence[Kernel]) -> set[str]:
    """The memory that `k` and one of the others touch, and one of both writes."""
    (read, written), *rest = (_touched(p, x) for x in (k, *others))
    return {n for r, w in rest for n in (read | written) & w | written & r}


def _touched(p: Program, k: Kernel) -> tuple[set[str], set[str]]:
    """The memory that a kernel reads, and that which it writes."""
    named = [(o, _memory(p, o)) for o in k.ops if o.attr("tensor")]
    return {k.places, *(n for o, n in named if o.kind not in WRITES)} - {""}, {n for o, n in named if o.kind in WRITES}


def _memory(p: Program, o: Op) -> str:
    """The name of the tensor whose memory `o` touches, "" if none."""
    name = o.attr("tensor") or ""
    return name and (p.tensor(name).over or name)


def _by_agents(p: Program, k: Kernel, before: Sequence[Kernel]) -> Kernel:
    """The last kernel `k`, whose agents wait by themselves if it walks whole sequences and waits at all. Numbers that all agents
    read before their own ops need the wait of all threads."""
    shared = _shared(p, k, before)
    waiting = {o.agent for o in k.ops if _memory(p, o) in shared}
    numbers = any(isinstance(o, Op) and o.type is not None and o.type.rank == 0 and o.kind != "claim_item"
                  and _memory(p, o) in shared for s in k.body for o in (s.body if isinstance(s, Loop) else (s,)))
    if not k.agents or k.grid != "sequences" or k.start or numbers or not waiting:
        return k

    def awaits(agent: str) -> Op:
        return Op("await_kernels", "", agent=agent)

    def waited(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body with a wait before each agent's first access, in each loop anew."""
        out: list[Stmt] = []
        left = set(waiting)
        for s in body:
            if isinstance(s, Loop):
                s = replace(s, body=waited(s.body))
            elif s.agent in left and _memory(p, s) in shared:
                left.remove(s.agent)
                out.append(awaits(s.agent))
            out.append(s)
        return tuple(out)

    counted = any(o.kind == "claim_item" for o in k.ops)  # then each block waits before it claims an item
    return replace(k, start="agents", body=(*waited(k.body), *(() if counted else map(awaits, sorted(waiting)))))
