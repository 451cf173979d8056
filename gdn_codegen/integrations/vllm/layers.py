"""Qwen's GDN layer in vLLM. It was read at 00545a8a and in 0.33.0, vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.

The method `_forward_core(self, mixed_qkv, b, a, core_attn_out)` of `QwenGatedDeltaNetAttention` is the convolution and the
recurrence of a layer, on the tensors of `GDNAttentionMetadata` (vllm/v1/attention/backends/gdn_attn.py). For a prompt vLLM splits
and normalises the result of the convolution and computes gates (`fused_post_conv_prep`), gathers states, runs
`ChunkGatedDeltaRule`, and scatters states. Here our op does all of that: it reads q, k and v as slices of the convolution's
result, raw gates and the pool of states, and writes o to core_attn_out. Batches without prompts and those with draft tokens go
through vLLM's method, and its ops (sites.py).

Checkpoints (0.33.0): where vLLM chose FlashInfer's prefill and caches prefixes at multiples of blocks, a batch may have a
`flashinfer_checkpoint_plan`. Then the state of sequence n after its first `checkpoint.checkpoint_offsets[n]` tokens, a multiple
of 64, also goes to slot `checkpoint.state_indices[n]`, and so does the convolution's window there. An offset of 0, with slot 0,
means none. FlashInfer gives states at all multiples of a stride, from which vLLM's exporter
(vllm/model_executor/layers/mamba/checkpoint.py) copies those. Our op writes these alone, to their slots, and the exporter
copies the window.

New sequences start from zeros: their slots are zeroed first. For the other sequences of the batch the null block is zeroed
instead, so that no length depends on values. vLLM's own prefill writes to that block, too, and nobody reads it.
"""
from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ..calls import REFUSALS, falling_back
from . import say
from .sites import chunk_gated_delta_rule, longest_of, served, slots_of, v_first

#: What vLLM's method names. One that names anything else may do more than was read, and is left as it is.
KNOWN = frozenset("""
    A_log GDNAttentionMetadata _forward_core_decode_non_spec _warmup_prefill_kernels activation attn_metadata bias cat
    causal_conv1d_fn causal_conv1d_update chunk_gated_delta_rule chunk_indices chunk_offsets conv1d device dict dt_bias dtype
    empty enable_packed_recurrent_decode fused_post_conv_prep fused_sigmoid_gating_delta_rule_update get_forward_context
    has_initial_state head_k_dim head_v_dim index_copy_ index_select is_conv_state_dim_first isinstance kv_cache
    non_spec_query_start_loc non_spec_state_indices_tensor non_spec_token_indx num_accepted_tokens num_actual_tokens
    num_decode_tokens num_decodes num_k_heads num_prefills num_spec_decodes prefill_has_initial_state prefill_query_start_loc
    prefill_state_indices prefix rearrange_mixed_qkv shape size spec_query_start_loc spec_sequence_masks
    spec_state_indices_tensor spec_token_indx squeeze to torch tp_size transpose unsqueeze view weight AssertionError
    _checkpoint_buffer_spec _checkpoint_exporter aiter_prefill_metadata checkpoint cu_starts current_workspace_manager
    every_n_tokens export fi_chunk_gated_delta_rule flashinfer_checkpoint_plan get get_simultaneous num_checkpoints rows
    """.split())
#: Methods of vLLM's op for prompts that call kernels of others; forward_native calls an op of sites.py.
METHODS = "forward_cuda", "forward_cutedsl"


def replace(module: ModuleType) -> None:
    """Replace what a module with Qwen's layer defines."""
    op = getattr(module, "ChunkGatedDeltaRule", None)
    for name in METHODS:
        theirs = vars(op).get(name) if op is not None else None
        made = None if theirs is None else served(chunk_gated_delta_rule, theirs)
        if made is not None:
            setattr(op, name, made)
    layer = getattr(module, "QwenGatedDeltaNetAttention", None)
    theirs = getattr(layer, "_forward_core", None)
    if layer is None or theirs is None:
        say(f"{module.__name__} has no layer whose prefill could be replaced as a whole")
    elif not getattr(theirs, "by_gdn_codegen", False):
        unknown = sorted({*theirs.__code__.co_names} - KNOWN)
        if unknown or theirs.__code__.co_varnames[1:theirs.__code__.co_argcount] != ("mixed_qkv", "b", "a", "core_attn_out"):
            say(f"{module.__name__}: the layer's prefill is not replaced as a whole, its op is (unknown: {', '.join(unknown)})")
        else:
            layer._forward_core = core(vars(module), theirs)


def core(host: dict[str, Any], theirs: Callable[..., None]) -> Callable[..., None]:
    """The layer's method. host: the names of its module."""
    recurrence = falling_back("vllm", "prefill", lambda *args: _prefill(host, *args), lambda *args: _their_prefill(host, *args))
    warm = set()

    def _forward_core(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """The convolution and the recurrence of a batch's tokens [tokens, ...], into core_attn_out [tokens, HV, V]."""
        of_layers = host["get_forward_context"]().attn_metadata
        about = of_layers.get(self.prefix) if isinstance(of_layers, dict) else None
        if about is None and (kind := (mixed_qkv.device, mixed_qkv.dtype, mixed_qkv.shape[1])) not in warm:
            warm.add(kind)
            _warm_up(self, mixed_qkv)
        if about is None or about.num_prefills == 0 or about.spec_sequence_masks is not None:
            return theirs(self, mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
        tokens, decoded = about.num_actual_tokens, about.num_decode_tokens if about.num_decodes > 0 else 0
        raw = mixed_qkv[:tokens]
        rows = _convolved(host, self, raw, about)
        if decoded:
            q, k, v = _slices(self, rows[:decoded])
            o, _ = host["fused_sigmoid_gating_delta_rule_update"](
                A_log=self.A_log, a=a[:decoded], b=b[:decoded], dt_bias=self.dt_bias, q=q, k=k, v=v,
                initial_state=self.kv_cache[1], inplace_final_state=True,
                cu_seqlens=about.non_spec_query_start_loc[:about.num_decodes + 1],
                ssm_state_indices=about.non_spec_state_indices_tensor, use_qk_l2norm_in_kernel=True)
            core_attn_out[:decoded] = o[0]
        recurrence(self, about, raw, rows[decoded:], a[decoded:tokens], b[decoded:tokens], core_attn_out[decoded:tokens])

    _forward_core.by_gdn_codegen = True  # type: ignore[attr-defined]
    return _forward_core


def _convolved(host: dict[str, Any], layer: Any, rows: Tensor, about: Any) -> Tensor:
    """vLLM's convolution of a batch with prompts: packed rows [tokens, 2 H K + HV V]."""
    weight = layer.conv1d.weight
    out: Tensor = host["causal_conv1d_fn"](
        rows.transpose(0, 1), weight.view(weight.size(0), weight.size(2)), layer.conv1d.bias, activation=layer.activation,
        conv_states=_windows(host, layer), has_initial_state=about.has_initial_state,
        cache_indices=about.non_spec_state_indices_tensor, query_start_loc=about.non_spec_query_start_loc, metadata=about)
    return out.transpose(0, 1)


def _windows(host: dict[str, Any], layer: Any) -> Tensor:
    """The convolution's states [slots, channels, width - 1]."""
    states: Tensor = layer.kv_cache[0]
    return states if host["is_conv_state_dim_first"]() else states.transpose(-1, -2)


def _slices(layer: Any, rows: Tensor) -> list[Tensor]:
    """q, k and v [1, tokens, heads, K or V] of packed rows, in place."""
    width, K, V = layer.key_dim // layer.tp_size, layer.head_k_dim, layer.head_v_dim
    parts = rows[:, :width], rows[:, width:2 * width], rows[:, 2 * width:]
    return [x.view(len(x), x.shape[1] // n, n)[None] for x, n in zip(parts, (K, K, V), strict=True)]


def _prefill(host: dict[str, Any], layer: Any, about: Any, raw: Tensor, rows: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """The recurrence of prompts with states in their slots, and the batch's checkpoints. raw: the rows of all tokens before the
    convolution."""
    _recurrence(layer, about, rows, a, b, out, layer.kv_cache[1])
    if _plan(about) is not None:
        _export(host, layer, about, raw)


def _recurrence(layer: Any, about: Any, rows: Tensor, a: Tensor, b: Tensor, out: Tensor, pool: Tensor) -> None:
    """The recurrence of prompts, from the convolution's rows and raw gates, with states in their slots of a pool."""
    q, k, v = _slices(layer, rows)
    new = torch.where(about.prefill_has_initial_state, 0, about.prefill_state_indices).clamp_(min=0)
    state_v_first = v_first()
    pool.index_fill_(0, new.long(), 0)
    ops.chunk_gated_delta_rule(
        q, k, v, a[None], b[None], initial_state=pool, use_qk_l2norm_in_kernel=True, cu_seqlens=about.prefill_query_start_loc,
        out=out[None], gate="raw", A_log=layer.A_log, dt_bias=layer.dt_bias, beta_form="sigmoid", state_v_first=state_v_first,
        state_indices=slots_of(about.prefill_state_indices), inplace_final_state=True, max_seqlen=longest_of(about),
        **_checkpoints(about))


def _plan(about: Any) -> Any:
    """A batch's plan of checkpoints; None where it has none, as in versions without them."""
    return getattr(about, "flashinfer_checkpoint_plan", None)


def _checkpoints(about: Any) -> dict[str, Any]:
    """The arguments by which our op stores a batch's checkpoints of states. Rows of decodes come before those of prompts."""
    if _plan(about) is None:
        return {}
    n = len(about.prefill_state_indices)
    offsets, slots = (x[-n:] for x in (about.checkpoint.checkpoint_offsets, about.checkpoint.state_indices))
    return dict(checkpoint_positions=offsets[:, None], checkpoint_slots=slots_of(slots)[:, None], aligned_positions=True)


def _export(host: dict[str, Any], layer: Any, about: Any, raw: Tensor, **states: Tensor) -> None:
    """Store the convolution's windows of a batch's checkpoints. states: what vLLM's exporter takes to store states, too."""
    layer._checkpoint_exporter.export(about.checkpoint, raw_qkv=raw, conv_state=_windows(host, layer),
                                      cu_seqlens=about.non_spec_query_start_loc, **states)


def _warm_up(layer: Any, rows: Tensor) -> None:
    """Build kernels in vLLM's profile run, which has no metadata, and after which the cache takes the memory: those of a short
    prompt and of one with all rows. What our op refuses is left to the first prompt, which says so."""
    heads, K, V = layer.num_v_heads // layer.tp_size, layer.head_k_dim, layer.head_v_dim
    plans = (None, True) if getattr(layer, "_exports_checkpoints", False) else (None,)
    for tokens, plan in ((n, x) for n in sorted({min(64, len(rows)), len(rows)} - {0}) for x in plans):
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=rows.device)
        about = SimpleNamespace(prefill_state_indices=ends[1:] // tokens, prefill_has_initial_state=ends[1:] > 0,
                                prefill_query_start_loc=ends, flashinfer_checkpoint_plan=plan,
                                checkpoint=SimpleNamespace(checkpoint_offsets=ends[:1], state_indices=ends[:1]))
        gates, out = rows.new_zeros(tokens, heads), rows.new_empty(tokens, heads, V)
        try:
            pool = rows.new_zeros(2, heads, *((V, K) if v_first() else (K, V)), dtype=layer.get_state_dtype()[1])
            _recurrence(layer, about, rows[:tokens].contiguous(), gates, gates, out, pool)
        except REFUSALS:
            return


def _their_prefill(host: dict[str, Any], layer: Any, about: Any, raw: Tensor, rows: Tensor, a: Tensor, b: Tensor, out: Tensor
                   ) -> None:
    """The same by vLLM's functions."""
    pool, slots, plan = layer.kv_cache[1], about.prefill_state_indices, _plan(about)
    inputs = host["fused_post_conv_prep"](
        conv_output=rows, a=a, b=b, A_log=layer.A_log, dt_bias=layer.dt_bias, num_k_heads=layer.num_k_heads // layer.tp_size,
        head_k_dim=layer.head_k_dim, head_v_dim=layer.head_v_dim, apply_l2norm=True, output_g_exp=False)
    states = pool[slots]
    states[~about.prefill_has_initial_state] = 0
    named = dict(zip(("q", "k", "v", "g", "beta"), (x[None] for x in inputs), strict=True), initial_state=states,
                 output_final_state=True, cu_seqlens=about.prefill_query_start_loc, use_qk_l2norm_in_kernel=False)
    if plan is None:
        tables = {n: getattr(about, n) for n in ("chunk_indices", "chunk_offsets", "aiter_prefill_metadata") if hasattr(about, n)}
        o, states = layer.chunk_gated_delta_rule(**named, **tables)
    else:
        (kept,) = host["current_workspace_manager"]().get_simultaneous(layer._checkpoint_buffer_spec)
        kept = kept[:plan.num_checkpoints]
        o, states = host["fi_chunk_gated_delta_rule"](
            **named, state_checkpoints=kept, checkpoint_cu_starts=plan.cu_starts, checkpoint_every_n_tokens=plan.every_n_tokens)
        _export(host, layer, about, raw, recurrent_checkpoint=kept, recurrent_state=pool, recurrent_rows=plan.rows)
    pool[slots] = states.to(pool.dtype)
    out[:] = o[0]
