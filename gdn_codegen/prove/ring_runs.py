"""What a check of rings runs: how many iterations, items and chunks of warm-ups, and the ops of a loop. A part of `rings`."""
from __future__ import annotations

from ..ir.core import Kernel, Op
from ..ir.ops import LATE

LEAST_ITERATIONS = 8  # of a check; `iterations` has more for rings of many slots


def iterations(k: Kernel) -> int:
    """How many iterations the checker runs, besides those of the warm-up. Each slot of each ring is used at least twice, and the
    longest ring has two iterations more, for agents that run ahead."""
    return max(LEAST_ITERATIONS, 2 * max(b.slots for b in k.buffers) + 2)


def items(k: Kernel) -> list[int]:
    """The chunks of the items that a block runs in the check. Only the ring of their numbers holds agents back in empty items. In
    items of one chunk, agents are in as many different items as rings have slots."""
    most = max(b.slots for b in k.buffers)
    return [2, *[0] * (most + 2), iterations(k) - most, *[1] * (most + 2)]


def warm_ups(k: Kernel) -> list[int]:
    """The lengths of the warm-up that the checker tries: both parities, and both more and fewer iterations than a ring has
    slots."""
    most = max(b.slots for b in k.buffers)
    return sorted({0, 1, 2, 3, 4, most - 1, most, most + 1})


def of_loop(body: list[Op], first: int, count: int) -> list[tuple[int, Op]]:
    """The ops that `count` iterations of a loop run, from number `first` on, each with its iteration."""
    late = [o for o in body if o.attr(LATE)]
    out = [(i - bool(o.attr(LATE)), o) for i in range(first, first + count) for o in body if i > first or o not in late]
    return out + [(first + count - 1, o) for o in late if count]
