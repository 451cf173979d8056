"""How a generated module chooses the number of parts of a sequence.

Below the line the file is copied into generated modules word for word. Nothing here knows a build: callers pass the tables.
"""
from __future__ import annotations

from ..devices.part_cost import PartCost


# --- copied from here on ---
def _needs_summaries(chunks: int, span: int, most: int) -> bool:
    """True if some part of a sequence of `chunks` chunks may need a summary of the parts before it.

    span: chunks of a part. most: the longest warm-up, in parts.
    """
    return chunks > (most + 1) * span


def _cheapest_span(chunks: int, sequences: int, instances: int, units: int, cost: PartCost, summaries: int, most: int,
                   warms_up: bool) -> int | None:
    """The number of chunks of a part with the least `cost`; None for no parts. It tries parts that fill the GPU up to four times.

    chunks: of each of `sequences` sequences of equal length.
    instances: kernel instances of a part. units: instances that the GPU runs at a time.
    most: the longest warm-up, in parts. summaries: the number of kernels that a call launches for summaries.
    warms_up: True if the walk of a part may start with a warm-up. Otherwise each part needs a summary of the parts before it.
    """
    best, least = None, -(-sequences * instances // units) * chunks * cost.chunk_us
    for n in range(2, min(chunks, 1 + 4 * units // (sequences * instances)) + 1):
        span = -(-chunks // n)
        parts = -(-chunks // span)
        waves = -(-sequences * parts * instances // units)
        if warms_up:
            before = (parts - 1) * span
            warm_up = min(cost.warm_up_chunks, before)
            us = cost.split_us
            us += (waves * (span + warm_up) + min(cost.longest_warm_up_chunks, before - warm_up)) * cost.chunk_us
            if _needs_summaries(chunks, span, most):
                us += summaries * cost.launch_us
                if span < cost.least_part_chunks:
                    us += 3 * span * cost.summary_us
        else:
            summed = -(-sequences * (parts - 1) * instances // units)
            us = (waves + 2 * summed) * span * cost.chunk_us + parts * cost.fold_us + summaries * cost.launch_us
        if us < least:
            best, least = span, us
    return best
