"""hazards: which earlier ops each op of a trace conflicts with: both access the same bytes, and one of them writes.

This follows from the trace alone. Once a write has waited for all ops that it conflicts with, those whose bytes it covers need
no further attention: an op that conflicts with one of them conflicts with the write, too. So only the accesses since then are
kept.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

from .accesses import Access


class Use(NamedTuple):
    """An access of an op. step: the number of the op's step in the trace."""

    access: Access
    step: int
    pipe: int


class Region:
    """A range of bytes that ops access.

    reads, writes: pipe -> the uses of exactly these bytes so far that later ops may conflict with.
    """

    def __init__(self) -> None:
        self.reads: dict[int, list[Use]] = {}
        self.writes: dict[int, list[Use]] = {}


#: The regions that overlap a range, first that of the range itself, and whether the range covers each.
Near = list[tuple[Region, bool]]


class Memory:
    """The accesses to each space so far that later ops may conflict with. unordered: the pipes whose ops overlap."""

    def __init__(self, unordered: Collection[int]) -> None:
        self.near: dict[str, dict[tuple[int, int], Near]] = {}
        self.unordered = unordered

    def regions(self, a: Access) -> Near:
        """The regions that an access overlaps."""
        near, (_, low, high, *_) = self.near.setdefault(a.space, {}), a
        if (low, high) not in near:
            own = Region()
            found = [(own, True)]
            for (start, end), others in near.items():
                if start < high and low < end:
                    found.append((others[0][0], low <= start and end <= high))
                    others.append((own, start <= low and high <= end))
            near[low, high] = found
        return near[low, high]

    def access(self, found: Sequence[tuple[Access, Near]], step: int, pipe: int) -> tuple[tuple[Use, ...], tuple[int, ...]]:
        """Note the accesses of an op on `pipe`, and find the earlier uses that conflict with it. found: with the regions that
        they overlap.

        Returns the latest such use of each pipe, latest first. The ops of a pipe complete in order as far as others know them, so
        the latest stands for all. If `pipe` itself is unordered, also the steps of all its ops that conflict.
        """
        latest: dict[int, Use] = {}
        own: list[int] = []
        ordered = pipe not in self.unordered
        for a, near in found:
            write = a.write
            for x, covered in near:
                for uses in (x.reads, x.writes) if write and x.reads else (x.writes,) if x.writes else ():
                    for at, each in uses.items():
                        if at == pipe:
                            if ordered:
                                continue
                            own += [u.step for u in each]
                        if at not in latest or each[-1].step > latest[at].step:
                            latest[at] = each[-1]
                    if write and covered:
                        uses.clear()
        for a, near in found:
            mine = (near[0][0].writes if a.write else near[0][0].reads).setdefault(pipe, [])
            if not mine or mine[-1].step != step:  # an op may read a value twice
                if ordered:
                    mine.clear()
                mine.append(Use(a, step, pipe))
        conflicts = sorted(latest.values(), key=_step, reverse=True) if len(latest) > 1 else latest.values()
        return tuple(conflicts), tuple(own)


_step = attrgetter("step")
