"""hazards: which earlier ops each op of a trace conflicts with: both access the same bytes, and one of them writes.

This follows from the trace alone. Once a write has waited for all ops that it conflicts with, those whose bytes it covers need
no further attention: an op that conflicts with one of them conflicts with the write, too. So only the accesses since then are
kept.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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

    reads, writes: pipe -> the uses of exactly these bytes so far that later ops may conflict with. near: the regions that
    overlap this one, itself among them, and whether this one covers each.
    """

    def __init__(self, low: int, high: int, others: Iterable[Region]) -> None:
        self.low, self.high = low, high
        self.reads: dict[int, list[Use]] = {}
        self.writes: dict[int, list[Use]] = {}
        self.near = [(self, True)]
        for x in others:
            if x.low < high and low < x.high:
                self.near.append((x, low <= x.low and x.high <= high))
                x.near.append((self, x.low <= low and high <= x.high))


class Memory:
    """The accesses to each space so far that later ops may conflict with. unordered: the pipes whose ops overlap."""

    def __init__(self, unordered: Collection[int]) -> None:
        self.regions: dict[str, dict[tuple[int, int], Region]] = {}
        self.unordered = unordered

    def region(self, a: Access) -> Region:
        """The region that an op accesses."""
        regions = self.regions.setdefault(a.space, {})
        if (a.low, a.high) not in regions:
            regions[a.low, a.high] = Region(a.low, a.high, regions.values())
        return regions[a.low, a.high]

    def access(self, found: Sequence[tuple[Access, Region]], step: int, pipe: int) -> tuple[tuple[Use, ...], tuple[int, ...]]:
        """Note the accesses of an op on `pipe`, and find the earlier uses that conflict with it. found: with their regions.

        Returns the latest such use of each pipe, latest first. The ops of a pipe complete in order as far as others know them, so
        the latest stands for all. If `pipe` itself is unordered, also the steps of all its ops that conflict.
        """
        latest: dict[int, Use] = {}
        own: list[int] = []
        ordered = pipe not in self.unordered
        for a, region in found:
            for x, covered in region.near:
                for uses in (x.reads, x.writes) if a.write and x.reads else (x.writes,) if x.writes else ():
                    for at, each in uses.items():
                        if at == pipe:
                            if ordered:
                                continue
                            own += [u.step for u in each]
                        if at not in latest or each[-1].step > latest[at].step:
                            latest[at] = each[-1]
                    if a.write and covered:
                        uses.clear()
        for a, region in found:
            mine = (region.writes if a.write else region.reads).setdefault(pipe, [])
            if not mine or mine[-1].step != step:  # an op may read a value twice
                if ordered:
                    mine.clear()
                mine.append(Use(a, step, pipe))
        conflicts = sorted(latest.values(), key=_step, reverse=True) if len(latest) > 1 else latest.values()
        return tuple(conflicts), tuple(own)


_step = attrgetter("step")
