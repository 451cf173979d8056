"""Chooses the build that serves a call, with the reason: from a row of a table of measurements, else by a model of the GPU.

A call times nothing and compiles no alternatives.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import gcd, inf
from typing import Any

import torch

from ...schedule import ScheduleError, varied
from ...targets import DEFAULT_SCHEDULE
from ...targets.candidates import Asked, Candidate, Lengths, several
from ..build import CHUNKS, Build, lowered
from ..targets import choose
from . import tables
from .device import Facts, facts
from .page_facts import page_facts
from .pairs import of_candidate
from .request import DEFAULT_CHUNK, DTYPES, Call
from .size import Size, size_of

#: Schedules for any device, with changed fields. The first that fits sizes and dtype is taken. If K or V is above SPLIT, V is
#: split into blocks, so that an instance holds at most K x 64 entries of the state.
PORTABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    (DEFAULT_SCHEDULE, {}), (DEFAULT_SCHEDULE, {"v_block": 64}), (DEFAULT_SCHEDULE, {"v_block": 32}), ("replay", {"v_block": 32}),
    ("staged", {"v_block": 32}), ("staged", {"v_block": 16}))
SPLIT = 128
#: Chunks for calls that give none, where chunks of DEFAULT_CHUNK tokens have no room beside wide states.
SMALLER = (32, 16)
#: Columns of the state in an instance over single tokens, which has one warp, by the order of the state in memory: for many
#: walks, and for a few, so that more instances share the work. For K above 128 the second serves both, so that registers hold
#: them. In the order kv an instance reads pieces of so many columns, which should not be short. All targets take the same: in the
#: order vk 16 and 8 are the fastest or near it on TileLang and Triton (docs/performance/decoding.md).
TOKEN_COLUMNS = {"vk": (16, 8), "kv": (32, 16)}

#: From which class of mean tokens on walks start longest first, by what the host knows (Extent.lengths). Each instance looks for
#: its sequence, in 0.3 us or more. Where lengths are level, that saves nothing.
SEARCHED: dict[Lengths, float] = {"": 9, "dominated": 0, "level": inf}


@dataclass(frozen=True)
class Choice:
    """A build with the reasons for it, as pairs (what was chosen, reason)."""

    build: Build
    why: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        b, first = self.build, f"{self.build.earlier.name}, then " if self.build.earlier else ""
        return f"{b.target} {first}{b.name}: " + "; ".join(f"{what}: {reason}" for what, reason in self.why)


@lru_cache(maxsize=256)
def unfit(b: Build) -> str:
    """Why the build's schedule, or that of the build before it, does not fit its sizes, dtype or contract; "" if it fits."""
    if b.earlier is not None and (why := unfit(b.earlier)):
        return why
    try:
        p = lowered(b)
    except ScheduleError as e:
        return str(e)
    return b.of.too_large(p)


def fits(b: Build) -> bool:
    """True if the build's schedule fits its sizes, dtype and contract."""
    return not unfit(b)


#: Builds that were refused on a device, with the reason. Dispatch chooses others there.
_refused: dict[tuple[Build, torch.device], str] = {}


def refused(b: Build, device: torch.device) -> str:
    """Why the build was refused on the device; "" if it was not."""
    return _refused.get((b, device), "")


def refuse(b: Build, device: torch.device, why: str) -> bool:
    """Let dispatch choose another build on the device. False if this build was refused before, so that there is no other."""
    if refused(b, device):
        return False
    _refused[b, device] = why
    kept_choice.cache_clear()
    return True


def partitions() -> bool:
    """True if this process may split long sequences."""
    return os.environ.get("GDN_CODEGEN_PARTITION") != "0"


# --- candidates ------------------------------------------------------------------------------------------------------
def measured(b: Build, arch: str, devices: tuple[str, ...], shape_class: tuple[int, ...], chunk: int | None, shared: int = 1,
             splits: bool = True) -> Iterator[tuple[Build, str]]:
    """Builds from tables of measurements for a call, the best first. shared: how many value heads a kernel may batch. splits:
    whether sequences may be split."""
    for r in tables.nearest(devices, b, shape_class, chunk):
        if r.about.arch in ("", arch) and (partitions() and splits or not r.about.plan.partition):
            plan = r.about.plan
            if plan.part_chunks and r.far(shape_class):  # measured at other lengths; for this one the host's model decides
                plan = replace(plan, part_chunks=0)
            if plan.value_heads and shared % plan.value_heads:  # such as 3 value heads for each key head
                plan = replace(plan, value_heads=several(gcd(shared, plan.value_heads)))
            yield replace(r.about, schedule=plan, contract=b.contract, heads=b.heads, dtype=b.dtype), str(r)


def by_token(b: Build, few: bool, one: bool = False) -> Build:
    """The build whose chunks are single tokens. An instance has one warp, and the state in the order that memory has.

    few: whether there are so few walks that an instance holds fewer columns. So does one over a tree whose initial states are
    wide. one: whether sequences have one token. On an H100 states in 16 bits and the order kv then take 0.85 to 0.92 of the time
    if groups of tokens are computed late; with four tokens they take 1.2 (64 and 256 sequences)."""
    c = b.contract
    kept = c.parents and (c.state_layout, c.state_dtype == "float32") != ("vk", False)  # registers hold initial states as well
    columns = TOKEN_COLUMNS[c.state_layout][few or b.head_dim_k > 128 or kept]
    fields: dict[str, Any] = {"v_block": columns, "state_layout": c.state_layout}
    if "warps" not in b.of.lowering.unused:
        fields["warps"] = 1
    narrow = (c.state_layout, c.state_dtype == "float32") == ("kv", False)
    if one and narrow and not few and "token_groups" not in b.of.lowering.unused:
        fields["token_groups"] = "late"
    return replace(b, chunk=1, schedule=varied(DEFAULT_SCHEDULE, **fields))


def modelled(b: Build, arch: str, few: bool | None, shape_class: tuple[int, ...], chunk: int | None, **asked: Any
             ) -> Iterator[tuple[Build, str]]:
    """Builds in the model's order: the candidates of the target's own model, then portable schedules. asked: fields of Asked."""
    if chunk == 1 and few is not None:
        yield by_token(b, few), "chunks of one token"
    head_dims = b.head_dim_k, b.head_dim_v
    portable = (Candidate(varied(name, **fields) if fields else name, "runs on any device", n)
                for n in (b.chunk, *(SMALLER if chunk is None else ())) for name, fields in PORTABLE[max(head_dims) > SPLIT:])
    model = b.of.model(Asked(head_dims, arch, few, shape_class, chunk, **asked, **page_facts(b)))
    for x in chain(model, portable):
        found = of_candidate(b, x)
        if found is not None and (partitions() or not (found.plan.partition or found.earlier)):
            yield found, x.reason


def _served(b: Build) -> Build:
    """The build without those promises of the caller that its schedule does not use."""
    return b if b.plan.warms_up else replace(b, contract=b.contract.unpromised())


def first(device: torch.device, *sources: tuple[str, Iterable[tuple[Build, str]]]
          ) -> tuple[Choice | None, tuple[tuple[str, str], ...]]:
    """The first build that fits and is not refused on the device, or None; and (build, reason) for each build before it.
    sources: (name, builds with the reason to take them)."""
    why: list[tuple[str, str]] = []
    for source, found in sources:
        for x, reason in found:
            against = unfit(x) or refused(_served(x), device)
            if not against:
                return Choice(x, (*why, (f"chosen by {source}", reason))), tuple(why)
            why.append((f"not {x.name}", against))
    return None, tuple(why)


def said(c: Choice) -> Choice:
    """Returns the choice; with GDN_DEBUG=1 prints it first."""
    if os.environ.get("GDN_DEBUG", "0") not in ("", "0"):
        print(f"gdn_codegen: {c}", file=sys.stderr)
    return c


def _check_fits(b: Build, arch: str, few: bool | None, shape_class: tuple[int, ...]) -> None:
    """Refuse a build that does not fit the GPU, before its kernels compile. The ValueError names the chunks that fit."""
    against = unfit(b)
    if against:
        chunks = [n for n in CHUNKS[1:] if any(fits(x) for x, _ in modelled(replace(b, chunk=n), arch, few, shape_class, n))]
        raise ValueError(f"chunk_size: got {b.chunk}, with K = {b.head_dim_k}, V = {b.head_dim_v} in {b.dtype}; accepted: "
                         f"{', '.join(map(str, chunks)) or 'none for these K and V'} ({against})")


def in_columns(c: Choice, device: torch.device) -> Choice:
    """The choice with V in blocks, so that more instances share the work, where that gives the same bits."""
    b = c.build
    columns = b.of.lowered_for(b.arch).columns
    if not columns or b.plan.v_block or b.head_dim_v <= columns:
        return c
    narrow = replace(b, schedule=replace(b.plan, v_block=columns))
    if unfit(narrow) or refused(_served(narrow), device):
        return c
    return Choice(narrow, (*c.why, (f"blocks of {columns} columns", "few walks, and the bits are the same")))


def longest_first(c: Choice, device: torch.device) -> Choice:
    """The choice with walks of the longest sequences first, if its target can do that. Results have the same bits."""
    b = c.build
    if "by_length" in b.of.lowered_for(b.arch).unused or b.plan.partition:
        return c
    ordered = replace(b, schedule=replace(b.plan, by_length=True))
    if unfit(ordered) or refused(_served(ordered), device):
        return c
    return Choice(ordered, (*c.why, ("longest first", "lengths may differ, and walks are more than run at a time")))


@lru_cache(maxsize=1024)
def kept_choice(call: Call, target: str, size: Size, on: Facts) -> Choice:
    """The build for calls that differ in extent alone. target: the call's, or what is chosen for "auto"."""
    x, arch, chunk = call.request, on.arch, call.request.chunk
    b = Build(target, chunk or DEFAULT_CHUNK, x.layout, x.algorithm, x.schedule or DEFAULT_SCHEDULE, DTYPES[call.dtype],
              *call.head_dims, size.heads, contract=call.contract)
    if x.schedule is not None:
        chosen = Choice(b, (("schedule", "asked for"),))
    else:
        rows = () if x.batch_invariant or size.uneven else (
            (r, why) for r, why in measured(b, arch, on.names, size.shape_class, chunk, size.shared, not size.short)
            if r.plan.partition not in (None, "pipelined") or not (size.unsure and size.few))
        model = modelled(b, arch, size.few, size.shape_class, chunk, **size.asked)
        found, why = first(call.device, ("table", rows), ("model", ((m.for_shared(on.shared_kib), why) for m, why in model)))
        chosen = found or Choice(b.for_shared(on.shared_kib), why)
        chosen = in_columns(chosen, call.device) if size.idle else chosen
        if size.crowded and not x.batch_invariant and size.shape_class[2] >= SEARCHED[size.lengths]:
            chosen = longest_first(chosen, call.device)
    fixed = "fixed, so that prompts may be cut at its multiples" if x.batch_invariant and not x.chunk_size else "asked for"
    why = (*chosen.why, ("chunk", fixed if chunk else "left open"))
    chosen = said(Choice(_served(chosen.build), why))
    if x.schedule is None and arch in chosen.build.of.sized_for:
        _check_fits(chosen.build, arch, size.few, size.shape_class)
    return chosen


def choice(call: Call, on: Facts | None = None) -> Choice:
    """The build for a call: from its schedule if it names one, else from a table, else from the model for its GPU.

    on: the device, where it need not be here; None for the call's own. Raises ValueError naming a bad argument.
    """
    on = on or facts(call.device)
    target = choose(call.device.type, call.request.target)
    size = size_of(call.extent, target, on)
    idle = call.request.batch_invariant and 0 < 2 * call.walks <= on.units
    return kept_choice(call, target, replace(size, idle=True) if idle else size, on)
