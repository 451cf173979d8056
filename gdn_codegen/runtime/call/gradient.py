"""The gradient of a call: states before chunks are computed again unless they were saved, then a walk back over the chunks.

Kernels give one row for each value head, and of what a head has one row for each token, in float32 where a sum follows. The sums
are here, in a fixed order, and each gradient is rounded once, to the dtype of what it is a gradient of.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ...ir.builder import Algorithm
from ...ir.differentiate import TRANSPOSED, chunk_states, derivative
from .arguments import Tensors
from .compiling import compiling
from .given import in_page_order
from .gradient_builds import modules_for
from .known_members import numbers_for
from .members import prepared
from .request import Call, Request, call_for

#: Tensors of each value head for raw gates.
RAW = "A_log", "dt_bias"
#: The argument whose gradient is that of the states from which sequences start.
START = "initial_state"


def gradients(page: Algorithm, inputs: dict[str, Tensor | None], t: Tensors, x: Request, scale: float | None, d_o: Tensor | None,
              d_final: Tensor | None, states: Tensor | None, wanted: list[str]) -> list[Tensor]:
    """The gradients by the arguments called `wanted`, each with the shape and dtype of the argument, and contiguous.

    inputs: those of the page, then those of input forms, by name. t: initial_state, cu_seqlens. d_o, d_final: gradients of the
    loss by o and by the final states, None for zero. states: those before chunks, where the call saved them.
    """
    raw = {n: inputs[n] for n in RAW if x.gate == "raw"}
    t = t._replace(A_log=raw.get("A_log"), dt_bias=raw.get("dt_bias"))
    about, t, x = prepared(page, {n: y for n, y in inputs.items() if n not in raw}, t, x)
    call = call_for(about, t, x)
    named = dict(zip(_order(page, inputs), (*about.inputs, *about.of_heads), strict=True))
    (before, back), state = modules_for(call), partial(_in_order, x)
    (o,) = (y.name for y in page.trace().role("output") if y.index == "token")
    (kept,) = map(chunk_states, page.states)
    run = partial(_run, call, {"scale": scale} if scale is not None else {}, t.cu_seqlens)
    if states is None or x.chunk_size != back.HOST.tables.chunk:
        states = run(before, named, state(t.initial_state))[kept]
    given = {**named, kept: states, derivative(o): _made_zero(d_o, about.dtype, like=_shape_of_o(call, about.rows), call=call)}
    made = run(back, given, state(d_final))
    return [state(made[derivative(START)]).contiguous().to(_dtype(t.initial_state)) if n == START else
            _as_input(made[derivative(n)], inputs[n], x) for n in wanted]


def _order(page: Algorithm, inputs: Mapping[str, Any]) -> list[str]:
    """Names of the inputs of `prepared`, in its order: those of tokens first."""
    tokens = [y.name for y in page.trace().role("input") if y.index == "token"]
    heads = [n for n in page.inputs if n not in tokens]
    return [*tokens, *heads, *(n for n in inputs if n not in page.inputs)]


def _dtype(y: Tensor | None) -> torch.dtype:
    assert y is not None
    return y.dtype


def _in_order(x: Request, y: Any) -> Any:
    """States in the page's order of dims, or back in the caller's."""
    return y if y is None or not x.state_v_first else y.transpose(-1, -2)


def _shape_of_o(call: Call, rows: tuple[int, int]) -> tuple[int, ...]:
    heads, (batch, tokens) = call.extent.HV, rows
    return (batch, *((tokens, heads) if call.request.layout == "bthd" else (heads, tokens)), call.head_dims[1])


def _made_zero(y: Tensor | None, dtype: torch.dtype, like: tuple[int, ...], call: Call) -> Tensor:
    """The gradient by o, with zeros in place of None."""
    return torch.zeros(like, dtype=dtype, device=call.device) if y is None else y.to(dtype)


def _run(call: Call, numbers: dict[str, Any], ends: Tensor | None, m: Any, named: dict[str, Any], start: Tensor | None
         ) -> dict[str, Tensor]:
    """What a module gives, by name: outputs, final states and states before chunks."""
    host, t = m.HOST, m.HOST.tables
    given = [named.get(row[0]) for rows in (t.inputs, t.head_inputs) for row in rows]
    given += [in_page_order(n, named[n.removesuffix(TRANSPOSED)]).to(getattr(torch, dtype)) for n, _, dtype in t.chunk_inputs]
    with compiling(m, call.device.type):
        memory = host.run(given, numbers_for(host, numbers), (start,), (None,) * len(t.outputs), ends, (None,),
                          START in (row[0].removeprefix("d_") for row in t.final))
    made = {n: memory[t.tensors.index(n)] for n in (*(row[0] for rows in (t.outputs, t.final) for row in rows), *t.saved)}
    return {n.removesuffix(TRANSPOSED): in_page_order(n, y) for n, y in made.items()}


def _as_input(d: Tensor, y: Tensor | None, x: Request) -> Tensor:
    """The gradient by an input `y`, of what kernels give of it: summed over tokens, or over the value heads of a key head."""
    assert y is not None
    tokens, heads = x.axes
    if d.ndim > y.ndim:
        d = d.sum((0, tokens))
    elif d.shape[heads] != y.shape[heads]:
        d = reduce(torch.add, torch.unflatten(d, heads, (y.shape[heads], -1)).unbind(heads + 1))
    return d.to(y.dtype)
