"""The ops for torch.compile and torch.export: gdn_codegen::gated_delta_rule, and one that writes to its caller's buffers.

Eager calls do not come this way: torch's dispatcher takes 10 to 20 us for an op written in Python.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import Given, fail
from .calls import run


@torch.library.custom_op("gdn_codegen::gated_delta_rule", mutates_args=())
def gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        initial_state: Tensor | None, state_indices: Tensor | None, cu_seqlens: Tensor | None, scale: float | None,
        output_final_state: bool, gate: str, beta_form: str, l2norm: bool, state_v_first: bool, state_dtype: str,
        checkpoint_chunks: int, target: str, chunk_size: int | None, layout: str, schedule: str | None,
        decode: bool) -> list[Tensor]:
    """o, then the final state where it is wanted, then checkpoints where they are."""
    x = Given(q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens, scale, output_final_state, gate,
              beta_form, l2norm, state_v_first, state_dtype, checkpoint_chunks, target, chunk_size, layout, schedule, decode,
              None, None, False)
    return [t for t in run(x) if t is not None]


@torch.library.custom_op("gdn_codegen::gated_delta_rule_into", mutates_args=("final_state", "out", "checkpoints"))
def gated_delta_rule_into(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        initial_state: Tensor | None, state_indices: Tensor | None, cu_seqlens: Tensor | None, scale: float | None,
        output_final_state: bool, gate: str, beta_form: str, l2norm: bool, state_v_first: bool, state_dtype: str,
        checkpoint_chunks: int, target: str, chunk_size: int | None, layout: str, schedule: str | None, decode: bool,
        final_state: Tensor | None, out: Tensor, checkpoints: Tensor | None, in_place: bool) -> None:
    """The same, written to buffers. in_place: final_state holds the initial states, too."""
    x = Given(q, k, v, g, beta, A_log, dt_bias, final_state if in_place else initial_state, state_indices, cu_seqlens, scale,
              output_final_state, gate, beta_form, l2norm, state_v_first, state_dtype, checkpoint_chunks, target, chunk_size,
              layout, schedule, decode, None if in_place else final_state, out, in_place)
    made = run(x)[2]
    if checkpoints is not None and made is not None:
        checkpoints.copy_(made)


def _sequences(x: Given) -> Any:
    return x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1


def _state(x: Given) -> Tensor:
    """An empty final state."""
    heads = x.v.shape[2 if x.layout == "bthd" else 1]
    K, V = x.q.shape[3], x.v.shape[3]
    return x.v.new_empty((_sequences(x), heads, *((V, K) if x.state_v_first else (K, V))), dtype=getattr(torch, x.state_dtype))


def _out(x: Given) -> Tensor:
    return x.v.new_empty(x.v.shape)


@gated_delta_rule.register_fake
def _(*arguments: Any) -> list[Tensor]:
    x = Given._make((*arguments, None, None, False))
    return [_out(x), *([_state(x)] if x.output_final_state else [])]


@gated_delta_rule_into.register_fake
def _(*arguments: Any) -> None:
    return None


def _no_gradient(context: Any, *gradients: Any) -> Any:
    raise RuntimeError("gdn_codegen computes no gradients: inference only; call under torch.no_grad()")


gated_delta_rule.register_autograd(_no_gradient)


def compiled(x: Given) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `run` does, as an op that torch.compile takes whole."""
    if x.schedule is not None and not isinstance(x.schedule, str):
        fail("schedule", f"the Schedule {x.schedule.name} under torch.compile", "a name, or None to choose")
    functional = x[:-3]
    if x.final_state is None and x.out is None and not x.in_place:
        o, *rest = gated_delta_rule(*functional)
        return o, rest.pop(0) if x.output_final_state else None, rest.pop() if rest else None
    out = _out(x) if x.out is None else x.out
    final = x.initial_state if x.in_place else x.final_state
    if final is None and x.output_final_state:
        final = _state(x)
    states = functional if not x.in_place else x._replace(initial_state=None)[:-3]
    gated_delta_rule_into(*states, final, out, None, x.in_place)
    return out, final, None
