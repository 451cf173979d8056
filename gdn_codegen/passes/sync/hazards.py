"""hazards: the memory during a traversal of a kernel's trace. `Memory` tells which earlier op conflicts with an op: both access
the same bytes, and one of them writes.
"""
from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from .accesses import Access, Path
from .trace import Range, Step


class Record(NamedTuple):
    """An access that has happened. number: of the op on its pipe. clock: what is complete after the op. time: the order of all
    ops, signals and waits."""

    access: Access
    step: Step
    number: int
    clock: list[int]
    time: int


class Memory:
    """The accesses to each space so far, without those that later writes make unimportant.

    needed: the barriers of unordered pipes that are the only order between two ops.
    """

    def __init__(self) -> None:
        #: By space and range. Most ranges overlap few others.
        self.records: dict[str, dict[Range, list[Record]]] = defaultdict(lambda: defaultdict(list))
        self.barriers: dict[int, list[tuple[int, Path]]] = {}  # unordered pipe -> number of ops before a barrier, its place
        self.needed: set[Path] = set()

    def record(self, step: Step, clock: list[int], time: int) -> None:
        """Note the accesses of an op."""
        for a, at in step.accesses:
            self.records[a.space][at].append(Record(a, step, clock[step.pipe], clock, time))

    def latest(self, step: Step, known: list[int]) -> Record | None:
        """The latest access that conflicts with an access of `step` and whose op is not known to be complete. known: the clock
        of the pipe of `step`."""
        found: Record | None = None
        barriers = self.barriers.get(step.pipe, [])
        if barriers and barriers[-1][1] in self.needed:
            barriers = []
        for a, (low, high, write, _) in step.accesses:
            ranges = self.records[a.space]
            for at in [x for x in ranges if x[0] < high and low < x[1] and (write or x[2])]:
                records, pipe = ranges[at], at[3]
                if pipe == step.pipe and barriers:
                    self.note(barriers, records)
                if known[pipe] < records[-1].number and (found is None or records[-1].time > found.time):
                    found = records[-1]
                if write and low <= at[0] and at[1] <= high:
                    # Every later op that conflicts with a completed one conflicts with this write, too.
                    ranges[at] = [r for r in records if known[pipe] < r.number]
                    if not ranges[at]:
                        del ranges[at]
        return found

    def note(self, barriers: list[tuple[int, Path]], records: list[Record]) -> None:
        """Add the last of the barriers to `needed` if it alone comes between one of the records and the next op of the pipe."""
        before, (last, path) = barriers[-2][0] if barriers[1:] else -1, barriers[-1]
        if any(before < r.number <= last for r in records):
            self.needed.add(path)

    def last_within(self, path: Path, pipe: int) -> Record:
        """The last record of a pipe in the statement at `path`."""
        return max((r for ranges in self.records.values() for records in ranges.values() for r in records
                    if r.step.pipe == pipe and r.step.path[:len(path)] == path), key=lambda r: r.number)
