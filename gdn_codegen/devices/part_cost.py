"""The cost of parts of a sequence on a device. The class is copied into generated modules."""
from __future__ import annotations

from dataclasses import dataclass, replace


def of_chunks(cost: PartCost, tokens: int) -> PartCost:
    """Convert `cost`, which is for chunks of 64 tokens, to chunks of `tokens` tokens."""
    ratio = tokens / 64
    return replace(cost, chunk_us=round(cost.chunk_us * ratio, 3), summary_us=round(cost.summary_us * ratio, 3),
                   warm_up_chunks=round(cost.warm_up_chunks / ratio, 3),
                   longest_warm_up_chunks=round(cost.longest_warm_up_chunks / ratio, 3),
                   least_part_chunks=round(cost.least_part_chunks / ratio, 3),
                   warm_up_limit=round(cost.warm_up_limit / ratio),
                   start_chunks=round(cost.start_chunks / ratio, 3))


#: Of walks with short warm-ups, whose warps compute operands in turn: microseconds for a token (docs/performance/members.md), and
#: tokens of a warm-up on average.
SHORT_TOKEN_US, SHORT_WARM_UP = 0.09, 32
#: More chunks than a sequence has: parts without summaries may begin anywhere.
ALL_CHUNKS = 1 << 20


def of_short(cost: PartCost, tokens: int) -> PartCost:
    """The cost of parts with short warm-ups, for chunks of `tokens` tokens. cost: of others, for chunks of 64."""
    return replace(of_chunks(cost, tokens), chunk_us=round(SHORT_TOKEN_US * tokens, 3), warm_up_chunks=SHORT_WARM_UP / tokens,
                   longest_warm_up_chunks=0, least_part_chunks=0, warm_up_limit=ALL_CHUNKS)


# --- copied from here on ---
@dataclass(frozen=True)
class PartCost:
    """The cost of parts of a sequence that run side by side, from which the number of parts follows.

    chunk_us: microseconds in which a walk does one chunk.
    fold_us: microseconds in which one part's summary is applied to the state.
    launch_us: microseconds of one kernel for summaries, besides its chunks, where all parts need them; idle_us: of one that finds
      that none is needed.
    split_us: microseconds that parts with warm-ups cost besides their chunks: kernels that bound the length of warm-ups, and the
      longer start of a walk.
    summary_us: microseconds in which one chunk is summed up.
    warm_up_chunks: length of the warm-up that a part's walk has on average, in chunks.
    longest_warm_up_chunks: how many more chunks the longest warm-up of a sequence has.
    least_part_chunks: in parts of fewer chunks some heads need summaries.
    resident: walks that one multiprocessor runs at a time.
    start_chunks: what a walk costs besides its chunks, in chunks: its first loads, and its final state.
    warm_up_limit: in a call with summaries the longest warm-up has this many chunks more than a part. A longer one takes more
      time than summaries.
    crowded: how many times its chunks' time a part takes where there are more parts of uneven sequences than the GPU runs at a
      time. Warm-ups of the heads that forget slowly then delay other parts.
    """

    chunk_us: float
    fold_us: float
    launch_us: float
    split_us: float
    summary_us: float
    warm_up_chunks: float
    longest_warm_up_chunks: float
    least_part_chunks: float
    resident: int
    idle_us: float
    crowded: float
    start_chunks: float = 0.0
    warm_up_limit: int = 50
