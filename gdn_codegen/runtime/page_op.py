"""The op of a build of any page: the generated function, which torch can also differentiate.

Generated functions compute the forward pass only. Here a call with a tensor that requires grad runs the function, keeps the
arguments, and computes their gradients from the two modules that are derived from the page (runtime/call/gradient.py). A page may
have several outputs, and any number of states.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from ..host.host import _untraced
from ..host.tables import Tables
from ..host.tensors import _fail
from ..schedule.contract import STATE_FLAGS
from .build import Build
from .call.differentiable import NONE, differentiates
from .call.gradient import by_argument, walked_back
from .call.gradient_builds import check_target
from .call.normalise import check_plain
from .call.request import Call, Request
from .call.tables import Extent
from .load import function, module

_ENDS = "cu_seqlens"


@lru_cache(maxsize=256)
def op(b: Build) -> Callable[..., Any]:
    """The generated function of `b`, of which torch can compute gradients. ValueError in a call for what has none."""
    fn = function(b)
    signature = inspect.signature(fn)

    @wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        """The results of the generated function, which torch differentiates if a tensor among the arguments requires grad."""
        if torch.compiler.is_dynamo_compiling():
            return _untraced(call, *args, **named)
        if not differentiates((*args, *named.values())):
            return fn(*args, **named)
        given = signature.bind(*args, **named).arguments
        t: Tables = module(b).HOST.tables
        _check(b, t, given)
        tensors = _tensors(t)
        others = {n: y for n, y in given.items() if n not in tensors}
        return _Differentiated.apply(b, others, *(given.get(n) for n in tensors))  # type: ignore[no-untyped-call]
    return call


def _tensors(t: Tables) -> tuple[str, ...]:
    """Names of the arguments that a gradient reads: inputs, initial states and ends of sequences."""
    return *(row[0] for rows in (t.inputs, t.head_inputs, t.initial) for row in rows), _ENDS


def _check(b: Build, t: Tables, given: dict[str, Any]) -> None:
    """ValueError for a call that has no gradient."""
    check_target(b.target)
    for word in STATE_FLAGS:
        if getattr(b.contract, word):
            _fail("contract", f"states with {word}", "states without it beside a tensor that requires grad, or a call under "
                  "torch.no_grad()")
    for name in (*t.outs, *(row[0] for row in t.final)):
        if given.get(name) is not None:
            _fail(name, "a tensor", NONE)
    for name in _tensors(t):
        if given.get(name) is not None:
            check_plain(name, given[name])


class _Differentiated(torch.autograd.Function):
    """A call of a page's op."""

    @staticmethod
    def forward(ctx: Any, b: Build, others: dict[str, Any], *tensors: Tensor | None) -> tuple[Any, ...]:
        names = _tensors(module(b).HOST.tables)
        given = {n: y for n, y in zip(names, tensors, strict=True) if y is not None}
        results: tuple[Any, ...] = function(b)(**given, **others)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.made = (b, others), [None if y is None else (y.shape, y.dtype) for y in results]
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *made: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients by the tensors of `forward`. made: those by what it gave, None for zero."""
        b, others = ctx.call
        t: Tables = module(b).HOST.tables
        if all(y is None for y in made):
            return *[None] * (2 + len(ctx.saved_tensors)),
        named = dict(zip(_tensors(t), ctx.saved_tensors, strict=True))
        ends = named.pop(_ENDS)
        call = _call(b, t, named, ends)
        outputs = {row[0]: torch.zeros(shape, dtype=dtype, device=call.device) if y is None else y
                   for row, y, (shape, dtype) in zip(t.outputs, made, ctx.made, strict=False)}
        finals = {row[0]: y for row, y in zip(t.final, made[len(t.outputs):], strict=True)}
        starts = {row[0]: named.pop(row[0]) for row in t.initial}
        found = walked_back(b.algorithm, call, named, {n: others.get(n) for n in t.scalars}, ends, starts, outputs, finals, {})
        wanted = zip({**named, **starts}.items(), ctx.needs_input_grad[2:], strict=False)
        return None, None, *(by_argument(found[n], y, call.request.axes) if needed else None for (n, y), needed in wanted), None


def _call(b: Build, t: Tables, named: dict[str, Any], ends: Tensor | None) -> Call:
    """What the choice of the gradient's builds depends on."""
    x = Request(target=b.target, chunk_size=b.chunk, layout=b.layout, state_v_first=b.contract.state_layout == "vk")
    heads = {row[1]: named[row[0]].shape[x.axes[1]] for row in t.inputs}
    first = named[t.inputs[0][0]]
    rows, tokens = first.shape[0], first.shape[x.axes[0]]
    value_heads = heads.get("HV") or heads["H"]
    extent = Extent(heads.get("H", value_heads), value_heads, rows if ends is None else ends.numel() - 1, rows * tokens,
                    ends is not None)
    return Call(x, getattr(torch, b.dtype), first.device, (b.head_dim_k, b.head_dim_v), extent, b.contract, ends is not None,
                any(named[row[0]] is not None for row in t.initial), True)
