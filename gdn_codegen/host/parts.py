"""How a generated module chooses the number of parts of a sequence.

Below the line the file is copied into generated modules word for word. Nothing here knows a build: callers pass the tables.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..devices.part_cost import PartCost

# --- copied from here on ---
#: How much of the longest walk the last of uneven walks takes after the rest have ended. Fitted to 32 packs on an H100.
TAIL = 0.4
#: Where kernels choose the chunks of a part, a call has kernels for summaries if a sequence may have more chunks than the limit
#: of warm-ups (`warm_up_limit`) times this. Without them a head that forgets nothing warms up from the start of its sequence. Of
#: packs with a sequence of 52 to 69 chunks on an H200, calls without them took 0.78 to 0.91 times as long with gates as a layer
#: draws them, and 0.90 to 1.66 times where a quarter of the heads forgot slowly.
ALL_WARMED = 1.5
#: The most sequences whose lengths a kernel compares to choose the parts. With more it would take as long as a few chunks.
COMPARED = 256
#: Where kernels choose the chunks of a part, they choose at least so many that parts fill the GPU once, and of long sequences
#: FINEST times, with LONG chunks or more. The host launches instances for the shortest parts, and so many as run at a time take a
#: microsecond if they have no part.
FINEST, LONG = 3, 32
#: How many parts that follow one another a sequence has, and the least chunks of one.
PIPELINED, LEAST_PIPELINED = 3, 16


@dataclass(frozen=True)
class _Lengths:
    """What a host knows of the sequences of a call, in chunks.

    longest: the longest sequence. others, rest: how many others there are, and how long each of them is. possible: the longest
    that summaries may be needed for. The values of cu_seqlens may change after the choice, so that is one with all tokens, except
    where kernels choose the chunks of a part (`chosen`).
    """

    longest: int
    others: int
    rest: float
    possible: int
    chosen: bool = False


def _lengths(tokens: int, sequences: int, packed: bool, longest: int, chunk: int, chosen: bool = False) -> _Lengths:
    """What is known of `sequences` sequences with so many tokens in all.

    packed: whether they may differ in length. longest: tokens of the longest, 0 if the host does not know. A pack then counts as
    one sequence of all tokens: a long one is split whatever the others are. Otherwise the others have the same length. So do
    all if the longest, which may be a little more, is at most an eighth longer than the mean. chosen: whether kernels choose the
    chunks of a part.
    """
    possible = max(1, -(-tokens // (chunk if packed else chunk * sequences)))
    if not packed:
        return _Lengths(possible, sequences - 1, possible, possible)
    if not longest or sequences == 1:
        return _Lengths(possible, 0, 0, possible, chosen and sequences > 1)
    if 8 * longest * sequences <= 9 * tokens:
        mean = -(-tokens // (chunk * sequences))
        return _Lengths(mean, sequences - 1, mean, -(-longest // chunk) if chosen else possible, chosen)
    longest = min(tokens, longest)
    chunks = -(-longest // chunk)
    rest = max(1, (tokens - longest) / (chunk * (sequences - 1)) + .5)  # the last chunk of a sequence is half full on average
    return _Lengths(chunks, sequences - 1, rest, chunks if chosen else possible, chosen)


def _needs_summaries(chunks: int, span: int, most: int, cost: PartCost, chosen: bool = False) -> bool:
    """True if a call with a sequence of `chunks` chunks has kernels for summaries: warm-ups may take more time than these.

    That is so if a whole part may begin later than the longest warm-up reaches. span: chunks of a part. most: the longest
    warm-up, in parts. chosen: whether kernels choose the chunks of a part; then the length of the sequence decides (ALL_WARMED).

    Results are right in any case. Without summaries a warm-up may reach back to the start of the sequence, however far that is.
    """
    if chosen:
        return chunks > ALL_WARMED * cost.warm_up_limit
    return chunks - span > min(most * span, span + cost.warm_up_limit)


def _split_parts(parts: int, tokens: int, size: int) -> int:
    """Of the parts of a pack, how many belong to sequences of several parts, at most. size: the fewest tokens of a
    part. Such a sequence has more, and so fewer than 2 parts for each `size` of them. Where kernels choose parts, these come
    first (choose_parts.cuh)."""
    return min(parts, max(1, 2 * tokens // size))


def _cheapest_span(x: _Lengths, instances: int, units: int, cost: PartCost, summaries: int, most: int, warms_up: bool
                   ) -> int | None:
    """The number of chunks of a part with the least `cost`; None for no parts. It tries parts that fill the GPU up to four times.

    instances: kernel instances of a part. units: instances that the GPU runs at a time.
    most: the longest warm-up, in parts. summaries: the number of kernels that a call launches for summaries.
    warms_up: True if the walk of a part may start with a warm-up. Otherwise each part needs a summary of the parts before it.
    """
    sequences, chunks, even = 1 + x.others, x.longest + x.others * x.rest, x.others == 0 or x.rest == x.longest

    def makespan(walk: float, walks: int, total: float, crowded: float = 1.0) -> float:
        """Chunks until all walks have ended. The longest one has `walk` chunks, all have `total` times `instances`.

        Equal walks run in waves. Of others, the last one to start ends a part of a walk after the rest. Equal parts of several
        sequences that run in waves are `crowded`, too.
        """
        waves = -(-walks * instances // units)
        if even:
            return waves * walk * (crowded if waves > 1 and sequences > 1 else 1)
        walk, share = walk + cost.start_chunks, (total + walks * cost.start_chunks) * instances / units
        return max(walk, share if waves == 1 else crowded * share + TAIL * walk)

    best, least = None, makespan(x.longest, sequences, chunks) * cost.chunk_us
    for n in range(2, x.longest + 1):
        span = -(-x.longest // n)
        of_longest = -(-x.longest // span)
        parts = of_longest * sequences if even else of_longest + x.others * max(1, math.ceil(x.rest / span))
        if ((n - 1) * sequences if even else parts - sequences) * instances > 4 * units:
            break
        if warms_up:
            before = (of_longest - 1) * span
            warm_up = min(cost.warm_up_chunks, before)
            done = makespan(span + warm_up, parts, chunks + (parts - sequences) * warm_up, cost.crowded)
            us = cost.split_us + (done + min(cost.longest_warm_up_chunks, before - warm_up)) * cost.chunk_us
            if _needs_summaries(x.possible, span, most, cost, x.chosen):
                us += summaries * cost.idle_us  # most heads need none
                if span < cost.least_part_chunks:
                    us += 3 * span * cost.summary_us
        else:
            summed = -(-(parts - sequences) * instances // units)
            us = (makespan(span, parts, chunks) + 2 * summed * span) * cost.chunk_us
            us += of_longest * cost.fold_us + summaries * cost.launch_us
        if us < least:
            best, least = span, us
    return best
