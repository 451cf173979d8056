"""The gradient of a call: states before chunks are computed again unless they were saved, then a walk back over the chunks.

Kernels give one row for each value head. By a vector or number of a head they give shares (`ir/reverse.py`), in float32 where a
sum follows. The sums are here, in a fixed order, and each gradient is rounded once, to the dtype of what it is a gradient of.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ... import algorithms
from ...ir.differentiate import TRANSPOSED, chunk_states, derivative
from ...ir.page import Algorithm
from . import choose
from .arguments import Tensors
from .compiling import compiling
from .given import in_page_order
from .gradient_builds import builds_for, modules_for
from .known_members import MOST, numbers_for
from .launch import kind
from .members import prepared
from .request import Call, Inputs, Request, call_for

#: Tensors of each value head for raw gates.
RAW = "A_log", "dt_bias"
#: The states from which sequences start, and those after them, where a page has one state.
START, FINAL = "initial_state", "final_state"
#: Kinds of calls whose gradients have builds.
_built: set[Any] = set()


def gradients(page: Algorithm, inputs: dict[str, Tensor | None], t: Tensors, x: Request, scale: float | None, d_o: Tensor | None,
              d_final: Tensor | None, states: Tensor | None, wanted: list[str]) -> list[Tensor]:
    """The gradients by the arguments called `wanted`, each with the shape and dtype of the argument, and contiguous.

    inputs: those of the page, then those of input forms, by name. t: initial_state, cu_seqlens. d_o, d_final: gradients of the
    loss by o and by the final states, None for zero. states: those before chunks, where the call saved them.
    """
    about, t, x, call = _about(page, inputs, t, x)
    named = dict(zip(_order(page, inputs), (*about.inputs, *about.of_heads), strict=True))
    (o,) = (y.name for y in page.trace().role("output") if y.index == "token")
    if d_o is None:
        d_o = torch.zeros(_shape_of_o(call, about.rows), dtype=about.dtype, device=call.device)
    kept = {} if states is None else dict.fromkeys(map(chunk_states, page.states), states)
    made = walked_back(x.page, call, named, {"scale": scale} if scale is not None else {}, t.cu_seqlens,
                       {START: t.initial_state}, {o: d_o}, {FINAL: d_final}, kept)
    return [by_argument(made[n], t.initial_state if n == START else inputs[n], x.axes) for n in wanted]


def check_built(inputs: dict[str, Tensor | None], t: Tensors, x: Request) -> None:
    """ValueError where the gradient of a call has no build. inputs, t: as for `gradients`. Nothing is compiled or written, so a
    build that the device refuses, or a compiler, is found in the backward pass. Of the first call of a kind it takes up to a
    second; of sizes without a build up to several."""
    kinds = tuple([None if y is None else kind(y) for y in (*inputs.values(), t.initial_state, t.cu_seqlens)])
    about = x, (*inputs,), kinds, len(choose._refused)  # where a build is refused, perhaps no other is left
    if about not in _built:
        with torch.no_grad():
            *_, asked, call = _about(algorithms.find(x.page), inputs, t, x)
        builds_for(asked.page, call, asked.saves)
        if len(_built) >= MOST:
            _built.clear()
        _built.add(about)


def _about(page: Algorithm, inputs: dict[str, Tensor | None], t: Tensors, x: Request) -> tuple[Inputs, Tensors, Request, Call]:
    """What a call comes to. inputs, t: as for `gradients`."""
    raw = {n: inputs[n] for n in RAW if x.gate == "raw"}
    t = t._replace(A_log=raw.get("A_log"), dt_bias=raw.get("dt_bias"))
    about, t, x = prepared(page, {n: y for n, y in inputs.items() if n not in raw}, t, x)
    return about, t, x, call_for(about, t, x)


def walked_back(page: str | Algorithm, call: Call, named: Mapping[str, Any], numbers: dict[str, Any], ends: Tensor | None,
                starts: Mapping[str, Tensor | None], by_outputs: Mapping[str, Tensor], by_finals: Mapping[str, Tensor | None],
                kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients by the inputs and initial states of a page, by their names: a row for each value head, and a number for each
    token where kernels give that of a number of a head (`by_argument` adds up both). States lie as those of the call.

    named: the inputs, with those of input forms. numbers: those that the caller gave. starts: initial states. by_outputs,
    by_finals: gradients of the loss by outputs and final states. None among states is zero. kept: states before chunks of
    call.request.chunk_size tokens, empty to compute them.
    """
    before, back = modules_for(page, call, saved=bool(kept))
    state, run = partial(_in_order, call.contract.state_layout), partial(_run, call, numbers, ends)
    if before is not None and (not kept or call.request.chunk_size != back.HOST.tables.chunk):
        kept = run(before, named, {n: state(y) for n, y in starts.items()})
    dtypes = {row[0]: getattr(torch, row[3]) for row in back.HOST.tables.inputs}
    given = {derivative(n): y.to(dtypes[derivative(n)]) for n, y in by_outputs.items()}
    made = run(back, {**named, **kept, **given}, {derivative(n): state(y) for n, y in by_finals.items()})
    for d in back.HOST.tables.zeroed:
        of = named[d.removeprefix(derivative(""))]
        if of is not None:
            made[d] = of_head(made[d], back.HOST.tables.chunk_dims[d], of.ndim)
    return {n: state(made[derivative(n)]) if n in starts else made[derivative(n)] for n in (*named, *starts)
            if derivative(n) in made}


def _order(page: Algorithm, inputs: Mapping[str, Any]) -> list[str]:
    """Names of the inputs of `prepared`, in its order: those of tokens first."""
    tokens = [y.name for y in page.trace().role("input") if y.index == "token"]
    heads = [n for n in page.inputs if n not in tokens]
    return [*tokens, *heads, *(n for n in inputs if n not in page.inputs)]


def _in_order(layout: str, y: Any) -> Any:
    """A state in the page's order of dims, or back in the caller's."""
    return y if y is None or layout == "kv" or y.ndim < 4 else y.transpose(-1, -2)


def _shape_of_o(call: Call, rows: tuple[int, int]) -> tuple[int, ...]:
    heads, (batch, tokens) = call.extent.HV, rows
    return (batch, *((tokens, heads) if call.request.layout == "bthd" else (heads, tokens)), call.head_dims[1])


def _run(call: Call, numbers: dict[str, Any], ends: Tensor | None, m: Any, named: Mapping[str, Any],
         starts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """What a module gives, by name: outputs, final states, and what it stores of chunks."""
    host, t = m.HOST, m.HOST.tables
    given = [_as_built(named.get(row[0]), row[3]) for row in t.inputs] + [named.get(row[0]) for row in t.head_inputs]
    given += [in_page_order(n, named[n.removesuffix(TRANSPOSED)]).to(getattr(torch, dtype)) for n, _, dtype in t.chunk_inputs]
    with compiling(m, call.device.type):
        memory = host.run(given, numbers_for(host, numbers), [starts[row[0]] for row in t.initial], (None,) * len(t.outputs),
                          ends, (None,) * len(t.final), t.backward)
    names = t.tensors
    made = {n: memory[names.index(n)] for n in (*(row[0] for rows in (t.outputs, t.final) for row in rows), *t.saved)}
    return {n.removesuffix(TRANSPOSED): in_page_order(n, y) for n, y in made.items()}


def _as_built(y: Any, dtype: str) -> Any:
    """An input in the dtype that a module reads. Modules widen numbers of a head by themselves, but no rows, as gates for each
    channel in 16 bits where the build reads float32."""
    return y.to(getattr(torch, dtype)) if isinstance(y, Tensor) and y.ndim > 3 else y


def of_head(shares: Tensor, columns: Sequence[int | None], rank: int) -> Tensor:
    """The gradient by a number [HV] (rank 1) or a vector [HV, columns] of each value head: the sum of its shares by chunk
    [slots, HV, columns]. columns: how many count; the others are padding, and may hold anything."""
    by_column = shares[..., :columns[0]].sum(0)  # a sum over both dims takes 25 us instead of 9 and 2 (H200, 32 x 16 x 128)
    return by_column.sum(-1) if rank == 1 else by_column


def by_argument(d: Tensor, y: Tensor | None, axes: tuple[int, int]) -> Tensor:
    """The gradient by an argument `y`, of what `walked_back` gives of it: summed over tokens, or over the value heads of a key
    head, with the dtype of `y`, and contiguous. Of a number or vector of a head with the shape of `y` nothing is left to sum.
    axes: of tokens and heads."""
    assert y is not None
    tokens, heads = axes
    if d.ndim > y.ndim:
        d = d.sum((0, tokens))
    elif y.ndim > 2 and d.shape[heads] != y.shape[heads]:
        d = reduce(torch.add, torch.unflatten(d, heads, (y.shape[heads], -1)).unbind(heads + 1))
    return d.contiguous().to(y.dtype)
