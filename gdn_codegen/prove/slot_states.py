"""What `rings` knows of a slot: the phases of its barrier, and its last write."""
from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.core import Op
from .clocks import Clock


@dataclass
class Phases:
    """The barrier of one slot. full[n]: the clock once phase n is complete. waits[n]: the waits that needed n complete phases,
    as (pipe, number)."""

    count: int
    arrived: int = 0
    now: Clock = field(default_factory=list)
    full: list[Clock] = field(default_factory=list)
    waits: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


@dataclass
class Write:
    """The last write to a slot. threads: whether threads wrote at least a part. fence: the number of the agent's first fence
    after it, 0 if there is none."""

    op: Op
    who: str
    pipe: int
    number: int
    threads: bool
    fence: int = 0
