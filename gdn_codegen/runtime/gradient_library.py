"""The gradients of the torch ops: gdn_codegen::gradient, and what the ops of calls keep for it.

A call of gdn_codegen::gated_delta_rule or gdn_codegen::member that is differentiated keeps its arguments, and the states before
chunks if it saved them. Its backward is one call of gdn_codegen::gradient, so torch.compile and torch.export see one op in each
direction. The gradient itself has no derivative. Eager calls that save no states do without the dispatcher (`differentiated`).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import algorithms
from .call.arguments import Tensors
from .call.gradient import START, gradients
from .call.request import OPTIONS, Request

#: Types of the options in a schema of torch, where they are not those of Python.
TYPES = {"int": "SymInt", "int | None": "SymInt?", "Any": "str?"}
#: The options in a schema.
DECLARED = [f"{TYPES.get(t, t)} {n}" for n, t in Request.__annotations__.items()]
SCHEMA = ("(Tensor[] inputs, str[] names, str[] absent, Tensor? initial_state, Tensor? cu_seqlens, Tensor? d_o, "
          f"Tensor? d_final_state, Tensor? states, str[] wanted, float? scale, {', '.join(DECLARED)}) -> Tensor[]")


def by_name(inputs: list[Tensor], names: list[str], absent: list[str]) -> dict[str, Any]:
    """Inputs by name, None for absent ones. torch differentiates by lists only where they are without None."""
    given = iter(inputs)
    return {n: None if n in absent else next(given) for n in names}


def _gradient(inputs: list[Tensor], names: list[str], absent: list[str], initial_state: Tensor | None, cu_seqlens: Tensor | None,
             d_o: Tensor | None, d_final_state: Tensor | None, states: Tensor | None, wanted: list[str], scale: float | None,
             *options: Any) -> list[Tensor]:
    """The gradients by the inputs called `wanted`, in that order. Each has the shape and dtype of the input."""
    t = Tensors(**{**dict.fromkeys(Tensors._fields), "initial_state": initial_state, "cu_seqlens": cu_seqlens})  # type: ignore[arg-type]
    x = Request(*options)
    return gradients(algorithms.find(x.page), by_name(inputs, names, absent), t, x, scale, d_o, d_final_state, states, wanted)


gradient = torch.library.custom_op("gdn_codegen::gradient", _gradient, mutates_args=(), schema=SCHEMA)


@gradient.register_fake
def _(inputs: list[Tensor], names: list[str], absent: list[str], initial_state: Tensor | None, cu_seqlens: Any, d_o: Any,
      d_final_state: Any, states: Any, wanted: list[str], *others: Any) -> list[Tensor]:
    found = {**by_name(inputs, names, absent), START: initial_state}
    return [found[n].new_empty(found[n].shape) for n in wanted]


def _twice(context: Any, *gradients: Any) -> Any:
    raise RuntimeError("gdn_codegen computes no second derivatives: the gradient of a call cannot be differentiated")


gradient.register_autograd(_twice)


def keep(context: Any, inputs: dict[str, Tensor | None], t: Tensors, x: Request, scale: float | None, made: list[Tensor]) -> None:
    """Keep what the gradient of a call reads. inputs: by name, with those of input forms. made: what the call gave."""
    context.set_materialize_grads(False)
    context.asked = list(inputs), scale, x
    context.save_for_backward(*inputs.values(), t.initial_state, t.cu_seqlens, made[-1] if x.saves else None)


def found(context: Any, made: list[Tensor | None], wanted: list[str]) -> dict[str, Tensor]:
    """The gradients of a call by the arguments called `wanted`. made: those by what the call gave, None for zero."""
    *inputs, initial, ends, states = context.saved_tensors
    names, scale, x = context.asked
    d_o, d_final = made[0], made[1] if x.output_final_state else None
    if d_o is None and d_final is None:
        return {}
    given, absent = [y for y in inputs if y is not None], [n for n, y in zip(names, inputs, strict=True) if y is None]
    compute = gradient if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() else \
        _gradient
    results = compute(given, names, absent, initial, ends, d_o, d_final, states, wanted, scale,
                      *(getattr(x, n) for n in OPTIONS))
    return dict(zip(wanted, results, strict=True))


class Differentiated(torch.autograd.Function):
    """A call without the dispatcher, which takes longer than the call."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], tuple[Any, ...]], names: list[str], scale: float | None, x: Request,
                *tensors: Tensor | None) -> tuple[Any, ...]:
        """What `call` gives. names: of the tensors, but for the last two, initial states and cu_seqlens."""
        *inputs, initial, ends = tensors
        t = Tensors(**{**dict.fromkeys(Tensors._fields), "initial_state": initial, "cu_seqlens": ends})  # type: ignore[arg-type]
        keep(ctx, dict(zip(names, inputs, strict=True)), t, x, scale, [])
        return call()

    @staticmethod
    def backward(ctx: Any, *made: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients by the tensors. made: those by what the call gave, None for zero."""
        needs, names = ctx.needs_input_grad[4:], [*ctx.asked[0], START]
        by = found(ctx, [*made], [n for n, y in zip(names, needs, strict=False) if y])
        return *[None] * 4, *(by.get(n) for n in names), None


def differentiated(call: Callable[[], tuple[Any, ...]], inputs: dict[str, Any], t: Tensors, x: Request, scale: float | None
                   ) -> tuple[Any, ...]:
    """The results of `call`, which torch can differentiate by the inputs and the initial states of `t`. call: makes them while
    gradients are off."""
    results: tuple[Any, ...] = Differentiated.apply(call, list(inputs), scale, x, *inputs.values(), t.initial_state,
                                                     t.cu_seqlens)  # type: ignore[no-untyped-call]
    return results
