"""Problems whose inputs are as layers pass them: `bench --backward --layer-inputs`.

The layers GatedDeltaNet and KimiDeltaAttention of FLA pass what their projections give: gates before softplus, with A_log and
dt_bias of each head, beta before its sigmoid, and rows of q and k of any norm. The kernels compute the rest.
"""
from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import softplus

from ..ir.page import Algorithm
from .peers import Problem

#: The arguments with which a layer says so, of FLA's ops and of ours.
SAID = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
#: The pages with such ops.
PAGES = ("gated_delta_rule", "kimi_delta_attention")
#: The least log decay of a raw gate, without its sign: of 0 there is none.
LEAST = 1e-6


def check(page: Algorithm, gates: str) -> None:
    """ValueError for a page whose op takes no such inputs, and for gates beside which beta is above 1."""
    if gates == "alike":
        raise ValueError("layer_inputs: got it with --gates alike, where beta is up to 2; accepted: other gates, as a sigmoid is "
                         "at most 1")
    if page.name not in PAGES:
        raise ValueError(f"layer_inputs: got it for {page.name}; accepted: {', '.join(PAGES)}")


def as_layers_pass(x: Problem, seed: int = 0) -> Problem:
    """The problem with inputs from which kernels compute those of `x`, but for rounding: rows, gates and beta in the dtype of
    rows, A_log [HV] and dt_bias [HV] or [HV K] in float32. seed: of dt_bias, and of the norms of rows."""
    g, beta = x.inputs["g"], x.inputs["beta"]
    gen = torch.Generator(device=g.device).manual_seed(seed)
    scale, bias = (torch.randn(shape, generator=gen, device=g.device) / 2 for shape in (x.inputs["k"].shape[:3], g.shape[2:]))
    rate = (-g).mean((1, *range(3, g.ndim))).view(-1).clamp(LEAST)
    steps = (-g / _by_head(rate, g)).clamp(LEAST)
    raw = steps + torch.log(-torch.expm1(-steps)) - bias  # softplus(raw + bias) = steps
    found = {**x.inputs, **{n: x.inputs[n] * scale.exp()[..., None] for n in ("q", "k")}, "g": raw, "beta": beta.logit(1e-6)}
    inputs = {n: y.to(x.dtype) for n, y in found.items()}
    return replace(x, inputs={**inputs, "A_log": rate.log(), "dt_bias": bias.flatten()}, said=SAID)


def as_the_page_reads(x: Problem) -> Problem:
    """The problem with the inputs of its page, in float64 if those of `x` are. Gradients go through it."""
    if not x.said:
        return x
    given = dict(x.inputs)
    A_log, bias = given.pop("A_log"), given.pop("dt_bias")
    g = given["g"]
    norm = {n: given[n] * (given[n].square().sum(-1, keepdim=True) + 1e-6).rsqrt() for n in ("q", "k")}
    return replace(x, said={}, inputs={**given, **norm, "beta": given["beta"].sigmoid(),
                                       "g": -_by_head(A_log.exp(), g) * softplus(g + bias.view(g.shape[2:]))})


def _by_head(numbers: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Numbers of heads [HV], beside gates [1, T, HV, ...]."""
    return numbers.view(-1, *(1 for _ in g.shape[3:]))
