"""Ops of the family's other members, with the names and argument orders of FLA's functions.

All take the keywords of `chunk_gated_delta_rule` that suit their inputs: layout, out, state_v_first, state_dtype, final_state,
state_indices, inplace_final_state, checkpoint_chunks, max_seqlen, target, chunk_size, schedule, batch_invariant, and so on. A
keyword that no op has, or that asks for what a member has not, raises ValueError. All are differentiable, as that op is
(docs/training.md).
"""
from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from .host.tensors import _fail, _integer
from .ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .runtime.call import by_token, members
from .runtime.call.aliasing import shared
from .runtime.call.foreign_keywords import LENGTHS, by_our_names, longest
from .runtime.call.normalise import check_plain, shape_of, token_axis

State = Tensor | None
_call: Callable[..., tuple[Any, ...]] = members.call


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
                     output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
                     cu_seqlens_cpu: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """DeltaNet (arXiv:2406.06484). Returns (o, final state or None).

    q, k: [B, T, H, K]; v: [B, T, HV, V], where HV is a multiple of H; beta: [B, T, HV]. scale: None means K ** -0.5.
    cu_seqlens_cpu: a copy of cu_seqlens on the CPU. It says how long the longest sequence is, as max_seqlen does.
    """
    named = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                 use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return _call("delta_rule", dict(q=q, k=k, v=v, beta=beta), {"scale": scale}, named,
                 {"cu_seqlens_cpu": cu_seqlens_cpu, **kwargs})


def fused_recurrent_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, beta: State = None, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any
        ) -> tuple[Any, ...]:
    """`chunk_delta_rule` for any number of tokens. Up to 16 tokens per sequence are a decoding step. beta: None means 1.

    A step also takes the arguments for draft tokens of `recurrent_gated_delta_rule`.
    """
    if beta is None:
        if kwargs.get("use_beta_sigmoid_in_kernel") or kwargs.get("beta_form", "given") != "given":
            _fail("beta", None, "a tensor, from which this form computes beta")
        beta = v.new_ones(shape_of("v", v)[:3], dtype=torch.float32)
    named = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                 use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return _call("delta_rule", dict(q=q, k=k, v=v, beta=beta), {"scale": scale}, named, kwargs, recurrent=True)


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: State = None, g_gamma: State = None, scale: float | None = None,
                     initial_state: State = None, output_final_state: bool = False, state_v_first: bool = False,
                     cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """Gated linear attention with a decay for each token and head, or for each head. Returns (o, final state or None).

    q, k: [B, T, H, K]; v: [B, T, HV, V], where HV is a multiple of H; g: [B, T, HV], logs of decays; None means no decay.
    g_gamma: [HV], logs of decays of all tokens; then g must be None. scale: None means K ** -0.5. cu_seqlens_cpu: as in
    `chunk_delta_rule`.
    """
    named = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                 state_v_first=state_v_first)
    return _simple_gla(q, k, v, g, g_gamma, scale, named, {"cu_seqlens_cpu": cu_seqlens_cpu, **kwargs})


def fused_recurrent_simple_gla(
        q: Tensor, k: Tensor, v: Tensor, g: State = None, g_gamma: State = None, scale: float | None = None,
        initial_state: State = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
        cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """`chunk_simple_gla` for any number of tokens. Up to 16 tokens per sequence are a decoding step. reverse must be False.

    A step also takes the arguments for draft tokens of `recurrent_gated_delta_rule`.
    """
    _check_forwards(reverse)
    named = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                 state_v_first=state_v_first)
    return _simple_gla(q, k, v, g, g_gamma, scale, named, kwargs, recurrent=True)


def _check_forwards(reverse: Any) -> None:
    if reverse is not False:
        _fail("reverse", repr(reverse), "False: tokens are read from the first to the last")


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, g: State, g_gamma: State, scale: float | None, named: dict[str, Any],
                others: dict[str, Any], recurrent: bool = False) -> tuple[Any, ...]:
    """The page with a decay for each token, or that with a decay for each head."""
    if g is not None and g_gamma is not None:
        _fail("g_gamma", "a value beside g", "one of g and g_gamma")
    if g is None and g_gamma is None:
        if others.get("gate", "log") != "log" or others.get("use_gate_in_kernel"):
            _fail("g", None, "a tensor, from which this form computes the gate")
        g = v.new_zeros(shape_of("v", v)[:3], dtype=torch.float32)
    page, decay = ("simple_gla", g) if g_gamma is None else ("lightning_attention", g_gamma)
    return _call(page, dict(q=q, k=k, v=v, g=decay), {"scale": scale}, named, others,
                 called={} if g_gamma is None else {"g": "g_gamma"}, recurrent=recurrent)


def chunk_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
                         initial_state: State = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                         **kwargs: Any) -> tuple[Any, ...]:
    """Lightning attention (arXiv:2405.17381). Returns (o, final state or None).

    q, k: [B, T, H, K]; v: [B, T, HV, V], where HV is a multiple of H. The log decay of head h is
    -8 h / HV * (1 - layer_idx / num_layers), as in FLA. `chunk_simple_gla` takes other decays of heads, as g_gamma. scale: None
    means K ** -0.5.
    """
    g = _decays_of_layer(v, layer_idx, num_layers, kwargs)
    return chunk_simple_gla(q, k, v, None, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens, **kwargs)


def fused_recurrent_lightning_attn(
        q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, reverse: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any
        ) -> tuple[Any, ...]:
    """`chunk_lightning_attn` for any number of tokens; see `fused_recurrent_simple_gla`."""
    g = _decays_of_layer(v, layer_idx, num_layers, kwargs)
    return fused_recurrent_simple_gla(q, k, v, None, g, scale, initial_state, output_final_state, reverse, cu_seqlens=cu_seqlens,
                                      **kwargs)


def _decays_of_layer(v: Tensor, layer_idx: Any, num_layers: Any, others: dict[str, Any]) -> Tensor:
    """The log decay of each head in a layer."""
    layer_idx, num_layers = map(_integer, (layer_idx, num_layers))
    for name, x in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if isinstance(x, bool) or not isinstance(x, int):
            _fail(name, type(x).__name__, "an int")
    if not 0 <= layer_idx <= num_layers or num_layers < 1:
        _fail("layer_idx", f"{layer_idx} of {num_layers} layers", "0 to num_layers, which is at least 1")
    shape = shape_of("v", v)
    heads = shape[3 - token_axis(others)] if len(shape) == 4 else 1  # the call refuses another rank
    each = -(8 / max(heads, 1) * (1 - float(layer_idx) / float(num_layers)))
    return torch.arange(heads, dtype=torch.float32, device=v.device) * each


#: Arguments for states of draft tokens, tables of chunks, and vLLM's buffer of any shape: they count steps where a token has
#: several.
_NOT_BY_STEPS = (*by_token.ARGUMENTS, "chunk_indices", "chunk_offsets", "core_attn_out")
#: Arguments that count tokens. Of a pack with n steps for each token they are n times as much.
_COUNTS = ("checkpoint_chunks", "checkpoint_every_n_tokens", "checkpoint_positions", *LENGTHS)
#: The gate of a step that does not decay, in each form.
_NO_DECAY = {"log": 0.0, "linear": 1.0, "raw": -inf}


def chunk_gated_delta_product(
        q: Tensor, k: Tensor, v: Tensor, g: State, beta: Tensor, num_householder: int, scale: float | None = None,
        initial_state: State = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: None = None, **kwargs: Any
        ) -> tuple[Any, ...]:
    """Gated DeltaProduct (arXiv:2502.10297): n = num_householder delta rules for each token. Returns (o, final state or None).

    q: [B, T, H, K]; k: [B, n T, H, K]; v: [B, n T, HV, V], where HV is a multiple of H; g: [B, T, HV], logs of decays, or None
    for no decay; beta: [B, n T, HV]. Rows n t to n t + n - 1 of k, v and beta are the steps of token t, in order. The token's
    decay comes before its first step, and it reads the state after its last. cu_seqlens counts tokens, not steps.

    This is `chunk_gated_delta_rule` on n T tokens: q is zero and the decay is 1 between. So it takes n times the time of T
    tokens, and copies q and o. The keywords are those of `chunk_gated_delta_rule`, without tables of chunks. Positions and
    distances of states count tokens.
    """
    return _product(chunk_gated_delta_rule, (q, k, v, g, beta), num_householder,
                    dict(scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                         use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context,
                         **kwargs))


def fused_recurrent_gated_delta_product(
        q: Tensor, k: Tensor, v: Tensor, g: State, beta: Tensor, num_householder: int, scale: float | None = None,
        initial_state: State = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """`chunk_gated_delta_product` for any number of tokens. FLA has no function of this name. Up to 16 steps per sequence, so
    16 / n tokens, are a decoding step of `fused_recurrent_gated_delta_rule`. It keeps no states of draft tokens."""
    return _product(fused_recurrent_gated_delta_rule, (q, k, v, g, beta), num_householder,
                    dict(scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                         use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs))


def _product(op: Callable[..., Any], inputs: tuple[Any, ...], n: Any, said: dict[str, Any]) -> tuple[Any, ...]:
    """A product of n steps for each token, by an op of one step. said: the call's other arguments."""
    n = _integer(n)
    if type(n) is not int or n < 1:
        _fail("num_householder", repr(n), "an int of at least 1")
    said = by_our_names(said)
    slots = said.get("state_indices")
    for name in [m for m in _NOT_BY_STEPS if said.get(m) is not None] + (
            ["state_indices"] if isinstance(slots, Tensor) and slots.ndim == 2 else []):
        _fail(name, "a tensor" if name != "state_indices" else "rank 2", "no value, because a token has several steps"
              if name != "state_indices" else "rank 1, because a token has several steps")
    tokens, (q, k, v, g, beta) = token_axis(said), inputs
    steps, out = _steps(q, k, v, g, beta, n, tokens), said.pop("out", None)
    raw = "raw" if said.get("use_gate_in_kernel") is True else said.get("gate", "log")
    if g is None:
        if raw != "log":
            _fail("g", None, "a tensor, from which this form computes the gate")
        g = v.new_zeros(v.shape[:3], dtype=torch.float32)
    elif n > 1:
        g = _between(g, tokens, n, 0, _NO_DECAY.get(raw, 0.0))
    if n > 1:
        q = _between(q, tokens, n, n - 1)
    for name in LENGTHS:
        if said.get(name) is not None:
            longest(name, said[name], said.get("cu_seqlens"))  # an error says what the caller said
    for name in ("cu_seqlens", *_COUNTS):
        x = _integer(said.get(name))
        said[name] = x * n if isinstance(x, Tensor) or type(x) is int else x
    whole = None if out is None else _room(out, inputs, tokens, n)
    o, *states = op(q, k, v, g=g, beta=beta, out=whole, **{m: y for m, y in said.items() if y is not None})
    o = o.unflatten(tokens, (steps // n, n)).select(tokens + 1, n - 1)
    return o.contiguous() if out is None else out.copy_(o), *states


def _room(out: Any, inputs: tuple[Any, ...], tokens: int, n: int) -> Tensor:
    """Memory for rows of all steps, in which those of the tokens are as in the caller's buffer."""
    v = inputs[2]
    shape = (*v.shape[:tokens], v.shape[tokens] // n, *v.shape[tokens + 1:])
    check_plain("out", out)
    if out.shape != shape or out.dtype != v.dtype:
        _fail("out", f"shape {tuple(out.shape)}, {out.dtype}", f"shape {tuple(shape)}, {v.dtype}")
    for name, y in zip(("q", "k", "v", "g", "beta"), inputs, strict=True):
        if y is not None and not torch.compiler.is_compiling() and shared(out, y):
            _fail("out", f"memory of {name}", "memory of its own")
    return _between(out, tokens, n, n - 1)


def _steps(q: Any, k: Any, v: Any, g: Any, beta: Any, n: int, tokens: int) -> int:
    """The steps of a batch row. ValueError for an input without n steps for each token. tokens: the axis."""
    T = shape_of("q", q)[tokens:tokens + 1].numel()
    for name, x, count in (("k", k, n * T), ("v", v, n * T), ("beta", beta, n * T), *([] if g is None else [("g", g, T)])):
        shape = shape_of(name, x)
        if len(shape) <= tokens or shape[tokens] != count:
            _fail(name, f"shape {tuple(shape)}", f"{count} in place {tokens}: num_householder = {n}, and q has {T} tokens"
                  if name != "g" else f"{T} in place {tokens}, as q has")
    return n * T


def _between(x: Tensor, tokens: int, n: int, at: int, rest: float = 0.0) -> Tensor:
    """Rows of x with n - 1 rows of one number to each. at: the place of its row among them."""
    out = x.new_full((*x.shape[:tokens + 1], n, *x.shape[tokens + 1:]), rest)
    out.select(tokens + 1, at).copy_(x)
    return out.flatten(tokens, tokens + 1)
