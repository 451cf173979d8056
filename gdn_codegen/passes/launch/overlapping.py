"""overlapping: lets each kernel start before the one before it has ended. For TileLang on sm_90a (programmatic dependent launch).

Each kernel but the last allows the next one to start as soon as its own blocks have started. Each kernel but the first waits,
before it touches memory that earlier kernels use, until all earlier ones have ended and their writes are visible. So the next
kernel's launch, its barriers and the search for its sequence take no time of their own. An earlier kernel has ended only if the
one before it has, because threads of it wait for that. The first kernel of a call starts as usual, after all work before it.

If the last kernel walks whole sequences with several agents, each agent waits by itself ("agents"): before its first access to
memory that an earlier kernel of the call uses, and at its end if instances may have no chunk. So tiles that callers pass are
loaded while earlier kernels run. What was before the call has ended by then, as the first kernel starts after it.

A walk has few blocks, which leave multiprocessors idle. A kernel over chunks after it that touches no memory of the walk runs
beside it ("beside"), and so does one over parts after a walk over parts. Its blocks need not wait, since all blocks of the walk
have waited for earlier kernels before they let it start. One block waits nevertheless, so that the kernel ends after the walk:
the kernel after it, or in a CUDA graph what comes next, waits for this kernel alone.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...devices import Groups
from ...ir.core import Kernel, Loop, Op, Program, Stmt
from ..stage import takes

WRITES = "store", "clear_counter", "claim_item"


@takes("checked")
def overlapping(p: Program, device: Groups) -> Program:
    """`p` with `launch="overlapping"` if it has several kernels and the device can start them early."""
    if not device.starts_early or len(p.kernels) < 2:
        return p
    out = list(p.kernels[:2])
    for k in p.kernels[2:]:
        before = out[-1]
        out.append(replace(k, start="beside" if not before.start and _beside(p, k, before) else ""))
    return replace(p, launch="overlapping", kernels=(*out[:-1], _by_agents(p, out[-1], out[:-1])))


def _beside(p: Program, k: Kernel, before: Kernel) -> bool:
    """Whether `k`, over chunks or parts, touches nothing that `before`, a walk, writes, and writes nothing that it reads."""
    walks = {"chunks": ("parts", "sequences"), "parts": ("parts",)}
    return before.grid in walks.get(k.grid, ()) and not _shared(p, k, (before,))


def _shared(p: Program, k: Kernel, others: Sequence[Kernel]) -> set[str]:
    """The memory that `k` and one of the others touch, and one of both writes."""
    (read, written), *rest = (_touched(p, x) for x in (k, *others))
    return {n for r, w in rest for n in (read | written) & w | written & r}


def _touched(p: Program, k: Kernel) -> tuple[set[str], set[str]]:
    """The memory that a kernel reads, and that which it writes."""
    named = [(o, _memory(p, o)) for o in k.ops if o.attr("tensor")]
    return {n for o, n in named if o.kind not in WRITES}, {n for o, n in named if o.kind in WRITES}


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
