"""Ops of the family's other members, with the names and argument orders of FLA's functions. Each is one call of its page.

All take the keywords of `chunk_gated_delta_rule` that suit their inputs: layout, out, state_v_first, state_dtype, final_state,
state_indices, inplace_final_state, checkpoint_chunks, target, chunk_size, schedule, batch_invariant, and so on. A keyword that no
op has, or that asks for what a member has not, raises ValueError.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .host.tensors import _fail
from .runtime.call import members
from .runtime.call.normalise import shape_of

State = Tensor | None
_call: Callable[..., tuple[Any, ...]] = members.call


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
                     output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
                     cu_seqlens_cpu: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """DeltaNet (arXiv:2406.06484). Returns (o, final state or None). Forward only.

    q, k: [B, T, H, K]; v: [B, T, HV, V], where HV is a multiple of H; beta: [B, T, HV]. scale: None means K ** -0.5.
    cu_seqlens_cpu: a copy of cu_seqlens on the CPU. It says how long the longest sequence is.
    """
    return _call("delta_rule", {"q": q, "k": k, "v": v, "beta": beta}, {"scale": scale},
                 dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                      use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel), {"cu_seqlens_cpu": cu_seqlens_cpu, **kwargs})


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: State = None, g_gamma: State = None, scale: float | None = None,
                     initial_state: State = None, output_final_state: bool = False, state_v_first: bool = False,
                     cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """Gated linear attention with a decay for each token and head. Returns (o, final state or None). Forward only.

    q, k: [B, T, H, K]; v: [B, T, HV, V], where HV is a multiple of H; g: [B, T, HV], logs of decays; None means no decay. g_gamma
    must be None. scale: None means K ** -0.5. cu_seqlens_cpu: as in `chunk_delta_rule`.
    """
    if g_gamma is not None:
        _fail("g_gamma", "a value", "None: a decay of each head is a part of g")
    if g is None:
        if kwargs.get("gate", "log") != "log" or kwargs.get("use_gate_in_kernel"):
            _fail("g", None, "a tensor, from which this form computes the gate")
        g = v.new_zeros(shape_of("v", v)[:3], dtype=torch.float32)
    return _call("simple_gla", {"q": q, "k": k, "v": v, "g": g}, {"scale": scale},
                 dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                      state_v_first=state_v_first), {"cu_seqlens_cpu": cu_seqlens_cpu, **kwargs})
