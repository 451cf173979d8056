"""offsets: places buffers in a memory space at byte offsets. `pack` uses it.

Each function sets offsets such that no two buffers that are live at the same time overlap. It returns False if there is no
room.
"""
from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter

from ...ir.types import BYTES
from ...schedule.schedule import ScheduleError


@dataclass
class Place:
    """A buffer before it has an offset: its name, space, shape and dtype, and the first and last op between which it is live."""

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str
    agent: str
    start: int
    end: int
    offset: int = 0
    slots: int = 1
    pinned: bool = False  # no other value may share it

    @property
    def bytes(self) -> int:
        """The bytes of all slots."""
        n = BYTES[self.dtype] * self.slots
        for d in self.shape:
            n *= d
        return n


def _free(x: Place, others: list[Place], size: int, align: int, start: int) -> int | None:
    """The lowest offset from `start` on at which `x` overlaps none of `others` that are live at the same time. None if there is
    none. others: in order of their offsets."""
    need = -(-x.bytes // align) * align
    at = start
    for y in others:
        if y.start > x.end or x.start > y.end or y.offset + y.bytes <= at:
            continue
        if at + need <= y.offset:
            break
        at = -(-(y.offset + y.bytes) // align) * align
    return at if at + need <= size else None


class NoRoom(ScheduleError):
    """A space is too small. lacking: how many bytes it lacks at least."""

    def __init__(self, where: str, space: str, size: int, live: list[Place]) -> None:
        """where: the kernel and the device. size: the bytes of the space. live: the buffers at the fullest point."""
        total = sum(x.bytes for x in live)
        names = ", ".join(f"{x.name} {x.bytes}" for x in sorted(live, key=lambda x: -x.bytes))
        super().__init__(f"{where}: {space} has {size} bytes, and at the fullest point {total} are live: {names}; "
                         "use a smaller chunk, or cut the values into more kernels")
        self.lacking = max(total - size, 1)


def fullest(places: list[Place]) -> list[Place]:
    """The buffers that are live at the first op at which most bytes are. places: in order of their first op."""
    most, at, total = 0, 0, 0
    ends: list[tuple[int, int]] = []  # the last op and the bytes of each live buffer
    for x in places:
        while ends and ends[0][0] < x.start:
            total -= heappop(ends)[1]
        heappush(ends, (x.end, x.bytes))
        total += x.bytes
        if total > most:
            most, at = total, x.start
    return [x for x in places if x.start <= at <= x.end]


def in_slots(places: list[Place], size: int, slots: int) -> bool:
    """Divide the space into equal slots, which the buffers use in turn."""
    last: list[Place | None] = [None] * slots
    for n, x in enumerate(places):
        y, last[n % slots] = last[n % slots], x
        if x.bytes > size // slots or (y is not None and y.end >= x.start):
            return False
        x.offset = n % slots * (size // slots)
    return True


def round_robin(places: list[Place], size: int, align: int) -> bool:
    """Place buffers one after another around the space, so that buffers that are live after each other do not share bytes."""
    done: list[Place] = []
    cursor = 0
    for x in places:
        at = _free(x, done, size, align, cursor)
        if at is None:
            at = _free(x, done, size, align, 0)
        if at is None:
            return False
        x.offset = at
        cursor = (at + x.bytes) % size
        insort(done, x, key=attrgetter("offset"))
    return True


def lowest(places: list[Place], size: int, align: int) -> bool:
    """Place each buffer as low as possible: first those with the largest product of lifetime and bytes, otherwise in order."""
    done: list[Place] = []
    for x in sorted(places, key=lambda x: (-(x.end - x.start) * x.bytes, x.start)):
        at = _free(x, done, size, align, 0)
        if at is None:
            break
        x.offset = at
        insort(done, x, key=attrgetter("offset"))
    else:
        return True
    done = []
    for x in places:
        at = _free(x, done, size, align, 0)
        if at is None:
            return False
        x.offset = at
        insort(done, x, key=attrgetter("offset"))
    return True
