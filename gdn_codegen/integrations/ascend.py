"""Ascend NPUs: the ops of sgl-kernel-npu, which SGLang calls there, and of vLLM-Ascend. Ours run on PTO.

    import gdn_codegen.integrations.ascend

Read at these versions (file: what is replaced).

- sgl-kernel-npu f425bdf1 (2026-08-21), python/sgl_kernel_npu/sgl_kernel_npu/fla. chunk.py: `chunk_gated_delta_rule_npu(q, k, v,
  g, beta, scale, initial_state, output_final_state=True, cu_seqlens, head_first, use_qk_l2norm_in_kernel)`.
  fused_sigmoid_gating_recurrent.py: `fused_sigmoid_gating_delta_rule_update_npu(A_log, a, dt_bias, softplus_beta,
  softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale, use_qk_l2norm_in_kernel, cu_seqlens,
  is_kda)`; later versions have fused_sigmoid_gating_recurrent_decode_optimized.py with `..._update_decode_npu`, without is_kda.
  States are [HV, K, V]. Modules of SGLang that have imported these get ours, too.
- vLLM-Ascend 182b75ea (2026-08-22), vllm_ascend. ops/triton/fla/chunk.py: `chunk_gated_delta_rule(q, k, v, g, beta, scale,
  initial_state, output_final_state, cu_seqlens, prebuilt_meta, head_first, use_qk_l2norm_in_kernel, chunk_indices, chunk_offsets,
  core_attn_out)`, states [HV, K, V]. ops/gdn.py, class AscendGatedDeltaNetAttention: `_chunk_gated_delta_rule_fused(q, k, v, g,
  beta, initial_state, cu_seqlens, scale)`, states [HV, V, K]. And torch.ops._C_ascend: `npu_recurrent_gated_delta_rule(query,
  key, value, state, *, beta, scale, actual_seq_lengths, ssm_state_indices, num_accepted_tokens, g, gk)`, a pool of [HV, V, K].

No value on the device is read.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..channels import fused_recurrent_kda
from ..host.tensors import _fail
from .chunk_states import chunk_states
from .names import Names

State = Tensor | None
_NAMES = Names("ascend")
#: The most draft tokens of a sequence, as the op of vLLM-Ascend has it.
MOST = 16


# --- sgl-kernel-npu --------------------------------------------------------------------------------------------------
def chunk_gated_delta_rule_npu(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = True, cu_seqlens: State = None, head_first: bool = False, use_qk_l2norm_in_kernel: bool = False
        ) -> tuple[Tensor, State, Tensor]:
    """o, the final states in float32 or None, and h [1, rows, HV, K, V], the states before chunks in float32
    (chunk_states.py)."""
    if head_first is not False:
        _fail("head_first", repr(head_first), "False")
    h, _, to = chunk_states(v, q.shape[-1], initial_state, None, cu_seqlens, False, torch.float32)
    o, final = ops.chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                                          cu_seqlens, **to)
    return o, final, h


def fused_sigmoid_gating_delta_rule_update_npu(
        A_log: Tensor, a: Tensor, dt_bias: Tensor, softplus_beta: float, softplus_threshold: float, q: Tensor, k: Tensor,
        v: Tensor, b: Tensor, initial_state_source: Tensor, initial_state_indices: Tensor, scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: State = None, is_kda: bool = False) -> Any:
    """Decoding in a pool [slots, HV, K, V], with raw gates a and b of [tokens, HV]; a of KDA is [tokens, HV K]. Rows of slot -1
    are zero."""
    rows = v.shape[:3]
    named: dict[str, Any] = dict(scale=scale, initial_state=initial_state_source, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                 state_indices=initial_state_indices[:len(q) if cu_seqlens is None else cu_seqlens.numel() - 1],
                 cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, softplus_beta=softplus_beta,
                 softplus_threshold=softplus_threshold)
    if is_kda:
        return fused_recurrent_kda(q, k, v, a.reshape(*rows, -1), b.reshape(rows), use_gate_in_kernel=True,
                                   use_beta_sigmoid_in_kernel=True, **named)[0]
    return ops.recurrent_gated_delta_rule(q, k, v, a.reshape(rows), b.reshape(rows), gate="raw", beta_form="sigmoid", **named)[0]


# --- vLLM-Ascend -----------------------------------------------------------------------------------------------------
def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, cu_seqlens: State = None, prebuilt_meta: Any = None, head_first: bool = False,
        use_qk_l2norm_in_kernel: bool = False, chunk_indices: State = None, chunk_offsets: State = None,
        core_attn_out: State = None) -> tuple[Any, ...]:
    """Prefill. Left to vLLM-Ascend where the parts of a prompt are on several devices, which then pass states on."""
    if importlib.import_module("vllm.distributed").get_pcp_group().world_size > 1:
        _fail("cu_seqlens", "parts of prompts on several devices", "whole prompts")
    return ops.chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                                      cu_seqlens, head_first, core_attn_out=core_attn_out)


def _fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor, scale: float
           ) -> tuple[Any, ...]:
    """Prefill with states [N, HV, V, K], which keep their dtype."""
    return ops.chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, True, True, cu_seqlens, state_v_first=True,
                                      state_dtype=initial_state.dtype)


def npu_recurrent_gated_delta_rule(
        query: Tensor, key: Tensor, value: Tensor, state: Tensor, *, beta: State = None, scale: float | None = None,
        actual_seq_lengths: State = None, ssm_state_indices: State = None, num_accepted_tokens: State = None, g: State = None,
        gk: State = None) -> Any:
    """Decoding in a pool [slots, HV, V, K]; o is [tokens, HV, V] like value. Slots of 0 (vLLM's null block) and less are skipped.

    query, key: [tokens, H, K], normalised. actual_seq_lengths: [N + 1], 0 and then the lengths, up to 16 (MAX_MTP there).
    ssm_state_indices: a slot for each token, also as [N, tokens of each], to which the state after it goes.
    num_accepted_tokens: [N]; a sequence starts from the slot of its token of this number, without it from its first token's.
    """
    if beta is None or g is None or ssm_state_indices is None or actual_seq_lengths is None:
        _fail("beta", "None for it, g, ssm_state_indices or actual_seq_lengths", "four tensors")
    if gk is not None:
        _fail("gk", "a tensor", "None")
    n, ends = actual_seq_lengths.numel() - 1, actual_seq_lengths.cumsum(0)
    slots = torch.threshold(ssm_state_indices.flatten(), 0, -1)
    if len(query) > n or num_accepted_tokens is not None:  # drafts: slots by sequence and token, -1 past a sequence's end
        tokens = torch.arange(min(len(query), MOST), device=ends.device)
        slots = slots[(ends[:-1, None] + tokens).clamp_max(len(slots) - 1)].where(tokens < actual_seq_lengths[1:, None], -1)
    o, _ = ops.recurrent_gated_delta_rule(
        query[None], key[None], value[None], g[None], beta[None], scale, state, state_v_first=True, state_indices=slots[:n],
        cu_seqlens=ends, num_accepted_tokens=None if num_accepted_tokens is None else num_accepted_tokens[:n])
    return o[0]


#: By module and name.
FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "sgl_kernel_npu.fla.chunk": {"chunk_gated_delta_rule_npu": chunk_gated_delta_rule_npu},
    "sgl_kernel_npu.fla.fused_sigmoid_gating_recurrent": {
        "fused_sigmoid_gating_delta_rule_update_npu": fused_sigmoid_gating_delta_rule_update_npu},
    "sgl_kernel_npu.fla.fused_sigmoid_gating_recurrent_decode_optimized": {
        "fused_sigmoid_gating_delta_rule_update_decode_npu": fused_sigmoid_gating_delta_rule_update_npu},
    "vllm_ascend.ops.triton.fla.chunk": {"chunk_gated_delta_rule": chunk_gated_delta_rule}}
#: Packages with modules that import these functions.
IMPORTERS = "sglang", "sgl_kernel_npu", "vllm_ascend", "vllm"


def enable() -> list[str]:
    """Replace the functions; the names that are replaced. ImportError if there is none of them."""
    names = _NAMES.replace(FUNCTIONS, "sgl-kernel-npu as commit f425bdf1, or vLLM-Ascend as commit 182b75ea", IMPORTERS)
    if "vllm_ascend.ops.triton.fla.chunk" not in sys.modules:
        return names
    methods = importlib.import_module("vllm_ascend.ops.gdn").AscendGatedDeltaNetAttention
    _NAMES.put(methods, "_chunk_gated_delta_rule_fused", _fused)
    _NAMES.put(torch.ops._C_ascend, "npu_recurrent_gated_delta_rule", npu_recurrent_gated_delta_rule)
    return _NAMES.names()


def disable() -> None:
    """Give the functions back."""
    _NAMES.restore()


enable()
