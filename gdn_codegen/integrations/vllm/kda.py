"""The ops of vLLM for Kimi Delta Attention that ours serve. Where they are (version or commit, module: names, who calls them):

- 055e47c2 and 0.33.0, vllm/third_party/flash_linear_attention/ops/kda.py: `chunk_kda` and `fused_recurrent_kda`, whose gates
  were computed before, and `chunk_kda_with_fused_gate(q, k, v, raw_g, beta, A_log, g_bias, scale, initial_state,
  output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)`; other versions add `safe_gate` and `lower_bound`, or have
  `raw_beta`. In 0.33.0 Bailing's layers call them, and pass `safe_gate` and `lower_bound` beside computed gates, which vLLM's
  functions ignore.
- 0.33.0, vllm/models/kimi_k3/VENDOR/ops/third_party/kda (VENDOR is nvidia or amd), chunk.py: `chunk_kda`,
  `chunk_kda_with_fused_gate(..., raw_beta, ..., out)`; fused_recurrent.py: `fused_recurrent_kda` with raw gates and
  `fused_recurrent_kda_packed_decode`. Layers of Kimi Linear and of Kimi K3 call them.
- 0.33.0, vllm/models/kimi_k3/nvidia/kda.py: `_flashkda_prefill`, which Kimi K3's layer takes on Hopper and newer GPUs.
- 0.33.0, vllm/models/glm5next/VENDOR/ops/third_party/kda/kernels.py: `chunk_kda_with_fused_gate`, and `fused_recurrent_kda` with
  raw gates by `compute_gate`.
- 0.33.0, vllm/models/glm5next/common/kda.py: the method `_flashkda_prefill` of `Glm5NextLinearAttention`, which GLM-5.3's layer
  takes on the same GPUs: FlashKDA in memory of vLLM's workspace, and the exporter of checkpoints.

Slots, lengths, and values that are not read: as in sites.py.
"""
from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import channels
from ...host.tensors import _fail
from ..calls import falling_back
from . import FLASHKDA, GLM, say
from .sites import Results, State, dtype_of, longest, pool_of, put, v_first


def _prompts(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: State, output_final_state: bool,
             cu_seqlens: State, **more: Any) -> Results:
    return channels.chunk_kda(q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                              cu_seqlens=cu_seqlens, max_seqlen=longest(cu_seqlens), state_v_first=v_first(), **more)


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
              output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: State = None,
              safe_gate: Any = None, lower_bound: Any = None) -> Results:
    """Prefill with gates that were computed before, by whatever bound."""
    return _prompts(q, k, v, g, beta, initial_state, output_final_state, scale=scale, cu_seqlens=cu_seqlens,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_dtype=dtype_of(initial_state, output_final_state))


def chunk_kda_with_fused_gate(
        q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, A_log: Tensor, g_bias: State = None, beta: State = None,
        raw_beta: State = None, scale: float | None = None, initial_state: State = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: State = None, safe_gate: bool | None = None,
        lower_bound: float | None = None, chunk_indices: State = None, chunk_offsets: State = None, out: State = None) -> Results:
    """Prefill with raw gates. With safe_gate=False, where vLLM has it, lower_bound says nothing."""
    write: Any = raw_beta if beta is None else beta
    return _prompts(q, k, v, raw_g, write, initial_state, output_final_state, scale=scale, cu_seqlens=cu_seqlens, A_log=A_log,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, dt_bias=g_bias, use_gate_in_kernel=True,
                    use_beta_sigmoid_in_kernel=beta is None, lower_bound=None if safe_gate is False else lower_bound, out=out,
                    state_dtype=dtype_of(initial_state, output_final_state))


def flashkda_prefill(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float,
        initial_state: Tensor, cu_seqlens: Tensor, out: Tensor, final_state: Tensor, workspace: State = None,
        checkpoint_state: State = None, checkpoint_offsets: State = None) -> Results:
    """Prefill with raw gates and beta, to out and final_state. The state of sequence n after its first checkpoint_offsets[n]
    tokens goes to checkpoint_state[n], for 0 nothing."""
    more: dict[str, Any] = {}
    if checkpoint_state is not None and checkpoint_offsets is not None:
        rows = torch.arange(len(checkpoint_offsets), dtype=torch.int32, device=q.device)
        more = dict(checkpoint_states=checkpoint_state, checkpoint_positions=checkpoint_offsets[:, None],
                    checkpoint_slots=torch.where(checkpoint_offsets > 0, rows, -1)[:, None])
    return _prompts(q, k, v, g, beta, initial_state, True, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True, A_log=A_log,
                    dt_bias=dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=lower_bound, out=out,
                    final_state=final_state, **more)[:2]


def _tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float | None, norm: bool,
            ends: State, indices: Any, accepted: State, out: State, raw_beta: bool, gate: dict[str, Any], in_place: bool = True
            ) -> Results:
    """Decoding and draft tokens, with states of a pool. Rows of `out` of skipped sequences become zero."""
    more = pool_of(q, ends, indices, accepted, in_place)
    if out is not None:
        out.zero_()
    return channels.fused_recurrent_kda(q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=ends, out=out,
                                        use_qk_l2norm_in_kernel=norm, use_beta_sigmoid_in_kernel=raw_beta, **gate, **more)


def _raw(A_log: State, dt_bias: State, lower_bound: float | None) -> dict[str, Any]:
    return dict(A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, lower_bound=lower_bound)


def fused_recurrent_kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, ssm_state_indices: Tensor,
        scale: float | None = None, inplace_final_state: bool = True, use_qk_l2norm_in_kernel: bool = True,
        cu_seqlens: State = None, num_accepted_tokens: State = None, out: State = None, sigmoid_beta: bool = False,
        a_log: State = None, g_bias: State = None, compute_gate: bool = False, lower_bound: float | None = None,
        safe_gate: Any = None) -> Results:
    """Gates that were computed before, by whatever bound, or raw ones with compute_gate, which have one."""
    if compute_gate and lower_bound is None:
        _fail("lower_bound", None, "a number beside compute_gate=True")
    return _tokens(q, k, v, g, beta, initial_state, scale, use_qk_l2norm_in_kernel, cu_seqlens, ssm_state_indices,
                   num_accepted_tokens, out, sigmoid_beta, _raw(a_log, g_bias, lower_bound) if compute_gate else {},
                   inplace_final_state)


def fused_recurrent_kda_of_raw(
        q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: State,
        lower_bound: float | None, initial_state: Tensor, cu_seqlens: Tensor, ssm_state_indices: Tensor,
        num_accepted_tokens: State = None, out: State = None, uniform_sequence_length: int | None = None,
        fuse_gate: bool | None = None) -> Results:
    """Raw gates and beta. The last two arguments say how vLLM's kernels compute it."""
    return _tokens(q, k, v, raw_g, raw_beta, initial_state, None, True, cu_seqlens, ssm_state_indices, num_accepted_tokens, out,
                   True, _raw(A_log, dt_bias, lower_bound))


def fused_recurrent_kda_packed_decode(
        mixed_qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
        initial_state: Tensor, state_indices: Tensor, scale: float | None = None, out: State = None) -> Results:
    """One token of each sequence, from packed rows [B, 2 H K + H V], which are read in place. raw_g: [1, B, H, K]; raw_beta:
    [1, B, H]; out: [1, B, H, V]."""
    rows, heads, K = len(mixed_qkv), *raw_g.shape[2:]
    width, V = heads * K, mixed_qkv.shape[1] // heads - 2 * K
    parts = mixed_qkv[:, :width], mixed_qkv[:, width:2 * width], mixed_qkv[:, 2 * width:]
    q, k, v = (x.view(rows, 1, heads, n) for x, n in zip(parts, (K, K, V), strict=True))
    o = mixed_qkv.new_empty((1, rows, heads, V)) if out is None else out
    _, pool = _tokens(q, k, v, raw_g[0][:, None], raw_beta[0][:, None], initial_state, scale, True, None, state_indices, None,
                      o[0][:, None], True, _raw(A_log, dt_bias, lower_bound))
    return o, pool


_PROMPTS: dict[str, Callable[..., Results]] = {"chunk_kda": chunk_kda, "chunk_kda_with_fused_gate": chunk_kda_with_fused_gate}
#: By the last name of the module that defines them, vLLM's names of ops, and ours.
OPS: dict[str, dict[str, Callable[..., Results]]] = {
    **{n: {**_PROMPTS, "fused_recurrent_kda": fused_recurrent_kda} for n in ("kda", "kernels")}, "chunk": _PROMPTS,
    "fused_recurrent": {"fused_recurrent_kda": fused_recurrent_kda_of_raw,
                        "fused_recurrent_kda_packed_decode": fused_recurrent_kda_packed_decode}}


#: What the method of GLM-5.3's layer names, and its arguments. One that has others is left as it is.
KNOWN = frozenset("""A_log _checkpoint_exporter _flashkda_C _flashkda_buffer_specs checkpoint_offsets contiguous
    current_workspace_manager dt_bias export fwd get_simultaneous head_dim kda_lower_bound ops shape torch view""".split())
ARGUMENTS = ("self", "q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "out", "checkpoint", "raw_qkv", "conv_state",
             "recurrent_state")


def glm_prefill(host: dict[str, Any], theirs: Callable[..., Results]) -> Callable[..., Results]:
    """GLM-5.3's `_flashkda_prefill`. host: the names of its module."""
    def ours(self: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
             out: State, checkpoint: Any = None, raw_qkv: State = None, conv_state: State = None, recurrent_state: State = None
             ) -> Results:
        """o in `out`, or in vLLM's workspace, and final states there. Checkpoints go where vLLM's exporter puts them."""
        final, kept, _, outs = host["current_workspace_manager"]().get_simultaneous(*self._flashkda_buffer_specs)
        n, stores = len(initial_state), checkpoint is not None
        results = flashkda_prefill(
            q, k, v, g, beta, self.A_log.view(-1), self.dt_bias.view(-1, self.head_dim), self.kda_lower_bound, initial_state,
            cu_seqlens, outs[:, :q.shape[1]] if out is None else out, final[:n], checkpoint_state=kept[:n] if stores else None,
            checkpoint_offsets=checkpoint.checkpoint_offsets if stores else None)
        if stores:
            self._checkpoint_exporter.export(checkpoint, raw_qkv=raw_qkv, conv_state=conv_state, recurrent_checkpoint=kept[:n],
                                             recurrent_state=recurrent_state, cu_seqlens=cu_seqlens)
        return results

    made = falling_back("vllm", theirs.__qualname__, ours, theirs)
    made.by_gdn_codegen = True  # type: ignore[attr-defined]
    return made


def replace_glm_prefill(module: ModuleType) -> None:
    """Replace FlashKDA's prefill in GLM-5.3's layer."""
    layer = getattr(module, "Glm5NextLinearAttention", None)
    theirs = getattr(layer, "_flashkda_prefill", None)
    if layer is None or theirs is None:
        say(f"{module.__name__} has no layer with FlashKDA's prefill")
    elif not getattr(theirs, "by_gdn_codegen", False):
        code = theirs.__code__
        unknown = sorted({*code.co_names} - KNOWN)
        if unknown or code.co_varnames[:code.co_argcount] != ARGUMENTS:
            say(f"{module.__name__}: FlashKDA's prefill is not replaced (unknown: {', '.join(unknown) or 'its arguments'})")
        else:
            layer._flashkda_prefill = glm_prefill(vars(module), theirs)


def replace(module: ModuleType, everywhere: bool) -> None:
    """Replace the ops for KDA that a module defines. everywhere: also in modules of vLLM that have imported them."""
    if module.__name__ == GLM:
        replace_glm_prefill(module)
        return
    flash = {"_flashkda_prefill": flashkda_prefill}
    put(module, flash if module.__name__ == FLASHKDA else OPS[module.__name__.rsplit(".", 1)[1]], everywhere)
