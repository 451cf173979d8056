"""Chooses the build that serves a decoding step, with the reason: from a row of the table of decoding, else by a model.

A step has 1 to 16 new tokens per sequence. It mostly reads and writes states. So its time depends on the target, and on the
number of columns of a state that an instance holds. The algorithm is that of prefill, in one kernel. Up to FEW tokens of a
sequence are chunks of one token each, whose state stays in registers; more are one chunk with products. All targets that run on
the tensors' device are considered.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ...devices import Cores
from ...schedule import Schedule, named, varied
from ...targets import DEFAULT_SCHEDULE, find
from ..build import Build
from ..targets import choose, runs
from . import tables
from .choose import TOKEN_COLUMNS, Choice, by_token, first, said
from .device import Facts, facts
from .request import DECODE_CHUNK, DTYPES, Call
from .tables import Extent

#: The fewest columns of the state that an instance holds, where it may have as many registers as it wants.
COLUMNS = 32
#: By device: targets where the call leaves it open, the model's first choice first. On an H200 256 sequences of one token, in
#: chunks of 16, took Triton's kernel 423 us and TileLang's 2865 (heads 16/32, states in bfloat16).
PREFERRED = {"cuda": ("triton", "tilelang")}
#: The same for chunks of one token. TileLang's call takes half of the host's time of Triton's.
PREFERRED_BY_TOKEN = {"cuda": ("tilelang", "triton")}
#: The most tokens of a sequence that are chunks of one token each. On an H100 with 4 tokens they take 0.6 to 0.9 of the time of a
#: chunk of 16 tokens, with 8 up to 1.2 (docs/performance.md).
FEW = 4
#: Entries of the state in a TileLang instance on a GPU, which has one warp where chunks are of 16 tokens: with 128 x 32 it spills
#: 112 bytes per thread, with 128 x 128 5.6 KB (nvcc, sm_90a).
ENTRIES = 128 * 32


def by_tokens(x: Extent) -> bool:
    """Whether the tokens of a sequence are few enough to be chunks of their own."""
    return x.tokens <= FEW * x.sequences


def targets(target: str, device: torch.device, x: Extent, by_token_only: bool) -> tuple[str, ...]:
    """The targets that a call of this extent may use, the preferred one first. by_token_only: whether all chunks are tokens."""
    if target != "auto":
        return (choose(device.type, target),)
    preferred = PREFERRED_BY_TOKEN if by_token_only or by_tokens(x) else PREFERRED
    here = tuple(t for t in preferred.get(device.type, ()) if runs(t, device.type))
    return here or (choose(device.type),)


def _less(columns: int) -> int:
    """The next smaller number of columns. It is a power of two, because tiles are split into such blocks."""
    return columns // 2 if columns & (columns - 1) == 0 else 64 if columns > 64 else 32


def columns(b: Build, walks: int, units: int) -> Iterator[int]:
    """Columns of the state that an instance may hold, the best first; 0 for all. As many as leave one walk for each of a GPU's
    units, and no more than registers hold; where that does not fit, fewer."""
    n = b.head_dim_v
    if not units or "cuda" not in b.of.runs_on:
        yield 0
        while b.contract.by_token and n > 16:  # where that does not fit, other steps have several kernels
            n = _less(n)
            yield n
        return
    while n > COLUMNS and walks * (b.head_dim_v // n) < units:
        n = max(_less(n), COLUMNS)
    while b.target == "tilelang" and n > 16 and b.head_dim_k * n > ENTRIES:
        n = _less(n)
    yield 0 if n == b.head_dim_v else n
    while n > 16:
        n = _less(n)
        yield n


def plan(b: Build, n: int, on_gpu: bool) -> str | Schedule:
    """The schedule of one kernel whose instances have `n` columns of the state, 0 for all.

    On a GPU TileLang's kernel holds the state in the order that memory has. Otherwise a warp would read two bytes from each of
    32 rows at a time.
    """
    fields: dict[str, Any] = {"v_block": n} if n else {}
    if on_gpu and b.target == "tilelang" and b.contract.state_layout != named(DEFAULT_SCHEDULE).state_layout:
        fields["state_layout"] = b.contract.state_layout
    return varied(DEFAULT_SCHEDULE, **fields) if fields else DEFAULT_SCHEDULE


def modelled(b: Build, x: Extent, units: int, wanted: Sequence[str], any_device: bool = False) -> Iterator[tuple[Build, str]]:
    """Builds in the order in which the model wants them. any_device: whether the chunks are of one token without a GPU, too."""
    for target in wanted:
        mine = replace(b, target=target, heads=(x.H, x.HV) if find(target).head_counts else None)
        drafts = b.contract.by_token and isinstance(mine.of.lowering.device, Cores)  # whose tiles have rows for 16 tokens
        if not drafts and (b.contract.by_token or ((units or any_device) and by_tokens(x))):
            few = x.walks * b.head_dim_v // TOKEN_COLUMNS[b.contract.state_layout][False] <= 2 * units
            one = x.tokens <= x.sequences and not b.contract.by_token
            yield by_token(mine, few, one), ("states by token" if b.contract.by_token else
                                        f"at most {FEW} tokens of a sequence on average")
        if b.contract.by_token and not drafts:
            continue
        for n in columns(mine, x.walks, units):
            yield replace(mine, schedule=plan(mine, n, units > 0)), "one kernel for a step"


def measured(b: Build, x: Extent, devices: tuple[str, ...], wanted: Sequence[str]) -> Iterator[tuple[Build, str]]:
    """Builds that tables have for such a step, the best first."""
    for r in tables.steps(devices, b, x.shape_class, wanted):
        yield replace(r.about, contract=b.contract, dtype=b.dtype), str(r)


@lru_cache(maxsize=1024)
def kept_choice(call: Call, x: Extent, wanted: tuple[str, ...], on: Facts) -> Choice | None:
    """The choice for calls of one extent. wanted: targets, the preferred first."""
    b = Build(wanted[0], DECODE_CHUNK, call.request.layout, call.request.algorithm, DEFAULT_SCHEDULE, DTYPES[call.dtype],
              *call.head_dims, contract=call.contract.unpromised())
    invariant = call.request.batch_invariant
    model = ((m.for_shared(on.shared_kib), why) for m, why in modelled(b, x, on.units, wanted, invariant))
    found, _ = first(call.device, ("table", () if invariant else measured(b, x, on.names, wanted)), ("model", model))
    return None if found is None else said(found)


def choice(call: Call, on: Facts | None = None) -> Choice | None:
    """The build for a decoding step that names no schedule; None if no schedule of one kernel fits.

    on: the device, where it need not be here; None for the call's own.
    """
    wanted = targets(call.request.target, call.device, call.extent, call.contract.by_token)
    return kept_choice(call, call.extent, wanted, on or facts(call.device))
