"""Which build serves a call: by target, device, sizes and how many walks find room on it."""
from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..schedule import Schedule, ScheduleError, named
from ..schedule.contract import PLAIN, Contract
from ..schedule.pipelines import ARCHS
from .build import CHUNKS, DEFAULT_SCHEDULE, DEFAULTS, LAYOUTS, TARGETS, Build, lowered
from .targets import choose

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@lru_cache(maxsize=256)
def fits(b: Build) -> bool:
    """Whether the build's schedule fits its sizes and dtype."""
    try:
        lowered(b)
    except ScheduleError:
        return False
    return True


@lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """The architecture of a GPU that some build is made for, or ""."""
    return {(9, 0): "sm_90a"}.get(torch.cuda.get_device_capability(device), "") if device.type == "cuda" else ""


@lru_cache(maxsize=64)
def units(device: torch.device) -> int:
    """Multiprocessors of a GPU, 0 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@lru_cache(maxsize=1024)
def build(algorithm: str, dtype: torch.dtype, device: torch.device, heads: tuple[int, int], head_dim_k: int, head_dim_v: int,
          target: str, chunk_size: int, layout: str, schedule: str | Schedule | None, few: bool, contract: Contract = PLAIN) -> Build:
    """The build of a key."""
    if dtype not in _NAMES:
        raise ValueError(f"q: got {dtype}; accepted: {', '.join(map(str, _NAMES))}")
    if target != "auto" and target not in TARGETS:
        raise ValueError(f"target: got {target!r}; accepted: auto, {', '.join(TARGETS)}")
    if chunk_size not in CHUNKS:
        raise ValueError(f"chunk_size: got {chunk_size!r}; accepted: {', '.join(map(str, CHUNKS))}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; accepted: {', '.join(LAYOUTS)}")
    target = choose(device.type) if target == "auto" else target
    b = Build(target, chunk_size, layout, algorithm, schedule or DEFAULT_SCHEDULE, _NAMES[dtype], head_dim_k, head_dim_v,
              heads if target == "pto" else None, contract=contract)
    arch = architecture(device) if schedule is None else ""
    if (target, arch) in ARCHS:
        plan = replace(named(DEFAULTS[arch]), partition="decay") if few else DEFAULTS[arch]
        own = replace(b, schedule=plan, arch=arch)
        b = own if fits(own) else b
    if os.environ.get("GDN_DEBUG", "0") not in ("", "0"):
        print(f"gdn_codegen: {b}", file=sys.stderr)
    return b


def key(algorithm: str, q: torch.Tensor, v: torch.Tensor, target: str, chunk_size: int, layout: str,
        schedule: str | Schedule | None, sequences: int | None = None, contract: Contract = PLAIN) -> tuple[Any, ...]:
    """What a build depends on: among them, whether twice as many walks find room on the GPU."""
    for name, x in (("q", q), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            raise ValueError(f"{name}: got {tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__}; "
                             "accepted: a tensor of rank 4")
    at = 2 if layout == "bthd" else 1
    heads = (q.shape[at], v.shape[at])
    few = 2 * (sequences or q.shape[0]) * heads[1] <= units(q.device)
    return algorithm, q.dtype, q.device, heads, q.shape[3], v.shape[3], target, chunk_size, layout, schedule, few, contract


def build_for(algorithm: str, q: torch.Tensor, v: torch.Tensor, target: str, chunk_size: int, layout: str,
              schedule: str | Schedule | None, sequences: int | None = None, contract: Contract = PLAIN) -> Build:
    """The build that serves these tensors, a batch of rows or so many packed sequences. Without a schedule, the one for
    their GPU's architecture where it fits, in parts where sequences and heads fill half of it at most."""
    return build(*key(algorithm, q, v, target, chunk_size, layout, schedule, sequences, contract))
