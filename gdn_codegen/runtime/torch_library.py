"""The ops for torch.compile and torch.export: gdn_codegen::gated_delta_rule, and one that writes to its caller's buffers.

Eager calls do not come this way: torch's dispatcher takes 10 to 20 us for an op written in Python.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..host.tensors import _fail
from .call.aliasing import reach
from .call.choose import DEFAULT_CHUNK
from .call.launch import run
from .call.normalise import Tensors, Words, check_written


@torch.library.custom_op("gdn_codegen::gated_delta_rule", mutates_args=())
def gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        initial_state: Tensor | None, state_indices: Tensor | None, cu_seqlens: Tensor | None, scale: float | None,
        output_final_state: bool, gate: str, beta_form: str, l2norm: bool, unit_keys: bool, state_v_first: bool,
        state_dtype: str, checkpoint_chunks: int, target: str, chunk_size: int | None, layout: str, schedule: str | None,
        decode: bool) -> list[Tensor]:
    """o, then the final state where it is wanted, then checkpoints where they are."""
    t = Tensors(q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens, None, None)
    x = Words(output_final_state, gate, beta_form, l2norm, unit_keys, state_v_first, state_dtype, False, checkpoint_chunks,
              target, chunk_size, layout, schedule, decode)
    return [y for y in run(t, x, scale) if y is not None]


@torch.library.custom_op("gdn_codegen::gated_delta_rule_into", mutates_args=("final_state", "out", "checkpoints"))
def gated_delta_rule_into(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        initial_state: Tensor | None, state_indices: Tensor | None, cu_seqlens: Tensor | None, scale: float | None,
        output_final_state: bool, gate: str, beta_form: str, l2norm: bool, unit_keys: bool, state_v_first: bool,
        state_dtype: str, checkpoint_chunks: int, target: str, chunk_size: int | None, layout: str, schedule: str | None,
        decode: bool, final_state: Tensor | None, out: Tensor, checkpoints: Tensor | None, in_place: bool) -> Tensor:
    """The same, written to buffers. in_place: final_state holds the initial states, too. Gives the final state where it is wanted
    and has no buffer, else nothing."""
    t = Tensors(q, k, v, g, beta, A_log, dt_bias, final_state if in_place else initial_state, state_indices, cu_seqlens,
                None if in_place else final_state, out)
    x = Words(output_final_state, gate, beta_form, l2norm, unit_keys, state_v_first, state_dtype, in_place, checkpoint_chunks,
              target, chunk_size, layout, schedule, decode)
    check_written(t, in_place, tuple(map(reach, t[:12])))
    _, final, _ = run(t, x, scale, checkpoints)
    return v.new_empty(0) if final is None or final_state is not None else final


def _empty_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, layout: str, v_first: bool, dtype: str) -> Tensor:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, V = q.shape[3], v.shape[3]
    return v.new_empty((sequences, v.shape[2 if layout == "bthd" else 1], *((V, K) if v_first else (K, V))),
                       dtype=getattr(torch, dtype))


def _empty_checkpoints(q: Tensor, v: Tensor, layout: str, v_first: bool, dtype: str, every: int, chunk: int | None) -> Tensor:
    tokens, heads = (1, 2) if layout == "bthd" else (2, 1)
    K, V = q.shape[3], v.shape[3]
    rows = q.shape[0] * q.shape[tokens] // (every * (chunk or DEFAULT_CHUNK))
    return v.new_empty((rows, v.shape[heads], *((V, K) if v_first else (K, V))), dtype=getattr(torch, dtype))


@gated_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Any, dt_bias: Any, initial_state: Any, state_indices: Any,
      cu_seqlens: Tensor | None, scale: Any, output_final_state: bool, gate: Any, beta_form: Any, l2norm: Any, unit_keys: Any,
      state_v_first: bool, state_dtype: str, checkpoint_chunks: int, target: Any, chunk_size: Any, layout: str, schedule: Any,
      decode: Any) -> list[Tensor]:
    made = [v.new_empty(v.shape)]
    if output_final_state:
        made.append(_empty_state(q, v, cu_seqlens, layout, state_v_first, state_dtype))
    if checkpoint_chunks:
        made.append(_empty_checkpoints(q, v, layout, state_v_first, state_dtype, checkpoint_chunks, chunk_size))
    return made


@gated_delta_rule_into.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Any, dt_bias: Any, initial_state: Any, state_indices: Any,
      cu_seqlens: Tensor | None, scale: Any, output_final_state: bool, gate: Any, beta_form: Any, l2norm: Any, unit_keys: Any,
      state_v_first: bool, state_dtype: str, checkpoint_chunks: int, target: Any, chunk_size: Any, layout: str, schedule: Any,
      decode: Any, final_state: Tensor | None, out: Tensor, checkpoints: Any, in_place: bool) -> Tensor:
    if final_state is not None or not output_final_state:
        return v.new_empty(0)
    return _empty_state(q, v, cu_seqlens, layout, state_v_first, state_dtype)


def _no_gradient(context: Any, *gradients: Any) -> Any:
    raise RuntimeError("gdn_codegen computes no gradients: inference only; call under torch.no_grad()")


gated_delta_rule.register_autograd(_no_gradient)


def compiled(t: Tensors, x: Words, scale: float | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `run` does, as an op that torch.compile takes whole."""
    if x.schedule is not None and not isinstance(x.schedule, str):
        _fail("schedule", f"the Schedule {x.schedule.name} under torch.compile", "a name, or None to choose")
    options = (scale, x.output_final_state, x.gate, x.beta_form, x.l2norm, x.unit_keys, x.state_v_first, x.state_dtype,
               x.checkpoint_chunks, x.target, x.chunk_size, x.layout, x.schedule, x.decode)
    final = t.initial_state if x.in_place else t.final_state
    wanted = x.output_final_state and final is None
    if final is None and t.out is None:
        made = gated_delta_rule(*t[:10], *options)
        return made[0], made[1] if wanted else None, made[-1] if x.checkpoint_chunks else None
    out = t.out
    if out is None:  # as for a caller's buffer, kernels leave rows alone that no sequence covers
        out = (t.v.new_empty if t.cu_seqlens is None and t.state_indices is None else t.v.new_zeros)(t.v.shape)
    checkpoints = None
    if x.checkpoint_chunks:
        checkpoints = _empty_checkpoints(t.q, t.v, x.layout, x.state_v_first, x.state_dtype, x.checkpoint_chunks, x.chunk_size)
    state = gated_delta_rule_into(*t[:7], None if x.in_place else t.initial_state, t.state_indices, t.cu_seqlens, *options, final,
                                  out, checkpoints, x.in_place)
    return out, state if wanted else final, checkpoints
