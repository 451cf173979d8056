"""offsets: where in a memory space the buffers of a kernel lie (`pack`).

Each function sets the offsets of places so that no two that are in use at the same time meet. It gives False where it finds no
room.
"""
from __future__ import annotations

from dataclasses import dataclass

#: Bytes of an entry.
WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass
class Place:
    """A buffer to be: the values in it, where, how large, and from which op to which it is in use."""

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str
    agent: str
    start: int
    end: int
    offset: int = 0
    slots: int = 1
    pinned: bool = False  # no other value may take it over

    @property
    def bytes(self) -> int:
        """The bytes of all slots."""
        n = WIDTH[self.dtype] * self.slots
        for d in self.shape:
            n *= d
        return n


def _free(x: Place, others: list[Place], size: int, align: int, start: int) -> int | None:
    """The lowest offset from `start` on where `x` meets none of `others`."""
    need = -(-x.bytes // align) * align
    at = start
    for y in sorted((y for y in others if y.start <= x.end and x.start <= y.end), key=lambda y: y.offset):
        if y.offset + y.bytes <= at:
            continue
        if at + need <= y.offset:
            break
        at = -(-(y.offset + y.bytes) // align) * align
    return at if at + need <= size else None


def in_slots(places: list[Place], size: int, slots: int) -> bool:
    """Equal parts of the space, one after the other."""
    last: list[Place | None] = [None] * slots
    for n, x in enumerate(places):
        y, last[n % slots] = last[n % slots], x
        if x.bytes > size // slots or (y is not None and y.end >= x.start):
            return False
        x.offset = n % slots * (size // slots)
    return True


def round_robin(places: list[Place], size: int, align: int) -> bool:
    """Place buffers one after another around the space; whether all found room. Neighbours in time then do not share bytes."""
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
        done.append(x)
    return True


def lowest(places: list[Place], size: int, align: int) -> bool:
    """Long-lived and large ones first."""
    done: list[Place] = []
    for x in sorted(places, key=lambda x: (-(x.end - x.start) * x.bytes, x.start)):
        at = _free(x, done, size, align, 0)
        if at is None:
            break
        x.offset = at
        done.append(x)
    else:
        return True
    done = []
    for x in places:
        at = _free(x, done, size, align, 0)
        if at is None:
            return False
        x.offset = at
        done.append(x)
    return True
