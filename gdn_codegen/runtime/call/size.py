"""What of a call's size the choice of its build depends on."""
from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

from ... import targets
from ...host.parts import _cheapest_span, _lengths
from ...targets.candidates import Lengths, Splits
from .device import Facts
from .request import DEFAULT_CHUNK
from .tables import Extent

#: Of so many packs whose lengths the host does not know, dispatch takes one to have a sequence with all tokens.
ODDS = 10


def splits(x: Extent, units: int, target: str) -> bool:
    """Whether dispatch splits the sequences of a call of this size, on a GPU of so many multiprocessors, if no table has a row.

    Where the host knows how long the longest sequence is, there may be any number of walks: then most of them are short. Also
    where kernels choose the parts of a pack whose lengths it does not know. Such a pack counts as one sequence with all tokens.
    If walks may fill the GPU, parts must pay for equal lengths, too, or the odds must be good (`worth_it`).
    """
    s = targets.find(target).splits
    if s is None:
        return 2 * x.walks <= units
    unsure = x.unknown and s.unsplit_us is not None
    if x.tokens < s.least_tokens or (x.walks > s.walks * units and not x.longest and not unsure):
        return False

    def pays(longest: int) -> bool:
        known = _lengths(x.tokens, x.sequences, x.packed, longest, DEFAULT_CHUNK, s.chosen)
        return _cheapest_span(known, x.HV, units * s.cost.resident, s.cost, s.summaries, s.most, True) is not None

    return pays(x.longest) and (
        not unsure or 2 * x.walks <= units or pays(-(-x.tokens // x.sequences)) or worth_it(x, units, s))


def worth_it(x: Extent, units: int, s: Splits) -> bool:
    """Whether parts pay for a pack whose lengths the host does not know, and which parts do not speed up if lengths are equal.

    If they are, nothing is split, and parts take `unsplit_us` longer. If one sequence has all tokens, whole walks take `most`
    times as long. Parts pay if the geometric mean over ODDS packs falls, one of which is of the second kind.
    """
    assert s.unsplit_us is not None
    chunks = x.tokens / DEFAULT_CHUNK * max(1 / x.sequences, x.HV / units)
    longer = 1 + (s.unsplit_us[0] + s.unsplit_us[1] * x.walks / units) / (s.cost.chunk_us * chunks)
    most = min(x.sequences, units / x.HV)
    return (ODDS - 1) * log(longer) < log(max(1, most))


@dataclass(frozen=True)
class Size:
    """What of a call's extent the choice of a build depends on. Calls of many lengths share it.

    few: whether sequences are split; None without a GPU. short: whether the call has too few tokens for that. shared: value heads
    of a key head that one kernel instance may handle. heads: H and HV, for targets that compile them in. idle: whether a
    batch-invariant call has so few walks that half of the GPU is idle. crowded: whether sequences may differ in length, and have
    more walks than run at a time. uneven: whether the host knows that lengths differ much, so that no row of a table serves the
    call. unsure: whether only kernels know lengths, and choose parts by them, and half of the GPU may be idle. If the model
    splits them, no row with whole sequences serves it. The rest: as in Extent.
    """

    shape_class: tuple[int, int, int]
    few: bool | None
    short: bool = False
    shared: int = 1
    heads: tuple[int, int] | None = None
    idle: bool = False
    crowded: bool = False
    lengths: Lengths = ""
    of_eight: int = 0
    longest_share: int = 0
    rows: bool = False
    uneven: bool = False
    unsure: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """What a target's model asks besides `few` and `shape_class` (fields of Asked)."""
        return {n: getattr(self, n) for n in ("shared", "lengths", "of_eight", "longest_share", "rows", "uneven")}


def size_of(x: Extent, target: str, on: Facts) -> Size:
    """The size of a call of an extent on a device."""
    t, s = targets.find(target), targets.find(target).splits
    return Size(x.shape_class, splits(x, on.units, target) if on.units else None, s is not None and x.tokens < s.least_tokens,
                x.shared, (x.H, x.HV) if t.head_counts else None, rows=x.rows, uneven=x.uneven,
                crowded=x.packed and x.sequences > 1 and x.walks > on.units > 0, lengths=x.lengths(on.units),
                of_eight=x.of_eight(on.units), longest_share=x.longest_share(on.units),
                unsure=x.unknown and s is not None and s.chosen and 2 * x.walks <= on.units)
