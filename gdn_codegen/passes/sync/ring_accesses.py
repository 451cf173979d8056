"""ring_accesses: what ops of warp groups read and write in rings, for `mbarriers`. The checker has its own model
(prove/rings.py).
"""
from __future__ import annotations

from collections.abc import Callable

from ...ir.core import Kernel, Op, Program
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
