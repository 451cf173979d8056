"""SGLang: the layers of Gated DeltaNet and of Kimi Delta Attention.

Its `load_plugins` calls `register` in each of its processes, by the entry point sglang.srt.plugins. GDN_CODEGEN_SGLANG=0 and
SGLANG_PLUGINS turn it off. In a process of one's own, without entry points:

    from gdn_codegen.integrations import sglang; sglang.enable()

Classes of kernels derived from SGLang's take their places by its hooks (sglang/srt/plugins/hook_registry.py, 106f37ce). Read, in
python/sglang/srt/layers/attention/linear: kernels/kernel_backend.py (03a4a692), class LinearAttnKernelBase; kernels/gdn_triton.py
(0a48af3a), class TritonGDNKernel; kernels/kda_triton.py (007d1d93), class TritonKDAKernel; gdn_backend.py (0051ebfc) and
kda_backend.py, which call them; and the ops below python/sglang/kernels/ops/attention/fla: chunk.py (0a0df252),
chunk_delta_h.py (02103a77), fused_recurrent.py (047d31af), fused_sigmoid_gating_recurrent.py (00e1106f), kda.py (0c829834).
These methods also take keywords of later versions: lower_bound, beta_is_raw, track_state, track_chunk_idx. The files of the
release 0.5.23 have the same classes, methods and calls.

    packed_decode(mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim)
    decode(q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc)
    extend(q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc)
    target_verify(A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, intermediate_states_buffer,
                  intermediate_state_indices, cache_steps, retrieve_parent_token)

The pool ssm_states is [slots, HV, V, K], cache_indices has -1 for rows of padding. No value on the device is read.
"""
from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..channels import chunk_kda, fused_recurrent_kda
from ..host.tensors import _fail
from ..ops import chunk_gated_delta_rule, recurrent_gated_delta_rule
from .calls import falling_back
from .chunk_states import chunk_states

HOST = "sglang"
#: The variable of the environment that turns the plug-in off, with 0.
SWITCH = "GDN_CODEGEN_SGLANG"
_LINEAR = "sglang.srt.layers.attention.linear"
State = Tensor | None
#: Keywords that layers of SGLang up to 0.5.23 pass to the kernels of all backends, and that change no result of its Triton
#: kernels: tables, copies of lengths, and what other backends need.
_IGNORED = frozenset({"chunk_indices", "chunk_offsets", "extend_seq_lens_cpu", "seq_lens_cpu", "extend_prefix_lens", "layer_id",
                      "is_spec_decode", "output", "stable_rows", "state_checkpoint_cu_starts", "num_state_checkpoints",
                      "state_checkpoint_every_n_tokens", "state_checkpoint_indices", "track_ssm_h_src", "track_ssm_h_batch_src"})
#: Whether SGLang reads the states before chunks of this call of GDNAttnBackend.forward_extend.
_read: ContextVar[bool] = ContextVar("_read", default=True)
#: The tokens of each sequence of this call of GDNAttnBackend.forward_extend, as SGLang has them on the host; None if it has not.
_extended: ContextVar[Any] = ContextVar("_extended", default=None)


# --- arguments -------------------------------------------------------------------------------------------------------
def _nothing_else(others: dict[str, Any]) -> None:
    """ValueError for a keyword that may change a result, as those of ReplaySSM's rings, unless it says nothing."""
    for name, x in others.items():
        if name not in _IGNORED and x is not None and x is not False:
            _fail(name, type(x).__name__, "None: this form of the call is left to SGLang")


def _pool(states: Tensor, slots: Tensor, ends: State) -> dict[str, Any]:
    """Our keywords for a pool of states. slots: at least one for each sequence; of more, the first count."""
    return dict(initial_state=states, state_indices=slots if ends is None else slots[:ends.numel() - 1], cu_seqlens=ends,
                state_v_first=True, use_qk_l2norm_in_kernel=True)


def _prompts(states: Tensor, slots: Tensor, ends: State, lengths: Any) -> dict[str, Any]:
    """The same for prompts. lengths: tokens of each sequence, on the host. Where it has not one for each, it is left out."""
    known = lengths.tolist() if isinstance(lengths, Tensor) and lengths.device.type == "cpu" else lengths
    here = isinstance(known, (list, tuple)) and ends is not None and 0 < len(known) == ends.numel() - 1
    return {**_pool(states, slots, ends), "max_seqlen": max(known) if here else None}


def _drafts(ends: Tensor, buffer: Tensor, rows: Tensor, parents: State) -> dict[str, Any]:
    """Our keywords for states of draft tokens."""
    n = ends.numel() - 1
    return dict(disable_state_update=True, intermediate_states_buffer=buffer, intermediate_state_indices=rows[:n],
                retrieve_parent_token=None if parents is None else parents[:n])


def _raw(v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> dict[str, Any]:
    """Our keywords for raw gates of tokens, which come as [tokens, HV] or with more dims of size 1, as views."""
    shape = v.shape[:3]
    return dict(g=a.reshape(shape), beta=b.reshape(shape), gate="raw", beta_form="sigmoid", A_log=A_log, dt_bias=dt_bias)


def _raw_channels(q: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: State, lower_bound: float | None
                  ) -> dict[str, Any]:
    """The same with a gate for each channel: a is [tokens, HV K], [tokens, HV, K], or has more dims of size 1."""
    shape = v.shape[:3]
    return dict(g=a.reshape(*shape, q.shape[3]), beta=b.reshape(shape), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
                use_beta_sigmoid_in_kernel=True, lower_bound=lower_bound)


def _unpacked(rows: Tensor, states: Tensor) -> list[Tensor]:
    """q, k and v [B, 1, heads, K or V] of packed rows [B, 2 H K + HV V], in place."""
    heads, V, K = states.shape[1:]
    width = (rows.shape[1] - heads * V) // 2
    parts = rows[:, :width], rows[:, width:2 * width], rows[:, 2 * width:]
    return [x.view(len(x), 1, x.shape[1] // n, n) for x, n in zip(parts, (K, K, V), strict=True)]


def _before(op: Callable[..., Any], v: Tensor, pool: dict[str, Any], snapshot: State, chunk: State,
            **more: Any) -> tuple[Tensor, Tensor]:
    """o of an op, and h [1, rows, HV, V, K], the states before its chunks in the pool's dtype. snapshot, chunk: SGLang's
    track_state [N, HV, V, K], which gets the state before chunk [N] of each sequence; -1 leaves it alone."""
    states = pool["initial_state"]
    h, first, to = chunk_states(v, states.shape[-1], states, pool["state_indices"], pool["cu_seqlens"], True, states.dtype)
    o = op(v=v, **pool, **to, **more)[0]
    if snapshot is not None and chunk is not None:
        found = h[0].index_select(0, (first + chunk.clamp_min(0)).clamp_max(h.shape[1] - 1))
        torch.where((chunk < 0)[:, None, None, None], snapshot, found.to(snapshot.dtype), out=snapshot)
    return o, h


# --- Gated DeltaNet --------------------------------------------------------------------------------------------------
def _gdn_packed_decode(self: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
                       ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int, **others: Any) -> Tensor:
    _nothing_else(others)
    q, k, v = _unpacked(mixed_qkv, ssm_states)
    o: Tensor = recurrent_gated_delta_rule(q, k, v, scale=scale, **_raw(v, a, b, A_log, dt_bias),
                                           **_pool(ssm_states, cache_indices[:len(v)], None))[0]
    return o.transpose(0, 1)


def _gdn_decode(self: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
                ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **others: Any) -> Any:
    _nothing_else(others)
    return recurrent_gated_delta_rule(q, k, v, **_raw(v, a, b, A_log, dt_bias),
                                      **_pool(ssm_states, cache_indices, query_start_loc))[0]


def _gdn_extend(self: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
                cache_indices: Tensor, query_start_loc: State, inplace_update: bool = True, track_state: State = None,
                track_chunk_idx: State = None, extend_seq_lens_cpu: Any = None, **others: Any) -> tuple[Tensor, None, State]:
    """o, None as there, and h; None for h where SGLang does not read it."""
    _nothing_else(others)
    lengths = _extended.get() if extend_seq_lens_cpu is None else extend_seq_lens_cpu
    pool = _prompts(ssm_states, cache_indices, query_start_loc, lengths)
    named: dict[str, Any] = dict(q=q, k=k, g=g, beta=beta, inplace_final_state=inplace_update)
    if track_state is None and not _read.get():
        return chunk_gated_delta_rule(v=v, **pool, **named)[0], None, None
    o, h = _before(chunk_gated_delta_rule, v, pool, track_state, track_chunk_idx, **named)
    return o, None, h


def _gdn_target_verify(self: Any, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
                       ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor,
                       intermediate_state_indices: Tensor, cache_steps: int, retrieve_parent_token: State, **others: Any) -> Any:
    _nothing_else(others)
    return recurrent_gated_delta_rule(
        q, k, v, **_raw(v, a, b, A_log, dt_bias), **_pool(ssm_states, cache_indices, query_start_loc),
        **_drafts(query_start_loc, intermediate_states_buffer, intermediate_state_indices, retrieve_parent_token))[0]


# --- Kimi Delta Attention --------------------------------------------------------------------------------------------
def _kda_packed_decode(self: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
                       ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int,
                       lower_bound: float | None = None, **others: Any) -> Tensor:
    _nothing_else(others)
    q, k, v = _unpacked(mixed_qkv, ssm_states)
    o: Tensor = fused_recurrent_kda(q, k, v, scale=scale, **_raw_channels(q, v, a, b, A_log, dt_bias, lower_bound),
                                    **_pool(ssm_states, cache_indices[:len(v)], None))[0]
    return o.transpose(0, 1)


def _kda_decode(self: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
                ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, lower_bound: float | None = None,
                **others: Any) -> Any:
    _nothing_else(others)
    return fused_recurrent_kda(q, k, v, **_raw_channels(q, v, a, b, A_log, dt_bias, lower_bound),
                               **_pool(ssm_states, cache_indices, query_start_loc))[0]


def _kda_extend(self: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
                cache_indices: Tensor, query_start_loc: State, A_log: State = None, dt_bias: State = None,
                lower_bound: float | None = None, beta_is_raw: bool = False, return_intermediate_states: bool = False,
                track_state: State = None, track_chunk_idx: State = None, extend_seq_lens_cpu: Any = None, **others: Any) -> Any:
    """o, or (o, h) with return_intermediate_states. g: raw gates where A_log is given, else logs of decays."""
    _nothing_else(others)
    gates: dict[str, Any] = {} if A_log is None else dict(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
                                                          lower_bound=lower_bound)
    pool = _prompts(ssm_states, cache_indices, query_start_loc, extend_seq_lens_cpu)
    named: dict[str, Any] = dict(q=q, k=k, g=g, beta=beta, use_beta_sigmoid_in_kernel=beta_is_raw, **gates)
    if track_state is None and not return_intermediate_states:
        return chunk_kda(v=v, **pool, **named)[0]
    o, h = _before(chunk_kda, v, pool, track_state, track_chunk_idx, **named)
    return (o, h) if return_intermediate_states else o


def _kda_target_verify(self: Any, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
                       ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, intermediate_states_buffer: Tensor,
                       intermediate_state_indices: Tensor, cache_steps: int, retrieve_parent_token: State,
                       lower_bound: float | None = None, **others: Any) -> Any:
    _nothing_else(others)
    return fused_recurrent_kda(
        q, k, v, **_raw_channels(q, v, a, b, A_log, dt_bias, lower_bound), **_pool(ssm_states, cache_indices, query_start_loc),
        **_drafts(query_start_loc, intermediate_states_buffer, intermediate_state_indices, retrieve_parent_token))[0]


# --- hooks -----------------------------------------------------------------------------------------------------------
def _says_what_is_read(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around GDNAttnBackend.forward_extend: extend is told neither whether states are tracked nor how long sequences are, but the
    metadata and the batch say it."""
    read = _read.set(bool(getattr(self.forward_metadata, "has_mamba_track_mask", True)))
    batch = next((x for x in (*args, *kwargs.values()) if hasattr(x, "extend_seq_lens_cpu")), None)
    extended = _extended.set(getattr(batch, "extend_seq_lens_cpu", None))
    try:
        return theirs(self, *args, **kwargs)
    finally:
        _extended.reset(extended)
        _read.reset(read)


#: By module and class of SGLang, our methods.
KERNELS: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {
    (f"{_LINEAR}.kernels.gdn_triton", "TritonGDNKernel"): {
        "packed_decode": _gdn_packed_decode, "decode": _gdn_decode, "extend": _gdn_extend, "target_verify": _gdn_target_verify},
    (f"{_LINEAR}.kernels.kda_triton", "TritonKDAKernel"): {
        "packed_decode": _kda_packed_decode, "decode": _kda_decode, "extend": _kda_extend, "target_verify": _kda_target_verify}}


def _derived(theirs: type, methods: dict[str, Callable[..., Any]]) -> type:
    """A class of kernels whose methods are ours where they take the call, and else those of SGLang's class."""
    served = {n: falling_back(HOST, f"{theirs.__name__}.{n}", ours, getattr(theirs, n)) for n, ours in methods.items()
              if hasattr(theirs, n)}
    return type(f"Generated{theirs.__name__}", (theirs,), {**served, "__module__": __name__})


def register() -> list[str]:
    """Register the hooks, which SGLang's load_plugins then applies. Returns the names that they replace: none on a CPU, and with
    GDN_CODEGEN_SGLANG=0. On an NPU ascend.py replaces what the classes call there. ImportError for a version without hooks, or
    without these classes."""
    if os.environ.get(SWITCH) == "0":
        return []
    try:
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        importlib.import_module("sglang.kernels.ops.attention.fla.chunk")  # versions before it have states [K, V]
        utils = importlib.import_module("sglang.srt.utils")
        found = {at: getattr(importlib.import_module(at[0]), at[1]) for at in KERNELS}
    except (ModuleNotFoundError, AttributeError) as e:
        raise ImportError(f"sglang: got a version without what is replaced ({e}); accepted: one with sglang.srt.plugins, "
                          "sglang.kernels and the classes TritonGDNKernel and TritonKDAKernel") from e
    if utils.is_npu():
        found_there: list[str] = importlib.import_module(f"{__package__}.ascend").enable()
        return found_there
    if utils.is_cpu():
        return []
    replaced = []
    for (module, name), theirs in found.items():
        replaced.append(f"{module}.{name}")
        if theirs.__module__ != __name__:
            hooks.HookRegistry.register(replaced[-1], _derived(theirs, KERNELS[module, name]), hooks.HookType.REPLACE)
            if name == "TritonGDNKernel":
                hooks.HookRegistry.register(f"{_LINEAR}.gdn_backend.GDNAttnBackend.forward_extend", _says_what_is_read,
                                            hooks.HookType.AROUND)
    return replaced


def enable() -> list[str]:
    """Register the hooks and apply them, and those of others, in this process. Returns the names that they replace."""
    if replaced := register():
        importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    return replaced
