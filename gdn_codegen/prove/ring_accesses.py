"""ring_accesses: what ops of warp groups read and write in rings, and who does so, for `check_rings`. The pass that derives
barriers has its own model (passes/sync/ring_accesses.py).
"""
from __future__ import annotations

from collections.abc import Callable

from ..ir.core import Kernel, Op, Program


def reads(k: Kernel) -> Callable[[Op], set[str]]:
    """A function that gives the values with storage that an op of `k` reads.

    An op without a buffer is an expression: an op that reads it reads its operands.
    """
    under: dict[str, set[str]] = {}
    for o in k.ops:
        if o.out:
            under[o.out] = {o.out} if o.buffer else set().union(*(under.get(a, {a}) for a in o.args))

    def of(o: Op) -> set[str]:
        computes = o.buffer or not o.out
        return set().union(*(under.get(a, {a}) for a in o.args)) if computes else set()
    return of


def is_of_tokens(p: Program, o: Op) -> bool:
    """Whether a load or store moves rows of tokens. The last chunk of a sequence may have fewer rows."""
    return p.tensor(o.attr("tensor")).index == "token"


def is_filled(p: Program, o: Op) -> bool:
    """Whether a load gives zeros in the rows past the sequence's end."""
    return is_of_tokens(p, o) and not o.attr("unfilled")


def threads_write(p: Program, o: Op) -> bool:
    """Whether threads write at least a part of the result of `o`. A copy of a whole tile by an asynchronous unit is the
    exception."""
    return not (o.kind == "load" and not is_filled(p, o))


def unit_reads(p: Program, o: Op) -> bool:
    """Whether an asynchronous unit reads the operands of `o` from a ring: tensor cores, or the unit that copies tiles."""
    return is_of_tokens(p, o) if o.kind == "store" else o.kind == "matmul"
