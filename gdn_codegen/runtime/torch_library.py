"""The ops for torch.compile and torch.export: gdn_codegen::gated_delta_rule, and one that writes to its caller's buffers.

Both take the call's tensors, the scale, and what a Request has, in its order. Eager calls do not come this way: torch's
dispatcher takes 10 to 20 us for an op written in Python.
"""
from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor

from ..host.tensors import _fail
from .call.arguments import Tensors
from .call.given import empty_kept
from .call.launch import numbers_for
from .call.positions import NAMES as POSITIONS
from .call.request import DEFAULT_CHUNK, OPTIONS, Request, inputs_of
from .call.run import run, run_checked
from .gradient_library import DECLARED, found, keep

#: Tensors that both ops read, in the order of Tensors.
READ = Tensors._fields[:Tensors._fields.index("final_state")]
#: Arguments by which the first op is differentiated.
DIFFERENTIATED = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def _schema(more: str, results: str) -> str:
    """The schema of an op: the tensors that it reads, the scale, the options, and `more`."""
    tensors = [f"Tensor{'' if get_type_hints(Tensors)[n] is Tensor else '?'} {n}" for n in READ]
    return f"({', '.join([*tensors, 'float? scale', *DECLARED, *filter(None, [more])])}) -> {results}"


def _unpacked(given: tuple[Any, ...]) -> tuple[Tensors, float | None, Request, tuple[Any, ...]]:
    """What an op was given: the tensors that it reads, the scale, the Request, and the rest."""
    n = len(READ)
    read: dict[str, Any] = dict(zip(READ, given, strict=False))
    options = given[n + 1:n + 1 + len(OPTIONS)]
    return Tensors(**read, final_state=None, out=None), given[n], Request(*options), given[n + 1 + len(OPTIONS):]


@torch.library.custom_op("gdn_codegen::gated_delta_rule", mutates_args=(), schema=_schema("", "Tensor[]"))
def gated_delta_rule(*given: Any) -> list[Tensor]:
    """Returns o, then the final state, the checkpoints and the states before chunks if the options ask for them."""
    t, scale, x, _ = _unpacked(given)
    return [y for y in run(inputs_of(t, x), t, x, lambda host: numbers_for(host, scale)) if y is not None]


@torch.library.custom_op(
    "gdn_codegen::gated_delta_rule_into", mutates_args=("final_state", "out", "checkpoints"),
    schema=_schema("Tensor(a!)? final_state, Tensor(b!) out, Tensor(c!)? checkpoints, Tensor? checkpoint_positions=None, "
                   "Tensor? checkpoint_slots=None", "Tensor"))
def gated_delta_rule_into(*given: Any) -> Tensor:
    """The same, written to buffers. With in_place final_state holds the initial states, too. Gives the final state where it is
    wanted and has no buffer, else nothing."""
    t, scale, x, (final_state, out, checkpoints, *at) = _unpacked(given)  # checkpoints: also the buffer for states by token
    rows = checkpoints if "rows" in x.by_token.split("/") or any(y is not None for y in at) else None
    written = {"initial_state" if x.in_place else "final_state": final_state}
    t = t._replace(out=out, intermediate_states_buffer=rows, **written, **dict(zip(POSITIONS, at, strict=False)))
    _, final, _ = run_checked(t, x, scale, checkpoints)
    return t.v.new_empty(0) if final is None or final_state is not None else final


def _empty_states(t: Tensors, x: Request, rows: Any) -> Tensor:
    """Memory for so many states."""
    K, V = t.q.shape[3], t.v.shape[3]
    shape = (rows, t.v.shape[x.axes[1]], *((V, K) if x.state_v_first else (K, V)))
    return t.v.new_empty(shape, dtype=getattr(torch, x.state_dtype))


def _sequences(t: Tensors) -> Any:
    return t.q.shape[0] if t.cu_seqlens is None else t.cu_seqlens.numel() - 1


def _empty_final(t: Tensors, x: Request) -> Tensor:
    return _empty_states(t, x, _sequences(t))


def _empty_checkpoints(t: Tensors, x: Request) -> Tensor:
    tokens = t.q.shape[0] * t.q.shape[x.axes[0]]
    return _empty_states(t, x, tokens // (x.checkpoint_chunks * (x.chunk_size or DEFAULT_CHUNK)))


def _empty_chunks(t: Tensors, x: Request) -> Tensor:
    slots = t.q.shape[0] * t.q.shape[x.axes[0]] // (x.chunk_size or DEFAULT_CHUNK) + _sequences(t)
    return empty_kept(t.v, slots, t.v.shape[x.axes[1]], t.q.shape[3], t.v.shape[3], x.rounded_states)


@gated_delta_rule.register_fake
def _(*given: Any) -> list[Tensor]:
    t, _, x, _ = _unpacked(given)
    made = [t.v.new_empty(t.v.shape)]
    if x.output_final_state:
        made.append(_empty_final(t, x))
    if x.checkpoint_chunks:
        made.append(_empty_checkpoints(t, x))
    if x.saves:
        made.append(_empty_chunks(t, x))
    return made


@gated_delta_rule_into.register_fake
def _(*given: Any) -> Tensor:
    t, _, x, (final_state, *_) = _unpacked(given)
    return t.v.new_empty(0) if final_state is not None or not x.output_final_state else _empty_final(t, x)


def inputs_by_name(t: Tensors, x: Request) -> dict[str, Tensor | None]:
    """The tensors by which a call is differentiated, without the initial states."""
    return {n: getattr(t, n) for n in DIFFERENTIATED[:-1 if x.gate == "raw" else -3]}


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    t, scale, x, _ = _unpacked(inputs)
    keep(ctx, inputs_by_name(t, x), t, x, scale, output)


def _backward(ctx: Any, made: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    wanted = [n for n in DIFFERENTIATED if ctx.needs_input_grad[READ.index(n)]]
    by = found(ctx, made, wanted)
    return *(by.get(n) for n in READ), *[None] * (1 + len(OPTIONS))


gated_delta_rule.register_autograd(_backward, setup_context=_keep)


def compiled(t: Tensors, x: Request, scale: float | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `run` does, as an op that torch.compile takes whole."""
    if x.schedule is not None and not isinstance(x.schedule, str):
        _fail("schedule", f"the Schedule {x.schedule.name} under torch.compile", "a name, or None to choose")
    options = [getattr(x, n) for n in OPTIONS]
    final = t.initial_state if x.in_place else t.final_state
    wanted = x.output_final_state and final is None
    if final is None and t.out is None and t.intermediate_states_buffer is None:
        made = gated_delta_rule(*t[:len(READ)], scale, *options)
        return made[0], made[1] if wanted else None, made[-1] if x.checkpoint_chunks else None
    out = t.out
    if out is None:  # as for a caller's buffer, kernels leave rows alone that no sequence covers
        out = (t.v.new_empty if t.cu_seqlens is None and t.state_indices is None else t.v.new_zeros)(t.v.shape)
    checkpoints = _empty_checkpoints(t, x) if x.checkpoint_chunks else t.intermediate_states_buffer
    read = t._replace(initial_state=None if x.in_place else t.initial_state)[:len(READ)]
    state = gated_delta_rule_into(*read, scale, *options, final, out, checkpoints, t.checkpoint_positions,
                                  t.checkpoint_slots)
    return out, state if wanted else final, checkpoints
