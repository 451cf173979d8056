"""What a target offers to dispatch and to `tune`: candidates, as data.

`runtime/call/choose.py` makes builds of the candidates of `Target.model`, and `tools/candidates.py` of those of `Target.spaces`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from ..devices.part_cost import PartCost
from ..schedule import Schedule, varied

#: Fields that a candidate of a space may have other than the first of its space.
MOST = 2
#: What the host knows of the lengths of sequences (Extent.lengths). "dominated": the longest one takes longer than all walks side
#: by side. "level": there are more walks than run at a time, and no order of them saves time. "": none of this.
Lengths = Literal["", "dominated", "level"]


@dataclass(frozen=True)
class Splits:
    """When dispatch splits sequences: where parts take less time than whole walks.

    cost: the model of their time. least_tokens: the fewest tokens of a call that is split. walks: the most walks (sequences x
    value heads) of such a call for each multiprocessor. summaries: kernels for summaries of parts. most: the longest warm-up, in
    parts. chosen: whether kernels choose the chunks of a part from the lengths of packed sequences. Where only the device knows
    these: unsplit_us: what parts take longer if no sequence is split, in microseconds, and for each walk of a multiprocessor.
    channels: for pages with a gate for each channel, the most walks that are split, and the fewest mean tokens, by their classes
    (`Extent.shape_class`); None: none are.
    """

    cost: PartCost
    least_tokens: int
    walks: int
    summaries: int
    most: int
    chosen: bool = False
    unsplit_us: tuple[float, float] | None = None
    channels: tuple[int, int] | None = None

    def of_channels(self, shape_class: tuple[int, ...]) -> bool:
        """Whether calls of a shape class are split where the page has a gate for each channel."""
        return self.channels is not None and shape_class[1] <= self.channels[0] and shape_class[2] >= self.channels[1]


@dataclass(frozen=True)
class Asked:
    """What a target's model of dispatch knows of a call.

    head_dims: K and V. arch: the GPU's architecture if some targets make builds for it alone, else "". few: True if sequences
    are split (`Target.splits`); None without a GPU. shape_class: that of the call's extent. chunk: the call's tokens of a chunk,
    None if it leaves them open. shared: how many value heads of a key head one kernel instance may handle. channels: whether the
    page has a decay for each channel. lengths: what the host knows (`Lengths`). inverts: whether the page has an inverse.
    bounded: whether the page gives a log decay that bounds how much of the state survives a token (`forgets`). block_rows: the
    rows of the diagonal blocks of a decayed product that one product computes, 1 if log decays have no lower bound. computed:
    whether kernels compute gates from numbers of a head, or norms of rows. of_eight: walks for each eight multiprocessors,
    rounded up, at most 9; 0 without a GPU. longest_share: tokens of the longest walk, in eighths of those that each
    multiprocessor has in all, at most 64; 0 if the host does not know. rows: whether each sequence is a row of the call's
    tensors. uneven: whether the host knows that one sequence has more than twice the mean.
    """

    head_dims: tuple[int, int]
    arch: str
    few: bool | None
    shape_class: tuple[int, ...]
    chunk: int | None
    shared: int = 1
    channels: bool = False
    lengths: Lengths = ""
    inverts: bool = False
    bounded: bool = False
    block_rows: int = 1
    computed: bool = False
    of_eight: int = 0
    longest_share: int = 0
    rows: bool = False
    uneven: bool = False

    @property
    def residuals(self) -> dict[str, str]:
        """The field `residuals` for pages whose errors would be the largest without it. docs/performance/errors.md has its price.
        Where nothing bounds what a state keeps, roundings of solutions add up in it. With a decay for each channel and no
        inverse, those of scores and of the state are most of the error; with an inverse and equal keys, those of decayed k."""
        if self.inverts and not self.bounded:
            return {"residuals": "@right_side,@solution"}
        return {"residuals": "@update" if self.inverts else "@state,@pair"} if self.channels else {}


@dataclass(frozen=True)
class Candidate:
    """A schedule that may serve a call. reason: why. chunk: tokens of a chunk, 0 for the call's. arch: the one architecture to
    build for, "" for text that runs on any. earlier: the schedule and the chunk of a build that runs before and declines
    some calls; None for a build that runs alone."""

    schedule: str | Schedule
    reason: str = ""
    chunk: int = 0
    arch: str = ""
    earlier: tuple[Schedule, int] | None = None


def several(heads: int) -> int:
    """The field `value_heads` for a number of heads: for one head 0, the default."""
    return heads if heads > 1 else 0


@dataclass(frozen=True)
class Space:
    """Candidates for `tune`: chunks, schedules, and values of their fields, the expected best first.

    arch: the one architecture to build for, "" for any. base: fields of all of them. implied: (schedule, architecture of the GPU,
    chunk, fields) -> fields that follow from these.
    """

    schedules: tuple[str, ...]
    fields: Mapping[str, tuple[Any, ...]]
    chunks: tuple[int, ...] = (64, 32, 128)
    arch: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    implied: Callable[[str, str, int, Mapping[str, Any]], Mapping[str, Any]] = lambda schedule, arch, chunk, fields: {}

    def candidates(self, arch: str) -> Iterator[tuple[int, Candidate]]:
        """Candidates for a GPU of this architecture, with how many changes lead to each. Fields about parts imply parts."""
        for chunk, name, *values in product(self.chunks, self.schedules, *self.fields.values()):
            changed = {f: v for (f, known), v in zip(self.fields.items(), values, strict=True) if v != known[0]}
            split = bool(changed.keys() & {"part_chunks", "warm_up", "longest_first"})
            how = changed.get("partition")
            fits = how == "decay" or "longest_first" not in changed and (how or not split)
            steps = len(changed.keys() - {"value_heads"}) - split + (chunk != self.chunks[0]) + (name != self.schedules[0])
            if steps <= MOST and fits:
                fields = {**self.base, **changed}
                fields |= self.implied(name, arch, chunk, fields)
                yield steps, Candidate(varied(name, self.arch, **fields) if fields else name, "", chunk, self.arch)
