"""Runs gradients of targets against torch.autograd through the token recurrence in float64.

The reference is that of `verify`: the page in chunks of one token, or a function of the user's own. torch.autograd goes through
it, and through the contract's forms. So no rule of `ir/vjps.py` has a part in what is expected.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..derived_pages import beside
from ..ir.interpret import TORCH
from ..runtime.build import Build, lowered
from ..runtime.call.given import in_page_order
from ..runtime.call.gradient import of_head
from ..runtime.load import function, module
from ..targets import DEFAULT_SCHEDULE
from .cases import F64, Case, inputs
from .verify import ROOM, Recurrence, check_page, from_recurrence, one_head_count, reference, rms_error, to_layout

#: RMSE over RMS that a gradient may reach: a sum of products of more rounded values than an output is. Where tokens forget nearly
#: all, gradients by gates are what is left of sums that cancel, and may be off by FORGETFUL times that.
TOLERANCE, FORGETFUL = {"float16": 1e-2, "bfloat16": 3e-2, "float32": 2e-5}, 5


def accepted(b: Build, case: Case, output: str = "") -> float:
    """The RMSE over RMS that a gradient may reach, each of them the same."""
    return TOLERANCE[b.dtype] * (2 if case.alike else FORGETFUL if case.gate is not None and case.gate < -5 else 1)


def compare(b: Build, case: Case, device: str = "cpu", recurrence: Recurrence | None = None) -> dict[str, float]:
    """RMSE over RMS of the gradient by each input, number of a head and initial state, of a loss that is a random weighted sum of
    all outputs and final states. b: of the gradients of a page. recurrence: differentiated instead of the page.

    Nothing where what is expected leaves the range of the build's dtype.
    """
    lowered(b)
    forward = replace(b, algorithm=beside(b.algorithm, ""), schedule=DEFAULT_SCHEDULE)
    p = forward.page.trace()
    case = one_head_count(p, case)
    x = inputs(forward, p, case)
    check_page(forward)
    leaves = {n: y.to(F64).requires_grad_() for n, y in x.items()}
    results = from_recurrence(forward, case, leaves, recurrence) if recurrence else reference(forward, case, leaves)
    gen = torch.Generator().manual_seed(case.seed + 1)
    outputs = {t.name: t for t in p.role("output")}
    weights = {n: torch.randn(y.shape, generator=gen).to(TORCH[_dtype(b, outputs[n].index)]) for n, y in results.items()}
    loss = torch.stack([(y * weights[n].to(F64)).sum() for n, y in results.items()]).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    want = {n: torch.zeros_like(y) if d is None else d for (n, y), d in zip(leaves.items(), found, strict=True)}
    if any(y.numel() and y.abs().max() > torch.finfo(TORCH[b.dtype]).max / ROOM for y in (*want.values(), *results.values())):
        return {}
    got = run(b, case, x, weights, device)
    return {f"d_{n}": rms_error(got[n], y) for n, y in want.items() if n in got}


def _dtype(b: Build, index: str) -> str:
    """The dtype of an output, and of the gradient by it."""
    return b.contract.state_dtype if index == "sequence" else b.dtype


def run(b: Build, case: Case, x: dict[str, torch.Tensor], weights: dict[str, torch.Tensor],
        device: str = "cpu") -> dict[str, torch.Tensor]:
    """Gradients of the built module by each of `x`, with the shapes of `x`: summed over the value heads of a key head, and over
    the tokens or chunks for what a head has. Those by the initial states are left out where a case has none.

    weights: the gradients by outputs and final states. A module for the states before chunks runs first.
    """
    states = replace(b, algorithm=beside(b.algorithm, "states"), schedule=DEFAULT_SCHEDULE)
    p, vk = b.page.trace(), b.contract.state_layout == "vk"
    ends = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)
    more: dict[str, Any] = {"cu_seqlens": None if case.batched else ends.to(device)}
    more |= {n: 1.0 for n, v in b.page.scalar_defaults(b.sizes).items() if v is None}

    def in_order(y: torch.Tensor) -> torch.Tensor:
        return y.transpose(-1, -2).contiguous() if vk else y
    tensors = {t.name: t for t in p.role("input")}
    given = {n: to_layout(tensors[n], y, b, case).to(device) for n, y in x.items() if n in tensors}
    initial = {t.name: in_order(x[t.name]).to(device) for t in states.page.trace().role("input") if t.optional and case.initial}
    kept = [t for t in lowered(b).role("input") if t.index == "slot"]
    saved = function(states)(**{n: y for n, y in given.items() if n in states.page.inputs}, **initial, **more)[-len(kept):] \
        if kept else ()
    chunks = {t.name: in_page_order(t.name, y).to(TORCH[t.dtype]).contiguous() for t, y in zip(kept, saved, strict=True)}
    given |= {f"d_{n}": to_layout(tensors[f"d_{n}"], y, b, case).to(device) if tensors[f"d_{n}"].index == "token"
              else in_order(y).to(device) for n, y in weights.items()}
    results = function(b)(**given, **chunks, **more, output_final_state=True)
    got: dict[str, torch.Tensor] = {}
    order = ("token", "sequence", "slot")
    for t, y in zip(sorted(p.role("output"), key=lambda t: order.index(t.index)), results, strict=True):
        name, y = t.name.removeprefix("d_"), y.cpu().to(F64)
        if t.index == "sequence":
            got |= {name: in_order(y)} if case.initial else {}
            continue
        if t.index == "slot":
            got[name] = of_head(y, module(b).HOST.tables.chunk_dims[t.name], x[name].ndim)
            continue
        y = (y if b.layout == "bthd" else y.transpose(1, 2)).flatten(0, 1)
        like = x[name]
        got[name] = y.sum(0) if y.ndim > like.ndim else y.unflatten(1, (like.shape[1], -1)).sum(2)
    return got
