"""The ops of vLLM for GDN that ours serve, with the arguments that vLLM's layers pass, and what kda.py shares. Read in 0.33.0 and
at these versions (commit, file: names):

- 81c0d5f8, vllm/third_party/flash_linear_attention/ops/chunk.py: `chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state,
  output_final_state, cu_seqlens, chunk_indices, chunk_offsets, use_qk_l2norm_in_kernel, core_attn_out)`. 044990c1,
  vllm/model_executor/layers/fla/ops/chunk.py: `(..., cu_seqlens, head_first, use_qk_l2norm_in_kernel,
  return_intermediate_states)`, with three results.
- 03c20345, .../ops/fused_recurrent.py: `fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale,
  initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel)`, and `fused_recurrent_gated_delta_rule`.
- 0eff6aee, .../ops/fused_sigmoid_gating.py: `fused_sigmoid_gating_delta_rule_update(A_log, a, b, dt_bias, q, k, v, beta,
  threshold, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens,
  use_qk_l2norm_in_kernel, is_kda)`.

Slots. The first block of vLLM's cache is its null block (NULL_BLOCK_ID = 0, vllm/v1/attention/backends/utils.py), which no
sequence owns. Rows that pad a batch for a CUDA graph have slot 0, as often as there are such rows; older versions fill in
PAD_SLOT_ID = -1. vLLM's kernels skip both, and so do ours: slots of 0 or less become -1, by one small kernel.

Lengths. vLLM's ops get only cu_seqlens, on the device. But a batch's metadata (v1/attention/backends/gdn_attn.py, also that of
KDA) have a table on the host for the convolution: `nums_dict[8]["nums"]` has, for each sequence without drafts, its tokens in
blocks of 8, rounded up. So our op learns how long the longest prompt is. Other tensors than the metadata's say nothing.

No value of a tensor on the device is read here, so that a CUDA graph can capture all of it.
"""
from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import channels, ops
from ...host.tensors import _fail
from ..calls import falling_back
from . import say

Results = tuple[Any, ...]
State = Tensor | None


@cache
def v_first() -> bool:
    """Whether vLLM's states are [HV, V, K]: old versions have [HV, K, V]. ValueError where vLLM does not say."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
        found = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 1, 1, 16, 32, 4)[1][-2:]
    except (ImportError, AttributeError, TypeError, IndexError) as e:
        found = repr(e)
    if found not in ((32, 16), (16, 32)):
        _fail("initial_state", f"an unknown order, {found}", "[HV, V, K] or [HV, K, V] by vLLM's gated_delta_net_state_shape")
    return bool(found == (32, 16))


def slots_of(indices: Any, sequences: int | None = None) -> Any:
    """state_indices for our op, of as many sequences: -1 where vLLM has its null block or -1."""
    if not isinstance(indices, Tensor):
        _fail("ssm_state_indices", repr(indices), "a tensor: other states are not updated in place")
    return torch.threshold(indices[:sequences], 0, -1)


def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, cu_seqlens: State = None, head_first: bool = False, chunk_indices: State = None,
        chunk_offsets: State = None, use_qk_l2norm_in_kernel: bool = False, core_attn_out: State = None) -> Results:
    """Prefill with gates that were computed before. Final states have the dtype of the pool, to which the layer writes them."""
    return ops.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, head_first,
        core_attn_out=core_attn_out, state_v_first=v_first(), state_dtype=dtype_of(initial_state, output_final_state),
        max_seqlen=longest(cu_seqlens))


def longest_of(about: Any) -> int | None:
    """As many tokens as a prompt of a batch has at most, by the batch's metadata; None where these do not say."""
    tables = getattr(about, "nums_dict", None)
    for block, table in tables.items() if isinstance(tables, dict) else ():
        counts = table.get("nums") if isinstance(table, dict) else None
        if isinstance(counts, Tensor) and counts.device.type == "cpu" and len(counts):
            return int(block * max(counts.tolist()))
    return None


def longest(cu_seqlens: State) -> int | None:
    """The same, by the metadata that vLLM has for its layers now. cu_seqlens: the op's; known only if
    it is one of these metadata's own tensors."""
    try:
        of_layers = sys.modules["vllm.forward_context"].get_forward_context().attn_metadata
    except (KeyError, AttributeError, AssertionError):  # vLLM asserts that there is a context
        return None
    if cu_seqlens is None or not isinstance(of_layers, dict):
        return None
    names = "prefill_query_start_loc", "non_spec_query_start_loc"
    return next((longest_of(x) for x in of_layers.values() if any(getattr(x, n, None) is cu_seqlens for n in names)), None)


def dtype_of(state: State, wanted: bool) -> torch.dtype | None:
    """The dtype of final states, that of the initial ones; None where the call has none."""
    return state.dtype if wanted and isinstance(state, Tensor) else None


def fused_recurrent_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor, ssm_state_indices: Tensor, beta: State = None,
        scale: float | None = None, inplace_final_state: bool = True, cu_seqlens: State = None,
        num_accepted_tokens: State = None, use_qk_l2norm_in_kernel: bool = False) -> Results:
    """Decoding and draft tokens, with gates that were computed before, as versions before 2026 call it."""
    return ops.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta=beta, scale=scale, initial_state=initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, **pool_of(q, cu_seqlens, ssm_state_indices, num_accepted_tokens, inplace_final_state))


def pool_of(q: Tensor, ends: State, indices: Any, accepted: State, in_place: bool) -> dict[str, Any]:
    """Our arguments for states of a pool, which are updated in place."""
    if in_place is not True:
        _fail("inplace_final_state", repr(in_place), "True: vLLM returns a state for each token otherwise")
    n = len(q) if ends is None else len(ends) - 1
    return dict(state_indices=slots_of(indices, n), num_accepted_tokens=None if accepted is None else accepted[:n],
                state_v_first=v_first(), inplace_final_state=True)


def fused_sigmoid_gating_delta_rule_update(
        A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor,
        ssm_state_indices: Tensor, beta: float = 1.0, threshold: float = 20.0, scale: float | None = None,
        inplace_final_state: bool = True, cu_seqlens: State = None, num_accepted_tokens: State = None,
        use_qk_l2norm_in_kernel: bool = False, is_kda: bool = False, lower_bound: float | None = None) -> Results:
    """Decoding and draft tokens with raw gates. a, b: [tokens, HV], or more rows, of which the first are read; a of KDA is
    [tokens, HV K]. beta, threshold: softplus's."""
    heads, (rows, tokens, _, K) = v.shape[2], q.shape
    a, b = (x if x.ndim > 2 else x[:rows * tokens].view(rows, tokens, x.shape[1]) for x in (a, b))
    named = dict(scale=scale, initial_state=initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
                 A_log=A_log, dt_bias=dt_bias, softplus_beta=beta, threshold=threshold,
                 **pool_of(q, cu_seqlens, ssm_state_indices, num_accepted_tokens, inplace_final_state))
    if is_kda:
        return channels.fused_recurrent_kda(q, k, v, a.reshape(rows, tokens, heads, K), b, use_gate_in_kernel=True,
                                            use_beta_sigmoid_in_kernel=True, lower_bound=lower_bound, **named)
    return ops.recurrent_gated_delta_rule(q, k, v, a, b, gate="raw", beta_form="sigmoid", lower_bound=lower_bound, **named)


def fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor, out: Tensor,
        ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False) -> Results:
    """One token of each sequence, from packed rows [B, 2 H K + HV V], which are read in place. o goes to out [B, 1, HV, V]; its
    rows of skipped sequences become zero, as there."""
    heads, V, K = initial_state.shape[1:] if v_first() else (initial_state.shape[1], *initial_state.shape[:1:-1])
    width = (mixed_qkv.shape[1] - heads * V) // 2
    parts = mixed_qkv[:, :width], mixed_qkv[:, width:2 * width], mixed_qkv[:, 2 * width:]
    q, k, v = (x.view(len(x), 1, x.shape[1] // n, n) for x, n in zip(parts, (K, K, V), strict=True))
    out.zero_()
    return ops.recurrent_gated_delta_rule(
        q, k, v, a[:, None], b[:, None], scale, initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, out=out,
        gate="raw", A_log=A_log, dt_bias=dt_bias, beta_form="sigmoid", **pool_of(q, None, ssm_state_indices, None, True))


#: By the last name of a module of vLLM's ops: vLLM's name of an op, and ours.
SITES: dict[str, tuple[Callable[..., Results], ...]] = {
    "chunk": (chunk_gated_delta_rule,),
    "fused_recurrent": (fused_recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule_packed_decode),
    "fused_sigmoid_gating": (fused_sigmoid_gating_delta_rule_update,)}


def replace(module: ModuleType, everywhere: bool) -> None:
    """Replace the ops for GDN that a module defines. everywhere: also in modules of vLLM that have imported them."""
    put(module, {ours.__name__: ours for ours in SITES[module.__name__.rsplit(".", 1)[1]]}, everywhere)


def put(module: ModuleType, ops: dict[str, Callable[..., Results]], everywhere: bool) -> None:
    """Replace ops that a module defines, by vLLM's names. everywhere: as above."""
    holders = [m for n, m in sys.modules.items() if n.startswith("vllm.") and m is not module] if everywhere else []
    for name, ours in ops.items():
        theirs = getattr(module, name, None)
        made = None if theirs is None else served(ours, theirs)
        if made is None:
            say(f"{module.__name__}.{name} is not replaced: it is absent, or has other arguments")
            continue
        for holder in (module, *holders):
            for other in [n for n, x in vars(holder).items() if x is theirs]:
                setattr(holder, other, made)


def _of_dense_rows(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function of vLLM, whose kernels read q, k and v as if they were dense, for any strides of these."""
    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return theirs(*args, **{n: x.contiguous() if n in ("q", "k", "v") else x for n, x in kwargs.items()})
    return call


def served(ours: Callable[..., Results], theirs: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of vLLM that ours serves, with its own arguments, defaults and number of results; also one that was made here.
    None where it lacks an argument that ours needs.

    An argument that ours does not have must have its default, or None.
    """
    if getattr(theirs, "by_gdn_codegen", False):
        return theirs
    about = {n: p for n, p in inspect.signature(theirs).parameters.items() if p.kind is not p.VAR_KEYWORD}
    defaults = {n: p.default for n, p in about.items() if p.default is not p.empty}
    own = {n: p for n, p in inspect.signature(ours).parameters.items() if p.kind is not p.VAR_KEYWORD}
    if any(p.default is p.empty and n not in about for n, p in own.items()):
        return None
    three = "return_intermediate_states" in about

    def call(*args: Any, **kwargs: Any) -> Results:
        said = {**defaults, **dict(zip(about, args, strict=False)), **kwargs}
        said.pop("self", None)
        for name in said.keys() - own.keys():
            x, default = said.pop(name), defaults.get(name)
            if x is not None and x is not default and (isinstance(x, Tensor) or x != default):
                _fail(name, type(x).__name__ if isinstance(x, Tensor) else repr(x), repr(default))
        results = ours(**said)
        return (*results, None) if three else results

    made = falling_back("vllm", theirs.__qualname__, call, _of_dense_rows(theirs))
    made.by_gdn_codegen = True  # type: ignore[attr-defined]
    return made
