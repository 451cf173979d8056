"""prefetch: runs state-free ops of a walk one iteration ahead. `arrange` calls it for devices with cores. It needs stage "fed",
and keeps it.

The prefetched ops come first in the body. They are marked `ahead` and work for the next chunk. Copies of them before the loop
work for the first chunk. Values that the other ops read of them are carried from one iteration to the next, in storage of two
slots. The last iteration has no next chunk, so they do nothing there.

The schedule's option `prefetch` selects the ops:
- "loads": loads of tensors that this kernel does not write, with the `valid` after them.
- "operands": of these, the ones that the agent of products runs.
- "all": all ops that do not depend on a state, except those whose result would stay in a space of the products.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Cores
from ...ir.core import Carry, Kernel, Loop, Op, Program, Stmt, map_loops, types
from ...ir.types import Tile
from .prefetched_ops import PrefetchedOps


def prefetch(p: Program, k: Kernel, what: str, device: Cores) -> Kernel:
    """`k` with its prefetched ops one iteration ahead. what: the schedule's `prefetch`. `k` itself if it walks no chunks."""
    if what == "no" or k.grid != "sequences":
        return k
    return replace(k, body=map_loops(k.body, lambda items: [
        replace(items, body=map_loops(items.body, lambda chunks: _ahead(p, k, chunks, what, device)))]))


def _ahead(p: Program, k: Kernel, loop: Loop, what: str, device: Cores) -> list[Stmt]:
    """The loop with its prefetched ops for the next chunk, and before it the same ops for the first chunk."""
    chosen = PrefetchedOps(p, k, loop, what, device)
    taken = set(types(k.body))

    def fresh(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    def copies(suffix: str) -> tuple[list[Op], dict[str, str]]:
        names: dict[str, str] = {}
        out = []
        for o in ops:
            if o.out:
                names[o.out] = fresh(f"{o.out}_{suffix}")
            out.append(o.changed(out=names.get(o.out, ""), args=tuple(names.get(a, a) for a in o.args)))
        return out, names

    ops = [chosen.ops[n].with_attrs(ahead=1) for n in sorted(chosen.prefetched)]
    if not ops:
        return [loop]
    first, firsts = copies("first")
    then, thens = copies("next")
    numbers = [chosen.ops[n] for n in sorted(chosen.constant)]
    crossing = [chosen.ops[n] for n in chosen.crossing()]
    ring = tuple(Carry(o.out, firsts[o.out], thens[o.out], fresh(f"{o.out}_unread"), _type(o), 2) for o in crossing)
    body = (*then, *(o for o in chosen.kept() if o not in numbers))
    return [*numbers, *first, replace(loop, carried=(*loop.carried, *ring), body=body)]


def _type(o: Op) -> Tile:
    assert o.type is not None
    return o.type
