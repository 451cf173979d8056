"""The ops of the family's members for torch.compile and torch.export: gdn_codegen::member, and one that writes to its caller's
buffers.

Both take the page's inputs and what callers call them, the numbers, the tensors that a call of any member may have, and what a
Request has, in its order.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import algorithms
from ..host.arguments import _check_rank
from ..host.tensors import _fail
from ..ir.decays import log_decays
from ..ir.page import Algorithm
from .call.arguments import INPUTS, Tensors
from .call.given import empty_kept
from .call.gradient import RAW
from .call.members import by_names, check_forms, eager, prepared
from .call.request import DEFAULT_CHUNK, OPTIONS, Request
from .gradient_library import DECLARED, by_name, found, keep
from .torch_library import READ

#: Tensors beside inputs that both ops read, and those that the second one writes.
MORE, WRITTEN = READ[INPUTS:], ("final_state", "out", "intermediate_states_buffer")
_AT = "checkpoint_positions", "checkpoint_slots"




def _schema(more: list[str], results: str) -> str:
    """The schema of an op: inputs, their names, what callers call them, numbers, tensors, options, and `more`."""
    tensors = [f"Tensor? {n}" for n in MORE]
    first = "Tensor[] inputs, str[] names, str[] absent, str[] called, float? scale"
    return f"({', '.join([first, *tensors, *DECLARED, *more])}) -> {results}"


def _unpacked(given: tuple[Any, ...]) -> tuple[Algorithm, dict[str, Any], dict[str, Any], Tensors, Request, dict[str, str]]:
    """The page, its inputs and numbers, the other tensors of a call, the Request, and what callers call inputs."""
    inputs, names, absent, called, scale, *rest = given
    tensors, options = rest[:len(MORE)], rest[len(MORE):len(MORE) + len(OPTIONS)]
    more = dict(zip((*MORE, *WRITTEN, *_AT), (*tensors, *rest[len(MORE) + len(OPTIONS):]), strict=False))
    x = Request(*options)
    page = algorithms.find(x.page)
    if x.in_place:
        more["initial_state"] = more["final_state"]
    t = Tensors(*(more.get(n) for n in Tensors._fields))  # type: ignore[arg-type]
    return (page, by_name(inputs, names, absent), {"scale": scale} if "scale" in page.scalars else {}, t,
            x, dict(zip(called[::2], called[1::2], strict=True)))


def _made(given: tuple[Any, ...]) -> list[Tensor | None]:
    """What an op returns: o, the final state and the checkpoints, None for what the call does not make."""
    page, inputs, numbers, t, x, called = _unpacked(given)
    with by_names(called):
        check_forms(page, x.gate, x.beta_form, x.l2norm, x.unit_keys)
        results = eager(*prepared(page, inputs, t, x), numbers)
    return [None if any(y is z for z in (t.out, t.initial_state, t.final_state)) else y for y in (*results, None)[:3]]


def _empty(given: tuple[Any, ...]) -> list[Tensor | None]:
    """Memory for what an op returns."""
    page, inputs, _, t, x, called = _unpacked(given)
    with by_names(called):
        check_forms(page, x.gate, x.beta_form, x.l2norm, x.unit_keys)
        sizes, like = _sizes(page, inputs, x)
    tokens, tile = sizes["B"] * sizes["T"], [sizes["K"], sizes["V"]][::-1 if x.state_v_first else 1]
    sequences = sizes["B"] if t.cu_seqlens is None else t.cu_seqlens.numel() - 1

    def states(count: Any) -> Tensor:
        return like.new_empty((count, sizes["HV"], *tile), dtype=getattr(torch, x.state_dtype))
    rows = [sizes["T"], sizes["HV"]][::1 if x.layout == "bthd" else -1]
    final = x.output_final_state and not x.in_place and t.final_state is None
    return [like.new_empty((sizes["B"], *rows, sizes["V"])) if t.out is None else None,
            states(sequences) if final else None,
            states(tokens // (x.checkpoint_chunks * (x.chunk_size or DEFAULT_CHUNK))) if x.checkpoint_chunks else
            empty_kept(like, tokens // (x.chunk_size or DEFAULT_CHUNK) + sequences, sizes["HV"], sizes["K"], sizes["V"],
                       x.rounded_states) if x.saves else None]


def _sizes(page: Algorithm, inputs: dict[str, Any], x: Request) -> tuple[dict[str, Any], Tensor]:
    """B, T, heads and dims of a call, and an input of the dtype of its outputs."""
    sizes: dict[str, Any] = {}
    like, gates = next(iter(inputs.values())), log_decays(page.trace())
    for n, (heads, dims) in page.inputs.items():
        if "C" not in dims:
            continue
        y = inputs[n]
        _check_rank(n, y, 2 + len(dims), x.layout)
        sizes |= {"B": y.shape[0], "T": y.shape[x.axes[0]], heads: y.shape[x.axes[1]],
                  **dict(zip(map(str, dims[1:]), y.shape[3:], strict=True))}
        if len(dims) > 1 and n not in gates and like is not inputs.get("v"):
            like = y
    sizes.setdefault("HV", sizes.get("H"))
    return sizes, like


@torch.library.custom_op("gdn_codegen::member", mutates_args=(), schema=_schema([], "Tensor[]"))
def member(*given: Any) -> list[Tensor]:
    """Returns o, then the final state, the checkpoints and the states before chunks if the options ask for them."""
    return [y for y in _made(given) if y is not None]


@torch.library.custom_op(
    "gdn_codegen::member_into", mutates_args=WRITTEN,
    schema=_schema(["Tensor(a!)? final_state, Tensor(b!)? out, Tensor(c!)? intermediate_states_buffer",
                    *(f"Tensor? {n}=None" for n in _AT)], "(Tensor, Tensor, Tensor)"))
def member_into(*given: Any) -> tuple[Tensor, ...]:
    """The same, written to buffers where they are given. With in_place final_state holds the initial states, too. Returns o, the
    final state and the checkpoints, with no elements where the call does not make them."""
    return _filled(given, _made(given))


def _filled(given: tuple[Any, ...], made: list[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple([given[0][0].new_empty(0) if y is None else y for y in made])


member.register_fake(lambda *given: [y for y in _empty(given) if y is not None])
member_into.register_fake(lambda *given: _filled(given, _empty(given)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, own, _, t, x, _ = _unpacked(inputs)
    raw = {n: getattr(t, n) for n in RAW} if x.gate == "raw" else {}
    keep(ctx, own | raw, t, x, inputs[4], output)
    ctx.names = [n for n in own if n not in inputs[2]]
    ctx.words = [None if y else [] for y in inputs[1:4]]  # torch takes a list without items for one of tensors


def _backward(ctx: Any, made: list[Tensor | None]) -> tuple[Any, ...]:
    needs, first = ctx.needs_input_grad, 5
    own = [n for n, y in zip(ctx.names, needs[0], strict=True) if y]
    more = [n for n, y in zip(MORE, needs[first:], strict=False) if y]
    by = found(ctx, made, own + more)
    return ([by.get(n) for n in ctx.names], *ctx.words, None, *(by.get(n) if n in more else None for n in MORE),
            *[None] * len(OPTIONS))


member.register_autograd(_backward, setup_context=_keep)


def compiled(inputs: dict[str, Any], numbers: dict[str, Any], t: Tensors, x: Request, called: dict[str, str]) -> tuple[Any, ...]:
    """What a call gives, as an op that torch.compile takes whole."""
    if x.schedule is not None and not isinstance(x.schedule, str):
        _fail("schedule", f"the Schedule {x.schedule.name} under torch.compile", "a name, or None to choose")
    final = t.initial_state if x.in_place else t.final_state
    read = t._replace(initial_state=None if x.in_place else t.initial_state)
    names = [y for pair in called.items() for y in pair]
    absent = [n for n, y in inputs.items() if y is None]
    given = ([y for y in inputs.values() if y is not None], list(inputs), absent, names, numbers.get("scale"),
             *(getattr(read, n) for n in MORE), *(getattr(x, n) for n in OPTIONS))
    written = final, t.out, t.intermediate_states_buffer
    if final is None and t.out is None and t.intermediate_states_buffer is None:
        o, *states = member(*given)
        states = states[:-1] if x.saves else states
        return (o, *states) if x.output_final_state else (o, None, *states)
    o, made, checkpoints = member_into(*given, *written, t.checkpoint_positions, t.checkpoint_slots)
    final = made if final is None and x.output_final_state else final
    return (o if t.out is None else t.out, final, *([checkpoints] if x.checkpoint_chunks else []))
