"""ring_accesses: what ops of warp groups read and write in rings, for `mbarriers`. The checker has its own model
(prove/rings.py).
"""
from __future__ import annotations

from collections.abc import Callable

from ...ir.core import Kernel, Op, Program, walk


def reads(k: Kernel) -> Callable[[Op], set[str]]:
    """A function that gives the values with storage that an op of `k` reads, directly or through expressions inside it."""
    defs = {o.out: o for o in walk(k.body) if o.out}

    def leaves(a: str) -> set[str]:
        o = defs.get(a)
        return {a} if o is None or o.buffer else {x for y in o.args for x in leaves(y)}
    known = {a: leaves(a) for o in walk(k.body) for a in o.args}
    return lambda o: {x for a in o.args for x in known[a]} if o.buffer or not o.out else set()


def by_threads(p: Program, o: Op) -> bool:
    """Whether threads may write the value of `o` into a ring. They do for loads of tokens, since they fill up the last chunk."""
    return o.kind != "load" or p.tensor(o.attr("tensor")).index == "token"


def by_units(p: Program, o: Op) -> bool:
    """Whether a matrix unit or a copy unit, rather than threads, may read the operands of `o` from a ring."""
    return o.kind == "matmul" or (o.kind == "store" and p.tensor(o.attr("tensor")).index == "token")
