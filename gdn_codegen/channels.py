"""Ops of members with a gate for each channel of the key, with the names and argument orders of FLA's functions.

All take the keywords of `chunk_gated_delta_rule` that suit their inputs, as the ops of family.py do, and FLA's own. Of these
disable_recompute, use_graph and max_num_seqs change no result. safe_gate is a promise that g is -5 or more, and so is a
lower_bound of -5 or more with raw gates: kernels then take g for -5 where it is less, and compute fewer products in bfloat16 and
float32. `fused_recurrent_...` take any number of tokens; up to 16 per sequence are a decoding step.

Inputs: q, k [B, T, H, K]; v [B, T, HV, V], where HV is a multiple of H; g [B, T, HV, K], logs of decays, or raw gates with
use_gate_in_kernel=True: -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)) if lower_bound is
given. A_log is [HV], dt_bias [HV K] or [HV, K]. Kernels compute this in float32.
"""
from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from .host.arguments import _LARGEST, _check_flag
from .host.tensors import _fail, _python_number
from .runtime.call import members
from .runtime.call.normalise import check_plain, shape_of, token_axis

State = Tensor | None
_call: Callable[..., tuple[Any, ...]] = members.call
#: The log decay that the input forms "safe" and "floored" let no gate fall below.
SAFE = -5
#: FLA's keywords that change no result of a forward pass.
_NO_RESULT = ("disable_recompute", "use_graph", "max_num_seqs")


def _named(initial_state: State, output_final_state: bool, cu_seqlens: Tensor | None, **more: Any) -> dict[str, Any]:
    return dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, **more)


def _others(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in kwargs.items() if n not in _NO_RESULT}


def _check_bound(lower_bound: Any, safe_gate: Any) -> float | None:
    """The bound of log decays. ValueError for what is none."""
    _check_flag("safe_gate", safe_gate)
    bound = _python_number(lower_bound)
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, float)) or not -_LARGEST <= bound < 0):
        _fail("lower_bound", repr(lower_bound), "a number below 0, or None")
    return bound


def _is_floored(lower_bound: float | None, safe_gate: bool, others: dict[str, Any]) -> bool:
    """Whether kernels may take log decays for -5 where they are less, as the caller promises that none is."""
    logs = others.get("gate", "log") == "log" and not others.get("use_gate_in_kernel")
    return logs and safe_gate and (lower_bound or 0) >= SAFE


def _raw(g: Any, raw: Any, A_log: Any, dt_bias: Any, lower_bound: Any, safe_gate: Any, others: dict[str, Any]
         ) -> tuple[dict[str, Any], str]:
    """The tensors of the gate's input form, and the form; "" for logs of decays without a bound. ValueError for what
    contradicts. others: keywords of the call. gate="raw" is taken from them."""
    _check_flag("use_gate_in_kernel", raw)
    lower_bound = _check_bound(lower_bound, safe_gate)
    if raw and others.get("gate", "log") not in ("log", "raw"):
        _fail("use_gate_in_kernel", f"True with gate={others['gate']!r}", "gate='raw', or use_gate_in_kernel=False")
    raw = raw or others.get("gate") == "raw"
    if raw:
        others.pop("gate", None)
    if not raw or len(shape_of("g", g)) != 4:  # the call refuses another rank
        return {}, "g=floored" if _is_floored(lower_bound, safe_gate, others) else ""
    if safe_gate and (lower_bound is None or lower_bound < SAFE):
        _fail("lower_bound", lower_bound, "-5 or more, which safe_gate=True needs")
    if A_log is None and lower_bound is None:
        _fail("A_log", None, "a tensor [HV], or lower_bound")
    heads, K = g.shape[3 - token_axis(others)], g.shape[3]
    found = {"A_log": (A_log, (heads,)), "dt_bias": (dt_bias, (heads, K))}
    for name, (x, shape) in found.items():
        if x is not None:
            check_plain(name, x)
            if x.numel() != prod(shape):
                _fail(name, f"shape {tuple(x.shape)}", f"shape {shape}")
    tensors = {n: None if x is None else x.reshape(shape) for n, (x, shape) in found.items()}
    if lower_bound is None:
        return tensors, "g=raw"
    bound = None if lower_bound == SAFE else g.new_full((heads,), float(lower_bound), dtype=torch.float32)
    return {**tensors, "lower_bound": bound}, "g=safe" if lower_bound >= SAFE else "g=bounded"


def _sigmoid(flag: Any, others: dict[str, Any]) -> dict[str, Any]:
    """The flag, unless it was not set and our own keyword says how beta comes."""
    return {} if flag is False and "beta_form" in others else {"use_beta_sigmoid_in_kernel": flag}


def chunk_kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = False,
        lower_bound: float | None = None, disable_recompute: bool = False, return_intermediate_states: bool = False,
        state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
        cp_context: None = None, use_graph: bool = False, max_num_seqs: int | None = None, *, A_log: State = None,
        dt_bias: State = None, **kwargs: Any) -> tuple[Any, ...]:
    """Kimi Delta Attention (arXiv:2510.26692). Returns (o, final state or None). beta: [B, T, HV]."""
    more, form = _raw(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate, kwargs)
    named = _named(initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                   allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first)
    others = _others(kwargs) | {"cu_seqlens_cpu": cu_seqlens_cpu, "return_intermediate_states": return_intermediate_states,
                                "cp_context": cp_context, **_sigmoid(use_beta_sigmoid_in_kernel, kwargs)}
    return _call("kimi_delta_attention", dict(q=q, k=k, v=v, g=g, beta=beta, **more), {"scale": scale}, named, others, form)


def fused_recurrent_kda(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: State = None, dt_bias: State = None,
        scale: float | None = None, initial_state: State = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False, lower_bound: float | None = None, state_v_first: bool = False,
        cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """`chunk_kda` for any number of tokens."""
    more, form = _raw(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, False, kwargs)
    named = _named(initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                   allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first)
    others = _others(kwargs) | _sigmoid(use_beta_sigmoid_in_kernel, kwargs)
    return _call("kimi_delta_attention", dict(q=q, k=k, v=v, g=g, beta=beta, **more), {"scale": scale}, named, others, form,
                 recurrent=True)


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: State = None,
              output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
              cu_seqlens_cpu: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """Gated linear attention (arXiv:2312.06635). Returns (o, final state or None)."""
    named = _named(initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)
    return _call("gla", dict(q=q, k=k, v=v, g=g), {"scale": scale}, named, {"cu_seqlens_cpu": cu_seqlens_cpu, **kwargs})


def fused_recurrent_gla(
        q: Tensor, k: Tensor, v: Tensor, gk: State = None, gv: None = None, scale: float | None = None,
        initial_state: State = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
        cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """`chunk_gla` for any number of tokens. gk: g; None is no decay. gv must be None, and reverse False."""
    if gv is not None:
        _fail("gv", "a value", "None: gates are for channels of the key")
    if reverse is not False:
        _fail("reverse", repr(reverse), "False: tokens are read from the first to the last")
    if gk is None:
        shape = shape_of("v", v)
        gk = v.new_zeros((*shape[:3], *shape_of("k", k)[3:]), dtype=torch.float32)
    named = _named(initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)
    return _call("gla", dict(q=q, k=k, v=v, g=gk), {"scale": scale}, named, kwargs, called={"g": "gk"}, recurrent=True)


def chunk_gdn2(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False,
        lower_bound: float | None = None, disable_recompute: bool = False, return_intermediate_states: bool = False,
        state_v_first: bool = False, cp_context: None = None, *, A_log: State = None, dt_bias: State = None, **kwargs: Any
        ) -> tuple[Any, ...]:
    """Gated DeltaNet 2: channels of the key are erased by b [B, T, HV, K], those of the value written by w [B, T, HV, V]. Returns
    (o, final state or None)."""
    more, form = _raw(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate, kwargs)
    named = _named(initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                   state_v_first=state_v_first)
    others = _others(kwargs) | {"cu_seqlens_cpu": cu_seqlens_cpu, "return_intermediate_states": return_intermediate_states,
                                "cp_context": cp_context}
    return _call("gated_delta_rule_2", dict(q=q, k=k, v=v, g=g, b=b, w=w, **more), {"scale": scale}, named, others, form)


def fused_recurrent_gdn2(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, A_log: State = None, dt_bias: State = None,
        scale: float | None = None, initial_state: State = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, lower_bound: float | None = None,
        state_v_first: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """`chunk_gdn2` for any number of tokens."""
    more, form = _raw(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, False, kwargs)
    named = _named(initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                   state_v_first=state_v_first)
    return _call("gated_delta_rule_2", dict(q=q, k=k, v=v, g=g, b=b, w=w, **more), {"scale": scale}, named, _others(kwargs),
                 form, recurrent=True)


def chunk_rwkv7(
        r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = 1.0, initial_state: State = None,
        output_final_state: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
        safe_gate: bool = False, chunk_size: int | None = None, disable_recompute: bool = False, cp_context: None = None,
        lower_bound: float | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """RWKV-7 (arXiv:2503.14456). Returns (o, final state or None).

    r, w, k, a, b: [B, T, HV, K]; v: [B, T, HV, V]. w: logs of decays; gate="linear" and gate="raw" (with A_log, dt_bias) are
    forms of w. scale: None means K ** -0.5. safe_gate: a promise that w is -5 or more; with a smaller lower_bound, that w is as
    large, which kernels do not need.
    """
    named = _named(initial_state, output_final_state, cu_seqlens)
    lower_bound = _check_bound(lower_bound, safe_gate)
    if lower_bound is not None and (kwargs.get("use_gate_in_kernel") or kwargs.get("gate", "log") == "raw"):
        _fail("lower_bound", f"{lower_bound} with raw gates", "None, because it is a promise of logs of decays")
    form = "w=floored" if _is_floored(lower_bound, safe_gate, kwargs) else ""
    return _call("rwkv7", dict(r=r, w=w, k=k, v=v, a=a, b=b), {"scale": _of_width(scale, r)}, named,
                 _others(kwargs) | {"cu_seqlens_cpu": cu_seqlens_cpu, "cp_context": cp_context, "chunk_size": chunk_size},
                 form)


def fused_recurrent_rwkv7(
        r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = True, cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """`chunk_rwkv7` for any number of tokens, with FLA's defaults of this function."""
    named = _named(initial_state, output_final_state, cu_seqlens)
    return _call("rwkv7", dict(r=r, w=w, k=k, v=v, a=a, b=b), {"scale": _of_width(scale, r)}, named, kwargs, recurrent=True)


def fused_mul_recurrent_rwkv7(
        r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, scale: float | None = 1.0, initial_state: State = None,
        output_final_state: bool = False, reverse: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any
        ) -> tuple[Any, ...]:
    """`fused_recurrent_rwkv7` with -kk and kk a for a and b, as layers of RWKV-7 call it. reverse must be False."""
    if reverse is not False:
        _fail("reverse", repr(reverse), "False: tokens are read from the first to the last")
    for name, x in (("kk", kk), ("a", a)):
        check_plain(name, x)
        if x.shape != shape_of("k", k):
            _fail(name, f"shape {tuple(x.shape)}", f"shape {tuple(k.shape)}, that of k")
    return fused_recurrent_rwkv7(r, w, k, v, -kk, kk * a, scale, initial_state, output_final_state, cu_seqlens, **kwargs)


def _of_width(scale: float | None, r: Tensor) -> float | None:
    """The scale, or that of rows of r."""
    width = shape_of("r", r)[3:].numel()
    return width ** -0.5 if scale is None and width else scale
