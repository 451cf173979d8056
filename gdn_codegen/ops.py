"""Ops for callers of the package: built on first use, then called like any function."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from .runtime.build import CHUNKS, DEFAULT_SCHEDULE, DEFAULTS, LAYOUTS, TARGETS, Build, lowered
from .runtime.load import function
from .runtime.targets import choose
from .schedule import Schedule, ScheduleError, named
from .schedule.pipelines import ARCHS

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
def _build(algorithm: str, dtype: torch.dtype, device: torch.device, heads: tuple[int, int], head_dim_k: int, head_dim_v: int,
           target: str, chunk_size: int, layout: str, schedule: str | Schedule | None, few: bool) -> Build:
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
              heads if target == "pto" else None)
    arch = architecture(device) if schedule is None else ""
    if (target, arch) in ARCHS:
        plan = replace(named(DEFAULTS[arch]), partition="decay") if few else DEFAULTS[arch]
        own = replace(b, schedule=plan, arch=arch)
        b = own if fits(own) else b
    if os.environ.get("GDN_DEBUG", "0") not in ("", "0"):
        print(f"gdn_codegen: {b}", file=sys.stderr)
    return b


def _key(algorithm: str, q: torch.Tensor, v: torch.Tensor, target: str, chunk_size: int, layout: str,
         schedule: str | Schedule | None, sequences: int | None = None) -> tuple[Any, ...]:
    """What a build depends on: among them, whether twice as many walks find room on the GPU."""
    for name, x in (("q", q), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            raise ValueError(f"{name}: got {tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__}; "
                             "accepted: a tensor of rank 4")
    at = 2 if layout == "bthd" else 1
    heads = (q.shape[at], v.shape[at])
    few = 2 * (sequences or q.shape[0]) * heads[1] <= units(q.device)
    return algorithm, q.dtype, q.device, heads, q.shape[3], v.shape[3], target, chunk_size, layout, schedule, few


def build_for(algorithm: str, q: torch.Tensor, v: torch.Tensor, target: str, chunk_size: int, layout: str,
              schedule: str | Schedule | None, sequences: int | None = None) -> Build:
    """The build that serves these tensors, a batch of rows or so many packed sequences. Without a schedule, the one for
    their GPU's architecture where it fits, in parts where sequences and heads fill half of it at most."""
    return _build(*_key(algorithm, q, v, target, chunk_size, layout, schedule, sequences))


@lru_cache(maxsize=1024)
def _loaded(*key: Any) -> Callable[..., Any]:
    """The op of a build. Kept, so that a call costs a look-up."""
    return function(_build(*key))


def chunk_gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                           scale: float | None = None, initial_state: torch.Tensor | None = None,
                           output_final_state: bool = False, cu_seqlens: torch.Tensor | None = None, *,
                           target: str = "auto", chunk_size: int = 64, layout: str = "bthd",
                           schedule: str | Schedule | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet prefill (arXiv:2412.06464): o and the final state.

    q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H; g (log decay, float32 kept), beta: [B, T, HV]; layout
    "bhtd" swaps T and heads. float16, bfloat16 or float32; products sum in float32. scale defaults to K ** -0.5.
    initial_state: [N, HV, K, V]; the final state is returned in float32. cu_seqlens: [N + 1], int32 or int64, packs N
    sequences into B = 1. target: "auto" picks what runs on q's device; pto's kernels are compiled for H and HV, others
    for any. schedule: None picks "walk" with kernels for Hopper alone where the GPU is one and the sizes fit, in parts (exact
    to 2^-16 of the state in float16; GDN_CODEGEN_PARTITION=0 turns them off) where sequences and heads are few; else "fused".
    Raises ValueError naming a bad argument.
    """
    sequences = cu_seqlens.numel() - 1 if isinstance(cu_seqlens, torch.Tensor) else None
    fn = _loaded(*_key("gated_delta_rule", q, v, target, chunk_size, layout, schedule, sequences))
    result: Any = fn(q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                     cu_seqlens=cu_seqlens)
    return result  # type: ignore[no-any-return]
