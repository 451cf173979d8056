"""A package `vllm` with the names and signatures that the plug-in knows, and layers that call as vLLM's do.

Read in 0.33.0 and at 00545a8a (layers/mamba/gdn/qwen_gdn_linear_attn.py; the first adds checkpoints, with
layers/mamba/checkpoint.py, v1/attention/backends/gdn_attn.py, v1/worker/workspace.py), at eda8c32a
(layers/mamba/gdn/kda_linear_attn.py), and at 81c0d5f8, 03c20345, 0eff6aee, 055e47c2 and 18dc5a76
(third_party/flash_linear_attention/ops). What functions compute is written here: token recurrences in float64, rounded to the
dtypes that vLLM has. Convolutions give a copy of their input.

`write` makes the package of the text of the functions and classes below, so that each runs among the names of its module.
"""
from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CONTEXT = SimpleNamespace(attn_metadata=None)


# --- vllm.forward_context, vllm.v1.attention.backends.gdn_attn, vllm.model_executor.layers.mamba.mamba_utils ----------
def get_forward_context():
    return CONTEXT


@dataclass
class MambaPrefillCheckpointMetadata:
    checkpoint_offsets: torch.Tensor
    state_indices: torch.Tensor


@dataclass
class GDNFlashInferCheckpointPlan:
    every_n_tokens: int
    num_checkpoints: int
    cu_starts: torch.Tensor
    rows: torch.Tensor


@dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    checkpoint: MambaPrefillCheckpointMetadata | None = None
    flashinfer_checkpoint_plan: GDNFlashInferCheckpointPlan | None = None
    has_initial_state: torch.Tensor | None = None
    spec_query_start_loc: torch.Tensor | None = None
    non_spec_query_start_loc: torch.Tensor | None = None
    spec_state_indices_tensor: torch.Tensor | None = None
    non_spec_state_indices_tensor: torch.Tensor | None = None
    spec_sequence_masks: torch.Tensor | None = None
    spec_token_indx: torch.Tensor | None = None
    non_spec_token_indx: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None
    chunk_indices: torch.Tensor | None = None
    chunk_offsets: torch.Tensor | None = None
    prefill_query_start_loc: torch.Tensor | None = None
    prefill_state_indices: torch.Tensor | None = None
    prefill_has_initial_state: torch.Tensor | None = None
    aiter_prefill_metadata: object | None = None
    nums_dict: dict | None = None


class MambaStateShapeCalculator:
    @classmethod
    def gated_delta_net_state_shape(cls, tp_world_size, num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_kernel_size,
                                    num_spec=0):
        channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
        return (conv_kernel_size - 1 + num_spec, channels), (num_v_heads, head_v_dim, head_k_dim)


def is_conv_state_dim_first():
    return False


# --- what the ops below share ----------------------------------------------------------------------------------------
def walk(q, k, v, g, beta, scale, S, norm):
    """Tokens of one sequence in float64: q, k [T, H, K]; v [T, HV, V]; g [T, HV] or [T, HV, K]; beta [T, HV]; S [HV, V, K]. A
    list of (o, state) for each token."""
    q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, S))
    if norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    found = []
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    for t in range(len(q)):
        S = S * (g[t].exp()[:, None, None] if g.ndim == 2 else g[t].exp()[:, None, :])
        u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
        S = S + u[:, :, None] * k[t][:, None, :]
        found.append((scale * torch.einsum("hvk,hk->hv", S, q[t]), S))
    return found


def decode(q, k, v, g, beta, scale, pool, ends, indices, accepted, norm):
    """Sequences from slots of a pool, which are updated in place; rows of slots of 0 or less stay zero."""
    o, ends = torch.zeros_like(v), ends.tolist()
    for n in range(len(ends) - 1):
        own = indices[n] if indices.ndim == 2 else indices[n:n + 1]
        first = int(own[0 if accepted is None else int(accepted[n]) - 1])
        if first <= 0 or ends[n + 1] == ends[n]:
            continue
        s = slice(ends[n], ends[n + 1])
        for t, (row, S) in enumerate(walk(q[0, s], k[0, s], v[0, s], g[0, s], beta[0, s], scale, pool[first], norm)):
            o[0, ends[n] + t] = row
            at = int(own[min(t, len(own) - 1)])
            if at > 0:
                pool[at] = S
    return o, pool


def prefill(q, k, v, g, beta, scale, states, ends, norm):
    """Sequences from dense states. Their final states are float32."""
    o, ends, final = torch.empty_like(v), ends.tolist(), states.float().clone()
    for n in range(len(ends) - 1):
        s = slice(ends[n], ends[n + 1])
        found = walk(q[0, s], k[0, s], v[0, s], g[0, s], beta[0, s], scale, states[n], norm)
        for t, (row, _) in enumerate(found):
            o[0, ends[n] + t] = row
        if found:
            final[n] = found[-1][1]
    return o, final


def gate(raw, A_log, bias):
    """Log decays, for a number or a row of channels for each head. softplus as torch has it: linear above 20."""
    A = A_log.double().flatten().exp()
    x = raw.double() + bias.double().view(raw.shape[2:])
    return -(A if raw.ndim == 3 else A[:, None]) * torch.nn.functional.softplus(x)


# --- vllm.third_party.flash_linear_attention.ops ---------------------------------------------------------------------
@torch.compiler.disable
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                           chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None):
    assert q.is_contiguous() and initial_state.is_contiguous()
    o, final = prefill(q, k, v, g, beta, scale or k.shape[-1] ** -0.5, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)
    if core_attn_out is not None:
        core_attn_out.view(-1)[:o.numel()] = o.view(-1)
    return o, final if output_final_state else None


def fused_recurrent_gated_delta_rule(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
                                     cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
                                     use_qk_l2norm_in_kernel=False):
    assert inplace_final_state and q.is_contiguous()
    return decode(q, k, v, g, torch.ones_like(g) if beta is None else beta, scale or k.shape[-1] ** -0.5, initial_state,
                  cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel)


def fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
                                                   use_qk_l2norm_in_kernel=False):
    assert out.is_contiguous() and len(ssm_state_indices) == len(mixed_qkv)
    HV, V, K = initial_state.shape[1:]
    width = (mixed_qkv.shape[1] - HV * V) // 2
    q, k, v = (x.reshape(1, len(x), -1, n) for x, n in zip(mixed_qkv.split((width, width, HV * V), 1), (K, K, V), strict=True))
    o, _ = decode(q, k, v, gate(a[None], A_log, dt_bias), b[None].double().sigmoid(), scale, initial_state,
                  torch.arange(len(out) + 1), ssm_state_indices, None, use_qk_l2norm_in_kernel)
    out.copy_(o[0][:, None])
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
        A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None, inplace_final_state=True,
        cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False, is_kda=False):
    assert inplace_final_state and not is_kda and beta == 1 and threshold == 20 and q.is_contiguous() and v.is_contiguous()
    T = q.shape[1]
    return decode(q, k, v, gate(a[None, :T], A_log, dt_bias), b[None, :T].double().sigmoid(), scale or k.shape[-1] ** -0.5,
                  initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel)


def fused_post_conv_prep(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm=True,
                         output_g_exp=False):
    assert apply_l2norm and not output_g_exp
    width, L = num_k_heads * head_k_dim, len(conv_output)
    q, k, v = conv_output.split((width, width, conv_output.shape[1] - 2 * width), 1)
    q, k = (x.reshape(L, num_k_heads, head_k_dim).float() for x in (q, k))
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(v.dtype) for x in (q, k))
    g = gate(a[None], A_log, dt_bias)[0].float()
    return q, k, v.reshape(L, len(A_log), head_v_dim).contiguous(), g, b.float().sigmoid()


def fused_recurrent_kda(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
                        use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None, **kwargs):
    return decode(q, k, v, g, beta, scale or k.shape[-1] ** -0.5, initial_state, cu_seqlens, ssm_state_indices, None,
                  use_qk_l2norm_in_kernel)


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              cu_seqlens=None, **kwargs):
    return prefill(q, k, v, g, beta, scale or k.shape[-1] ** -0.5, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)


def chunk_kda_with_fused_gate(q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False,
                              use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    return prefill(q, k, v, gate(raw_g, A_log, g_bias), beta, scale or k.shape[-1] ** -0.5, initial_state, cu_seqlens,
                   use_qk_l2norm_in_kernel)


def fused_kda_gate(g, A, head_k_dim, g_bias=None, beta=1.0, threshold=20.0):
    return gate(g.view(1, len(g), A.numel(), head_k_dim), A, g_bias)[0].float()


# --- vllm.model_executor.layers.mamba.ops.causal_conv1d --------------------------------------------------------------
def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
                     metadata=None, validate_data=False):
    return x.transpose(0, 1).clone().transpose(0, 1)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
                         query_start_loc=None, max_query_len=-1, validate_data=False):
    return x.clone()


# --- vllm.model_executor.layers.mamba.checkpoint, vllm.v1.worker.workspace --------------------------------------------
class MambaPrefillCheckpointExporter:
    def __init__(self, state_len=None):
        self.state_len = state_len

    def export(self, checkpoint, *, raw_qkv, conv_state, cu_seqlens, recurrent_checkpoint=None, recurrent_state=None,
               recurrent_rows=None, token_indices=None):
        """conv_state: [slots, channels, width]."""
        for n, (offset, slot) in enumerate(zip(checkpoint.checkpoint_offsets, checkpoint.state_indices, strict=True)):
            if offset > 0 and slot != 0:
                end = int(cu_seqlens[n] + offset)
                conv_state[slot, :, :self.state_len] = raw_qkv[end - self.state_len:end].T
                if recurrent_checkpoint is not None:
                    recurrent_state[slot] = recurrent_checkpoint[n if recurrent_rows is None else recurrent_rows[n]]


def current_workspace_manager():
    return SimpleNamespace(get_simultaneous=lambda *about: [torch.empty(shape, dtype=dtype) for shape, dtype in about])


# --- vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn -------------------------------------------------------
def fi_chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, use_qk_l2norm_in_kernel=True,
                              state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, use_cp="auto"):
    """With states after every so many tokens of each sequence."""
    assert not use_qk_l2norm_in_kernel
    for n in range(len(cu_seqlens) - 1 if state_checkpoints is not None else 0):
        s = slice(cu_seqlens[n], cu_seqlens[n + 1])
        found = walk(q[0, s], k[0, s], v[0, s], g[0, s], beta[0, s], 1, initial_state[n], False)
        for i in range(int(checkpoint_cu_starts[n + 1] - checkpoint_cu_starts[n])):
            state_checkpoints[checkpoint_cu_starts[n] + i] = found[(i + 1) * checkpoint_every_n_tokens - 1][1]
    return prefill(q, k, v, g, beta, k.shape[-1] ** -0.5, initial_state, cu_seqlens, False)


class ChunkGatedDeltaRule(torch.nn.Module):
    """flashinfer: as on Hopper, where vLLM chooses it."""

    def __init__(self, flashinfer: bool) -> None:
        super().__init__()
        self._forward_method = self.forward_cuda if flashinfer else self.forward_native

    def forward(self, *args: Any, **kwargs: Any):
        return self._forward_method(*args, **kwargs)

    def forward_cuda(self, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, chunk_indices=None,
                     chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=None, aiter_prefill_metadata=None):
        return prefill(q, k, v, g, beta, k.shape[-1] ** -0.5, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)

    def forward_native(self, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, chunk_indices=None,
                       chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=None, aiter_prefill_metadata=None):
        return fla_chunk_gated_delta_rule(  # noqa: F821
            q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, chunk_indices=chunk_indices, chunk_offsets=chunk_offsets,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, core_attn_out=core_attn_out)


class QwenGatedDeltaNetAttention(torch.nn.Module):
    """A layer without its projections. kv_cache: the pools of the convolution and of states."""

    def __init__(self, kv_cache: tuple[torch.Tensor, torch.Tensor], heads: tuple[int, int], dtype: torch.dtype,
                 flashinfer: bool = False) -> None:
        super().__init__()
        self.prefix, self.kv_cache, self.tp_size, self.activation = "layer", kv_cache, 1, "silu"
        self.num_k_heads, self.num_v_heads = heads
        _, _, self.head_v_dim, self.head_k_dim = kv_cache[1].shape
        self.key_dim, self.value_dim = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.conv1d = SimpleNamespace(weight=torch.zeros(2 * self.key_dim + self.value_dim, 1, 4), bias=None)
        self.A_log = torch.nn.Parameter(torch.rand(self.num_v_heads))
        self.dt_bias = torch.nn.Parameter(torch.randn(self.num_v_heads).to(dtype))
        self.chunk_gated_delta_rule = ChunkGatedDeltaRule(flashinfer)
        self.enable_packed_recurrent_decode = True
        self._exports_checkpoints, self._checkpoint_exporter = flashinfer, MambaPrefillCheckpointExporter(state_len=3)
        self._checkpoint_buffer_spec = (64, self.num_v_heads, self.head_v_dim, self.head_k_dim), torch.float32

    def rearrange_mixed_qkv(self, mixed_qkv):
        if mixed_qkv is None:
            return None, None, None
        parts = mixed_qkv.split((self.key_dim, self.key_dim, self.value_dim), -1)
        sizes = self.head_k_dim, self.head_k_dim, self.head_v_dim
        return tuple(x.reshape(1, len(x), -1, n).contiguous() for x, n in zip(parts, sizes, strict=True))

    def get_state_dtype(self):
        return self.kv_cache[0].dtype, self.kv_cache[1].dtype

    def _warmup_prefill_kernels(self, mixed_qkv, v_dim):
        self.warmed_up = True

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        of_layers = get_forward_context().attn_metadata
        attn_metadata = None
        if isinstance(of_layers, dict):
            attn_metadata = of_layers.get(self.prefix)
        if attn_metadata is None:
            return self._warmup_prefill_kernels(mixed_qkv, 0)
        assert isinstance(attn_metadata, GDNAttentionMetadata)
        spec = attn_metadata.spec_sequence_masks is not None
        if self.enable_packed_recurrent_decode and not spec and attn_metadata.num_prefills == 0 and attn_metadata.num_decodes > 0:
            return self._forward_core_decode_non_spec(mixed_qkv, b, a, core_attn_out, attn_metadata)
        conv_state, ssm_state = self.kv_cache[0].transpose(-1, -2), self.kv_cache[1]
        n = attn_metadata.num_actual_tokens
        slots, ends = attn_metadata.non_spec_state_indices_tensor, attn_metadata.non_spec_query_start_loc
        mixed_qkv, b, a = mixed_qkv[:n], b[:n], a[:n]
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), self.conv1d.weight.size(2))
        o_spec = o_rest = rest = None
        raw = mixed_qkv
        if spec:
            drafts = mixed_qkv
            if attn_metadata.num_prefills > 0:
                drafts = mixed_qkv.index_select(0, attn_metadata.spec_token_indx)
                rest = mixed_qkv.index_select(0, attn_metadata.non_spec_token_indx)
            of_drafts = attn_metadata.spec_state_indices_tensor
            drafts = causal_conv1d_update(
                drafts, conv_state, weight, self.conv1d.bias, self.activation,
                conv_state_indices=of_drafts[:, 0][:attn_metadata.num_spec_decodes],
                num_accepted_tokens=attn_metadata.num_accepted_tokens, query_start_loc=attn_metadata.spec_query_start_loc,
                max_query_len=of_drafts.size(-1), validate_data=False)
            q, k, v = self.rearrange_mixed_qkv(drafts)
            o_spec, _ = fused_sigmoid_gating_delta_rule_update(
                A_log=self.A_log, a=a, b=b, dt_bias=self.dt_bias, q=q, k=k, v=v, initial_state=ssm_state,
                inplace_final_state=True, cu_seqlens=attn_metadata.spec_query_start_loc[:attn_metadata.num_spec_decodes + 1],
                ssm_state_indices=of_drafts, num_accepted_tokens=attn_metadata.num_accepted_tokens,
                use_qk_l2norm_in_kernel=True)
        else:
            rest = mixed_qkv
        if attn_metadata.num_prefills > 0:
            rest = causal_conv1d_fn(
                rest.transpose(0, 1), weight, self.conv1d.bias, activation=self.activation, conv_states=conv_state,
                has_initial_state=attn_metadata.has_initial_state, cache_indices=slots, query_start_loc=ends,
                metadata=attn_metadata).transpose(0, 1)
            if spec:
                raw = raw.index_select(0, attn_metadata.non_spec_token_indx)
                a = a.index_select(0, attn_metadata.non_spec_token_indx)
                b = b.index_select(0, attn_metadata.non_spec_token_indx)
            d = attn_metadata.num_decode_tokens if not spec and attn_metadata.num_decodes > 0 else 0
            prepared = fused_post_conv_prep(
                conv_output=rest[d:], a=a[d:], b=b[d:], A_log=self.A_log, dt_bias=self.dt_bias,
                num_k_heads=self.num_k_heads // self.tp_size, head_k_dim=self.head_k_dim, head_v_dim=self.head_v_dim,
                apply_l2norm=True, output_g_exp=False)
            q, k, v, g, beta = (x.unsqueeze(0) for x in prepared)
            states = ssm_state[attn_metadata.prefill_state_indices]
            states[~attn_metadata.prefill_has_initial_state, ...] = 0
            plan = attn_metadata.flashinfer_checkpoint_plan
            if plan is None:
                o_rest, states = self.chunk_gated_delta_rule(
                    q=q, k=k, v=v, g=g, beta=beta, initial_state=states, output_final_state=True,
                    cu_seqlens=attn_metadata.prefill_query_start_loc, chunk_indices=attn_metadata.chunk_indices,
                    chunk_offsets=attn_metadata.chunk_offsets, use_qk_l2norm_in_kernel=False,
                    aiter_prefill_metadata=attn_metadata.aiter_prefill_metadata)
            else:
                (kept,) = current_workspace_manager().get_simultaneous(self._checkpoint_buffer_spec)
                kept = kept[:plan.num_checkpoints]
                o_rest, states = fi_chunk_gated_delta_rule(
                    q=q, k=k, v=v, g=g, beta=beta, initial_state=states, output_final_state=True,
                    cu_seqlens=attn_metadata.prefill_query_start_loc, use_qk_l2norm_in_kernel=False, state_checkpoints=kept,
                    checkpoint_cu_starts=plan.cu_starts, checkpoint_every_n_tokens=plan.every_n_tokens)
                self._checkpoint_exporter.export(
                    attn_metadata.checkpoint, raw_qkv=raw, conv_state=conv_state, recurrent_checkpoint=kept,
                    recurrent_state=ssm_state, cu_seqlens=ends, recurrent_rows=plan.rows)
            ssm_state[attn_metadata.prefill_state_indices] = states.to(ssm_state.dtype)
        elif not spec:
            d = attn_metadata.num_decodes
            rest = causal_conv1d_update(rest, conv_state, weight, self.conv1d.bias, self.activation, conv_state_indices=slots[:n],
                                        validate_data=True)
        if not spec and d:
            q, k, v = self.rearrange_mixed_qkv(rest[:d] if attn_metadata.num_prefills > 0 else rest)
            o, _ = fused_sigmoid_gating_delta_rule_update(
                A_log=self.A_log, a=a[:d] if attn_metadata.num_prefills > 0 else a, b=b, dt_bias=self.dt_bias, q=q, k=k, v=v,
                initial_state=ssm_state, inplace_final_state=True, cu_seqlens=ends[:attn_metadata.num_decodes + 1],
                ssm_state_indices=slots, use_qk_l2norm_in_kernel=True)
            o_rest = o if o_rest is None else torch.cat([o, o_rest], dim=1)
        if spec and o_rest is not None:
            o = torch.empty((1, n, *o_spec.shape[2:]), dtype=o_rest.dtype, device=o_rest.device)
            o.index_copy_(1, attn_metadata.spec_token_indx, o_spec)
            o.index_copy_(1, attn_metadata.non_spec_token_indx, o_rest)
            core_attn_out[:n] = o.squeeze(0)
        else:
            core_attn_out[:n] = (o_spec if spec else o_rest).squeeze(0)

    def _forward_core_decode_non_spec(self, mixed_qkv, b, a, core_attn_out, attn_metadata):
        n = attn_metadata.num_actual_tokens
        slots = attn_metadata.non_spec_state_indices_tensor[:n]
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), self.conv1d.weight.size(2))
        rows = causal_conv1d_update(mixed_qkv[:n], self.kv_cache[0].transpose(-1, -2), weight, self.conv1d.bias, self.activation,
                                    conv_state_indices=slots, validate_data=False)
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=rows, a=a[:n], b=b[:n], A_log=self.A_log, dt_bias=self.dt_bias, scale=self.head_k_dim ** -0.5,
            initial_state=self.kv_cache[1], out=core_attn_out[:n].unsqueeze(1), ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True)


# --- vllm.model_executor.layers.mamba.gdn.kda_linear_attn ------------------------------------------------------------
class KDAAttentionBase(torch.nn.Module):
    """A layer without its projections, and with one convolution."""

    def __init__(self, kv_cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.prefix, self.kv_cache = "layer", kv_cache
        heads, self.head_dim = kv_cache[1].shape[1:3]
        self.A_log = torch.nn.Parameter(torch.rand(1, 1, heads, 1))
        self.dt_bias = torch.nn.Parameter(torch.randn(heads * self.head_dim))

    def _forward(self, q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out):
        m, states = get_forward_context().attn_metadata[self.prefix], self.kv_cache[1]
        n, slots, ends = m.num_actual_tokens, m.non_spec_state_indices_tensor, m.non_spec_query_start_loc
        q, k, v = (causal_conv1d_update(x[:n], None, None).view(1, n, -1, self.head_dim)
                   for x in (q_proj_states, k_proj_states, v_proj_states))
        g1, beta = g1[:, :n], beta[:, :n]
        if m.num_prefills > 0:
            states[slots[~m.has_initial_state]] = 0
            o, final = chunk_kda_with_fused_gate(
                q=q, k=k, v=v, raw_g=g1, beta=beta, A_log=self.A_log, g_bias=self.dt_bias,
                initial_state=states[slots].contiguous(), output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
            states[slots] = final
        else:
            g = fused_kda_gate(g1.reshape(n, -1), self.A_log, self.head_dim, g_bias=self.dt_bias).unsqueeze(0)
            o, _ = fused_recurrent_kda(q=q, k=k, v=v, g=g, beta=beta, initial_state=states, use_qk_l2norm_in_kernel=True,
                                       cu_seqlens=ends[:m.num_decodes + 1], ssm_state_indices=slots)
        core_attn_out[0, :n] = o[0, :n]


OPS, MAMBA = "third_party.flash_linear_attention.ops", "model_executor.layers.mamba"
#: By module: what it imports, and what it defines.
PACKAGE: dict[str, tuple[list[str], list[Any]]] = {
    "forward_context": ([], [get_forward_context]),
    "v1.attention.backends.gdn_attn": ([], [MambaPrefillCheckpointMetadata, GDNFlashInferCheckpointPlan, GDNAttentionMetadata]),
    "v1.worker.workspace": ([], [current_workspace_manager]),
    f"{MAMBA}.checkpoint": ([], [MambaPrefillCheckpointExporter]),
    f"{OPS}.chunk": ([], [walk, prefill, chunk_gated_delta_rule]),
    f"{OPS}.fused_recurrent": ([], [walk, decode, gate, fused_recurrent_gated_delta_rule,
                                    fused_recurrent_gated_delta_rule_packed_decode]),
    f"{OPS}.fused_sigmoid_gating": ([], [walk, decode, gate, fused_sigmoid_gating_delta_rule_update]),
    f"{OPS}.fused_gdn_prefill_post_conv": ([], [gate, fused_post_conv_prep]),
    f"{OPS}.kda": ([], [walk, decode, prefill, gate, fused_recurrent_kda, chunk_kda, chunk_kda_with_fused_gate, fused_kda_gate]),
    f"{MAMBA}.mamba_utils": ([], [MambaStateShapeCalculator, is_conv_state_dim_first]),
    f"{MAMBA}.ops.causal_conv1d": ([], [causal_conv1d_fn, causal_conv1d_update]),
    f"{MAMBA}.gdn.qwen_gdn_linear_attn": (
        [f"{OPS} import chunk_gated_delta_rule as fla_chunk_gated_delta_rule",
         f"{OPS} import fused_post_conv_prep, fused_recurrent_gated_delta_rule_packed_decode",
         f"{OPS} import fused_sigmoid_gating_delta_rule_update", "forward_context import get_forward_context",
         f"{MAMBA}.checkpoint import MambaPrefillCheckpointExporter", f"{MAMBA}.mamba_utils import is_conv_state_dim_first",
         "v1.worker.workspace import current_workspace_manager",
         f"{MAMBA}.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update"],
        [walk, prefill, fi_chunk_gated_delta_rule, ChunkGatedDeltaRule, QwenGatedDeltaNetAttention]),
    f"{MAMBA}.gdn.kda_linear_attn": (
        [f"{OPS}.kda import chunk_kda_with_fused_gate, fused_kda_gate, fused_recurrent_kda",
         "forward_context import get_forward_context", f"{MAMBA}.ops.causal_conv1d import causal_conv1d_update"],
        [KDAAttentionBase])}
HEADER = ("from __future__ import annotations\nfrom dataclasses import dataclass\nfrom types import SimpleNamespace\n"
          "from typing import Any\nimport torch\nfrom stub_of_vllm import CONTEXT, GDNAttentionMetadata\n")


@functools.cache
def _text(imports: tuple[str, ...], defined: tuple[Any, ...]) -> str:
    return HEADER + "".join(f"from vllm.{i}\n" for i in imports) + "\n\n" + "\n\n".join(map(inspect.getsource, defined))


def write(folder: Path, *without: str) -> None:
    """Make the package in a folder. without: modules that it lacks."""
    for name, (imports, defined) in PACKAGE.items():
        if name not in without:
            path = folder.joinpath("vllm", *name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_text(tuple(imports), tuple(defined)))
    for path in [p for p in (folder / "vllm").rglob("*") if p.is_dir()] + [folder / "vllm"]:
        (path / "__init__.py").touch()
    if f"{OPS}.chunk" not in without:
        folder.joinpath("vllm", *OPS.split("."), "__init__.py").write_text("".join(f"from .{m} import {n}\n" for m, n in (
            ("chunk", "chunk_gated_delta_rule"), ("fused_gdn_prefill_post_conv", "fused_post_conv_prep"),
            ("fused_recurrent", "fused_recurrent_gated_delta_rule"),
            ("fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"),
            ("fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"))))
