"""Ops for callers of the package: built on first use, then called like any function."""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .runtime.dispatch import build, key
from .runtime.load import function
from .schedule import Schedule


@lru_cache(maxsize=1024)
def _loaded(*wanted: Any) -> Callable[..., Any]:
    """The op of a build. Kept, so that a call costs a look-up."""
    return function(build(*wanted))


def chunk_gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                           scale: float | None = None, initial_state: torch.Tensor | None = None,
                           output_final_state: bool = False, cu_seqlens: torch.Tensor | None = None, *,
                           target: str = "auto", chunk_size: int | None = None, layout: str = "bthd",
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
    fn = _loaded(*key("gated_delta_rule", q, v, target, chunk_size, layout, schedule, sequences))
    result: Any = fn(q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                     cu_seqlens=cu_seqlens)
    return result  # type: ignore[no-any-return]
