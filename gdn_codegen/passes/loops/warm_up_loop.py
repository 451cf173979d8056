"""warm_up_loop: makes a loop of its own of the warm-up of a walk. For Triton, and for Hopper's warp groups.

Before it a walk is one loop, in which ops with `own_part` do nothing during a warm-up (pass `warm_up`). The pass makes two loops
of it: one over the chunks before the part, without these ops, and one over the part's own chunks, with all ops. The first loop
hands its carried values to the second one. The pass runs after `synchronise`, because buffers and barriers are derived for one
body, and both loops use them alike. It runs before the proofs, so that they are about the loops that are emitted.

The chunks before a part have all their rows, but for the first chunk of a walk back, which is the sequence's last. So copies
of the first loop need no barrier for a ragged tail in a walk from the first chunk.

An agent may have the same ops in both loops, as one that inverts a tile has. It runs them as one loop (`Kernel.one_loop`).
Smaller code made such kernels faster, likely because multiprocessors share an instruction cache (docs/performance.md).
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Program, loops, map_loops, repeats
from ...ir.ops import OWN_PART
from ..stage import takes


@takes("synchronised")
def warm_up_loop(p: Program) -> Program:
    """`p` with two loops for each walk that has ops with `own_part`. No op of the result has the attribute."""
    return p.map_kernels(_with_two_loops)


def _with_two_loops(k: Kernel) -> Kernel:
    """The kernel with a loop for the warm-up. `one_loop` has the agents to which both loops are the same."""
    body = map_loops(k.body, lambda loop: _split(k, loop))
    both = [lp for lp in loops(body) if lp.index in ("before", "chunk")]
    agents = k.agents if len(both) == 2 else ()
    return replace(k, body=body, one_loop=tuple(a.name for a in agents if repeats(both[0], both[1], a.name)))


def _split(k: Kernel, loop: Loop) -> list[Loop]:
    """The loop over the warm-up, and the loop over the part. The loop itself if a warm-up leaves out nothing."""
    ops = [o for o in loop.body if isinstance(o, Op)]
    if not any(o.attr(OWN_PART) for o in ops):
        return [loop]
    taken = {o.out for o in k.ops} | {x for lp in loops(k.body) for c in lp.carried for x in (c.name, c.result)}
    handed = {c.name: _fresh(f"{c.name}_begun", taken) for c in loop.carried}
    kept = [o for o in ops if not o.attr(OWN_PART)]
    whole = [o.with_attrs(tail=None, begun=None) for o in kept] if loop.step > 0 else kept
    before = Loop("before", tuple(replace(c, result=handed[c.name]) for c in loop.carried),
                  tuple(whole), loop.warm_up, loop.step)
    return [before, replace(loop, carried=tuple(replace(c, init=handed[c.name]) for c in loop.carried),
                            body=tuple(o.with_attrs(**{OWN_PART: None}) for o in ops), warm_up="")]


def _fresh(name: str, taken: set[str]) -> str:
    """The name, with underscores appended until no value has it."""
    while name in taken:
        name += "_"
    return name
