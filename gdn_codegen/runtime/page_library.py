"""The ops of pages of one's own for torch.compile and torch.export: gdn_codegen::page, and gdn_codegen::page_gradient.

An op names its build by a key, because a schema has no builds. It takes the tensors of a call as a list beside their names.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..derived_pages import beside
from ..host.tables import Tables
from ..host.tensors import _FLOATS
from ..ir.differentiate import TRANSPOSED
from .build import Build
from .call.given import in_page_order
from .call.gradient import by_argument, walked_back
from .call.gradient_builds import builds_for
from .call.request import Call, Request
from .call.tables import Extent
from .load import cached, function, module

ENDS = "cu_seqlens"
_GIVEN = "str build, Tensor[] tensors, str[] names, float[] numbers"
#: The builds of ops, by key.
_BUILDS: dict[str, Build] = {}


def key_of(b: Build) -> str:
    """The key by which the ops know a build: of its text, so that equal builds have one."""
    key = f"{b.target}/{cached(b).stem}"
    _BUILDS.setdefault(key, b)
    return key


def tensors_of(t: Tables) -> tuple[str, ...]:
    """Names of the tensors that a call reads: inputs, initial states and ends of sequences."""
    return *(row[0] for rows in (t.inputs, t.head_inputs, t.initial) for row in rows), ENDS


def check_built(key: str, given: dict[str, Tensor], saves: bool) -> None:
    """ValueError where the gradient of a call has no build. given: its tensors by name. saves: whether it saves states."""
    b = _BUILDS[key]
    builds_for(beside(b.algorithm, ""), _call(b, module(b).HOST.tables, given), saves)


def _about(key: str, tensors: Iterable[Tensor], names: Iterable[str], numbers: Iterable[float]
           ) -> tuple[Build, Tables, dict[str, Tensor], dict[str, float]]:
    """The build of a call, its tables, and tensors and numbers by name."""
    b = _BUILDS[key]
    t: Tables = module(b).HOST.tables
    return b, t, dict(zip(names, tensors, strict=True)), dict(zip(t.scalars, numbers, strict=True))


@torch.library.custom_op("gdn_codegen::page", mutates_args=(), schema=f"({_GIVEN}, bool final) -> Tensor[]")
def page(key: str, tensors: list[Tensor], names: list[str], numbers: list[float], final: bool) -> list[Tensor]:
    """The outputs of a call, then its final states if `final`, then the states before chunks if the build saves them."""
    b, t, given, scalars = _about(key, tensors, names, numbers)
    wanted = {"output_final_state": final} if t.final else {}
    return [y for y in function(b)(**given, **scalars, **wanted) if y is not None]


@page.register_fake
def _(key: str, tensors: list[Tensor], names: list[str], numbers: list[float], final: bool) -> list[Tensor]:
    b, t, given, _ = _about(key, tensors, names, numbers)
    rows, value_heads, sequences = _extent(b, t, given)
    first = given[t.inputs[0][0]]
    shapes = _shapes(b, t, given)
    made = [first.new_empty(shape, dtype=_FLOATS[dtype]) for (*_, dtype), shape in zip(t.outputs, shapes, strict=True)]
    made += [first.new_empty((sequences, value_heads, *dims), dtype=_FLOATS[t.state_dtype]) for _, dims in t.final if final]
    slots = rows[0] * rows[1] // t.chunk + sequences
    return made + [first.new_empty((slots, value_heads, *dims), dtype=_FLOATS[dtype]) for n, dims, dtype in t.workspaces
                   if n in t.saved]


def _extent(b: Build, t: Tables, given: dict[str, Tensor]) -> tuple[tuple[Any, Any], Any, Any]:
    """Rows and tokens of a row, value heads, and sequences of a call."""
    token, head = (1, 2) if b.layout == "bthd" else (2, 1)
    heads = {row[1]: given[row[0]].shape[head] for row in t.inputs}
    first, ends = given[t.inputs[0][0]], given.get(ENDS)
    return ((first.shape[0], first.shape[token]), heads.get("HV") or heads["H"],
            first.shape[0] if ends is None else ends.numel() - 1)


def _shapes(b: Build, t: Tables, given: dict[str, Tensor]) -> list[tuple[Any, ...]]:
    """The shapes of a call's outputs."""
    (batch, tokens), value_heads, _ = _extent(b, t, given)
    rows = (tokens, value_heads) if b.layout == "bthd" else (value_heads, tokens)
    return [(batch, *rows, *dims) for _, dims, _ in t.outputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    key, tensors, names, numbers, _ = inputs
    ctx.set_materialize_grads(False)
    saved = len(module(_BUILDS[key]).HOST.tables.saved)
    ctx.save_for_backward(*tensors, *output[len(output) - saved:])
    ctx.about = key, names, numbers, len(output) - saved
    ctx.words = [None if y else [] for y in (names, numbers)]  # torch takes a list without items for one of tensors


def _backward(ctx: Any, made: list[Tensor | None]) -> tuple[Any, ...]:
    """The gradients by what `page` takes. made: those by its results, None for zero."""
    key, names, numbers, results = ctx.about
    wanted = [n for n, needed in zip(names, ctx.needs_input_grad[1], strict=True) if needed]
    by: dict[str, Tensor] = {}
    made = made[:results]
    if any(y is not None for y in made):
        saved = ctx.saved_tensors  # checkpointing recomputes them, and gives them once
        given, kept = saved[:len(names)], saved[len(names):]
        found = page_gradient(key, list(given), names, numbers, [y for y in made if y is not None],
                              [y is not None for y in made], list(kept), wanted)
        by = dict(zip(wanted, found, strict=True))
    return None, [by.get(n) for n in names], *ctx.words, None


page.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("gdn_codegen::page_gradient", mutates_args=(),
                         schema=f"({_GIVEN}, Tensor[] made, bool[] present, Tensor[] kept, str[] wanted) -> Tensor[]")
def page_gradient(key: str, tensors: list[Tensor], names: list[str], numbers: list[float], made: list[Tensor],
                  present: list[bool], kept: list[Tensor], wanted: list[str]) -> list[Tensor]:
    """The gradients by the tensors called `wanted`. made: those by what the call gave, of which `present` says which are not
    zero. kept: states that it saved. Each has the shape and dtype of the tensor."""
    b, t, given, scalars = _about(key, tensors, names, numbers)
    call, found = _call(b, t, given), iter(made)
    by = [next(found) if p else None for p in present]
    shapes = _shapes(b, t, given)
    outputs = {n: torch.zeros(shape, dtype=_FLOATS[dtype], device=call.device) if y is None else y
               for (n, _, dtype), shape, y in zip(t.outputs, shapes, by, strict=False)}
    rest = by[len(t.outputs):] or [None] * len(t.final)
    finals = {row[0]: y for row, y in zip(t.final, rest, strict=True)}
    starts = {row[0]: given.get(row[0]) for row in t.initial}
    named = {row[0]: given.get(row[0]) for rows in (t.inputs, t.head_inputs) for row in rows}
    states = {n.removesuffix(TRANSPOSED): in_page_order(n, y) for n, y in zip(t.saved, kept, strict=True)}
    gradients = walked_back(beside(b.algorithm, ""), call, named, scalars, given.get(ENDS), starts, outputs, finals, states)
    return [by_argument(gradients[n], given[n], call.request.axes) for n in wanted]


@page_gradient.register_fake
def _(key: str, tensors: list[Tensor], names: list[str], numbers: list[float], made: list[Tensor], present: list[bool],
      kept: list[Tensor], wanted: list[str]) -> list[Tensor]:
    given = dict(zip(names, tensors, strict=True))
    return [given[n].new_empty(given[n].shape) for n in wanted]


def _twice(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("gdn_codegen computes no second derivatives: the gradient of a call cannot be differentiated")


page_gradient.register_autograd(_twice)


def _call(b: Build, t: Tables, given: dict[str, Tensor]) -> Call:
    """What the choice of the gradient's builds depends on."""
    x = Request(target=b.target, chunk_size=b.chunk, layout=b.layout, state_v_first=b.contract.state_layout == "vk")
    first = given[t.inputs[0][0]]
    rows, value_heads, sequences = _extent(b, t, given)
    heads = next((given[row[0]].shape[x.axes[1]] for row in t.inputs if row[1] == "H"), value_heads)
    packed = given.get(ENDS) is not None
    extent = Extent(heads, value_heads, sequences, rows[0] * rows[1], packed)
    return Call(x, getattr(torch, b.dtype), first.device, (b.head_dim_k, b.head_dim_v), extent, b.contract, packed,
                any(row[0] in given for row in t.initial), True)
