"""Megatron-LM: layers of Gated DeltaNet, GDN-2 and Gated DeltaProduct, in both directions.

    import gdn_codegen.integrations.megatron     # before the model is built

Read at commit d98e8a64 of NVIDIA/Megatron-LM (2026-08-22): megatron/core/ssm/gated_delta_net/{common,gdn,gdn2}.py and
megatron/core/ssm/gated_delta_product.py. The layers bind a function when they are built. Their keywords are FLA's. In
megatron-core 0.16.1 megatron/core/ssm/gated_delta_net.py looks the functions up in each call.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..channels import chunk_gdn2
from ..family import chunk_gated_delta_product
from ..ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .names import Names

_SSM = "megatron.core.ssm"
_NAMES = Names("megatron")


def _update(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
            initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
            cu_seqlens: Tensor | None = None, state: Tensor | None = None, state_indices: Tensor | None = None
            ) -> tuple[Any, ...]:
    """`fused_recurrent_gated_delta_rule_update` of megatron/core/ssm/ops/gdp: decoding in place in a cache.

    state: [slots, HV, K, V], float32 as there. state_indices: [N], -1 for a row of padding, whose o is zero; None means slot i
    for row i. The result's second part is the cache itself.
    """
    said: dict[str, Any] = dict(scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)
    if state is None:
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=initial_state,
                                                output_final_state=output_final_state, **said)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    cache = state if state_indices is not None else state[:rows]
    o, *_ = fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=cache, state_indices=state_indices,
                                             inplace_final_state=True, output_final_state=True, **said)
    return o, state


#: By module and name. The functions of torch serve `deterministic_mode`: our ops give the same bits each time, and take packed
#: sequences, which those refuse.
FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    f"{_SSM}.gated_delta_net": {"chunk_gated_delta_rule": chunk_gated_delta_rule,  # a module before it was a package
                                "torch_chunk_gated_delta_rule": chunk_gated_delta_rule},
    f"{_SSM}.gated_delta_net.common": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    f"{_SSM}.gated_delta_net.gdn": {"chunk_gated_delta_rule": chunk_gated_delta_rule,
                                    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
                                    "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule},
    f"{_SSM}.gated_delta_net.gdn2": {"chunk_gdn2": chunk_gdn2, "torch_chunk_gdn2": chunk_gdn2},
    f"{_SSM}.gated_delta_product": {"chunk_gated_delta_product": chunk_gated_delta_product,
                                    "fused_recurrent_gated_delta_rule_update": _update}}


def enable() -> list[str]:
    """Replace the functions; the names that are replaced. ImportError if this Megatron-LM has none of them."""
    return _NAMES.replace(FUNCTIONS, "megatron-core 0.16.1, or commit d98e8a64 of NVIDIA/Megatron-LM")


def disable() -> None:
    """Give the functions back. Layers that were built meanwhile keep ours."""
    _NAMES.restore()


enable()
