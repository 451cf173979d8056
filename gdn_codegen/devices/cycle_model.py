"""Cycles of a device's instructions beside its table of cycles, as data: transfers with a latency, and least times."""
from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil


@dataclass(frozen=True)
class Transfer:
    """Time of one transfer between global memory and a core. latency: cycles. bandwidth: bytes per cycle."""

    latency: float
    bandwidth: float

    def cycles(self, count: int) -> int:
        """Cycles for `count` bytes: the latency and count / bandwidth, rounded up. 0 for no bytes."""
        return ceil(self.latency + count / self.bandwidth) if count else 0


def saturating(peak: float, half: float, clock: float) -> Transfer:
    """The transfer that reaches a bandwidth of peak * B / (half + B) with B bytes, so that it takes (half + B) / peak.

    peak: GiB per second. half: bytes that reach half of it. clock: GHz.
    """
    bandwidth = peak * 2**30 / (clock * 1e9)
    return Transfer(half / bandwidth, bandwidth)


@dataclass(frozen=True)
class CycleModel:
    """What instructions cost other than by the table.

    transfers: (agent, pipe) -> the time of its loads from global memory and its stores to it.
    least: (instruction, dtype, columns) -> (cycles of an element, cycles besides). The instruction takes no less than this line.
    """

    transfers: dict[tuple[str, str], Transfer] = field(default_factory=dict)
    least: dict[tuple[str, str, int], tuple[float, float]] = field(default_factory=dict)
