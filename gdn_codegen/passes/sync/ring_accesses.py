"""ring_accesses: what ops of warp groups read and write in rings, for `mbarriers`. The checker has its own model
(prove/rings.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir.core import Kernel, Op, Program
from ...ir.ops import OWN_PART
from ..uses import stored_under


def reads(k: Kernel) -> Callable[[Op], set[str]]:
    """A function that gives the values with storage that an op of `k` reads, directly or through expressions inside it."""
    under = stored_under(k.body)
    return lambda o: {x for a in o.args for x in under(a)} if o.buffer or not o.out else set()


def by_threads(p: Program, o: Op) -> bool:
    """Whether threads may write the value of `o` into a ring. They do for loads of tokens whose last chunk they fill up."""
    return o.kind != "load" or (p.tensor(o.attr("tensor")).index == "token" and not o.attr("unfilled"))


def by_units(p: Program, o: Op) -> bool:
    """Whether a matrix unit or a copy unit, rather than threads, may read the operands of `o` from a ring."""
    return o.kind == "matmul" or (o.kind == "store" and p.tensor(o.attr("tensor")).index == "token")


def of_one_warp(k: Kernel, ops: Sequence[Op], read: Callable[[Op], set[str]]) -> set[str]:
    """The buffers that warps which run iterations in turn fill for themselves. Each has a slot of its own. Its threads wait for
    each other by barriers of the warp. ops: of the walk. read: as `reads` gives it."""
    turns = {a.name for a in k.agents if a.turns > 1}
    home, users = {o.out: o.buffer for o in ops if o.buffer}, dict[str, set[str]]()
    for o in ops:
        for buffer in {o.buffer, *(home[x] for x in read(o) if x in home)} - {""}:
            users.setdefault(buffer, set()).add(o.agent)
    return {buffer for buffer, agents in users.items() if len(agents) == 1 and agents <= turns}


def written_over(load: Op, agent: str, ops: Sequence[Op]) -> bool:
    """Whether threads of another agent write into the slot of a load, into which the unit that copies tiles writes later."""
    tile = load.kind == "load" and load.type is not None and load.type.rank == 2
    return tile and load.agent != agent and any(x.buffer == load.buffer and x.agent == agent for x in ops)


def own_part(ops: Sequence[Op]) -> dict[str, bool]:
    """The attribute `own_part` if all of `ops` have it: they do nothing in a warm-up."""
    return {OWN_PART: True} if all(o.attr(OWN_PART) for o in ops) else {}


def sync(kind: str, agent: str, **attrs: object) -> Op:
    """An op of synchronisation."""
    return Op(kind, "", (), tuple(sorted(attrs.items())), None, agent=agent)
