"""hazards: which earlier ops each op of a trace conflicts with: both access the same bytes, and one of them writes.

This follows from the trace alone. Once a write has waited for all ops that it conflicts with, those whose bytes it covers need
no further attention: an op that conflicts with one of them conflicts with the write, too. So only the accesses since then are
kept.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .accesses import Access

#: low, high, write, pipe: bytes of a space, whether they are written, and the pipe that accesses them.
Range = tuple[int, int, bool, int]


class Use(NamedTuple):
    """An access of an op. step: the number of the op's step in the trace."""

    access: Access
    step: int
    pipe: int


class Memory:
    """The accesses to each space so far that later ops may conflict with. By space and range, since most ranges overlap few
    others."""

    def __init__(self) -> None:
        self.uses: dict[str, dict[Range, list[Use]]] = defaultdict(lambda: defaultdict(list))

    def conflicts(self, accesses: Sequence[Access], pipe: int) -> tuple[tuple[Use, ...], tuple[int, ...]]:
        """The uses that conflict with an op on `pipe` that has these accesses: the latest use of each pipe, latest first. Its
        ops complete in order as far as others know them, so the latest stands for all. And the steps of all ops of `pipe`
        itself that conflict."""
        latest: dict[int, Use] = {}
        own: list[int] = []
        for a in accesses:
            ranges = self.uses[a.space]
            for at in [x for x in ranges if x[0] < a.high and a.low < x[1] and (a.write or x[2])]:
                found = ranges[at]
                use = found[-1]
                if use.pipe not in latest or use.step > latest[use.pipe].step:
                    latest[use.pipe] = use
                if use.pipe == pipe:
                    own += [x.step for x in found]
                if a.write and a.low <= at[0] and at[1] <= a.high:
                    del ranges[at]
        return tuple(sorted(latest.values(), key=lambda x: -x.step)), tuple(own)

    def record(self, accesses: Sequence[Access], step: int, pipe: int) -> None:
        """Note the accesses of an op."""
        for a in accesses:
            found = self.uses[a.space][a.low, a.high, a.write, pipe]
            if not found or found[-1].step != step:  # an op may read a value twice
                found.append(Use(a, step, pipe))
