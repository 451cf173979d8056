"""Problems for `bench` and `tune`: seeded tensors of a shape, and errors of results against float64.

An error is RMSE over RMS for each value head, against the recurrence by chunks in float64.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..ir.interpret import TORCH
from .peers import Problem
from .shapes import Shape
from .verify import rms_error

GATES = ("layer", "uniform")
#: For similar keys: the noise on the keys of each key head, and beta of each value head, repeated over heads. No beta is a power
#: of two, because that would multiply without rounding.
NOISE, BETAS = (0.0, 0.02), (0.6, 1.1, 1.6, 1.9)


def problem(s: Shape, dtype: str, K: int, V: int, gates: str = "layer", seed: int = 0, device: str = "cuda") -> Problem:
    """Unit q and k. Gates "layer" are drawn as a GatedDeltaNet layer draws them at initialisation, so that decay differs between
    heads; "uniform" gates are -U(0, 1) per token, under which a state decays within a chunk."""
    gen = torch.Generator(device=device).manual_seed(seed)
    T = sum(s.lens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=gen)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=gen)
    q, k = (F.normalize(normal(1, T, s.H, K), dim=-1).to(TORCH[dtype]) for _ in range(2))
    v = normal(1, T, s.HV, V).to(TORCH[dtype])
    beta = torch.sigmoid(normal(1, T, s.HV))
    rate, low, high = uniform(s.HV) * 16, math.log(0.001), math.log(0.1)
    step = torch.exp(uniform(s.HV) * (high - low) + low)
    g = -rate * F.softplus(normal(1, T, s.HV) + step + torch.log(-torch.expm1(-step)))
    if gates == "uniform":
        g = -uniform(1, T, s.HV)
    ends = torch.tensor([0, *s.lens], device=device).cumsum(0).to(torch.int32)
    return Problem(q, k, v, g.float(), beta.float(), ends, s.lens, K ** -0.5)


def alike(x: Problem) -> Problem:
    """The same problem with similar keys: each is the first of its sequence plus noise. g = 0, so there is no decay."""
    sizes = x.sizes
    first = torch.repeat_interleave(x.ends[:-1].long(), x.ends.diff().long())
    noise = torch.tensor(NOISE, device=x.k.device).repeat(sizes["H"])[:sizes["H"], None]
    k = F.normalize(x.k[:, first].float() + noise * x.k.float(), dim=-1).to(x.k.dtype)
    beta = torch.tensor(BETAS, device=x.beta.device).repeat(sizes["HV"])[:sizes["HV"]].expand_as(x.beta).contiguous()
    return replace(x, k=k, g=torch.zeros_like(x.g), beta=beta)


@dataclass(frozen=True)
class Reference:
    """o [T, heads, V] and the final states [N, heads, K, V] of some value heads, in float64."""

    heads: tuple[int, ...]
    o: torch.Tensor
    state: torch.Tensor


def reference(x: Problem, heads: Sequence[int] = (0, -1), chunk: int = 64) -> Reference:
    """The recurrence by chunks in float64, where the tensors are."""
    sizes = x.sizes
    mine = tuple(dict.fromkeys(h % sizes["HV"] for h in heads))
    theirs = [h // (sizes["HV"] // sizes["H"]) for h in mine]
    q, k = (t[0][:, theirs].double().transpose(0, 1) for t in (x.q, x.k))
    v, g, beta = (t[0][:, list(mine)].double().transpose(0, 1) for t in (x.v, x.g, x.beta))
    o, states, start = torch.empty_like(v), [], 0
    eye = torch.eye(chunk, dtype=torch.float64, device=v.device)
    for length in x.lengths:
        S = v.new_zeros(len(mine), sizes["K"], sizes["V"])
        for t in range(start, start + length, chunk):
            rows = slice(t, min(t + chunk, start + length))
            kc, qc, G, b = k[:, rows], q[:, rows] * x.scale, g[:, rows].cumsum(1), beta[:, rows, None]
            n = kc.shape[1]
            D = (G[:, :, None] - G[:, None, :]).clamp(max=0).exp().tril()
            A = (b * (kc @ kc.mT) * D).tril(-1)
            U = torch.linalg.solve_triangular(eye[:n, :n] + A, b * (v[:, rows] - G.exp()[:, :, None] * (kc @ S)), upper=False,
                                              unitriangular=True)
            o[:, rows] = G.exp()[:, :, None] * (qc @ S) + ((qc @ kc.mT) * D) @ U
            S = G[:, -1:, None].exp() * S + (kc * (G[:, -1:] - G).exp()[:, :, None]).mT @ U
        states.append(S)
        start += length
    return Reference(mine, o.transpose(0, 1), torch.stack(states))


def head_errors(o: torch.Tensor, state: torch.Tensor, want: Reference) -> tuple[list[float], list[float]]:
    """RMSE over RMS of o [1, T, HV, V] and of the states [N, HV, K, V], each head of `want`. Zeros are 1 off; NaN gives NaN."""
    def each(got: torch.Tensor, ref: torch.Tensor) -> list[float]:
        if got[:, list(want.heads)].shape != ref.shape:
            raise ValueError(f"output: got shape {list(got.shape)}; {len(want.heads)} of its heads are {list(ref.shape)}")
        return [rms_error(got[:, h], ref[:, i]) for i, h in enumerate(want.heads)]
    return each(o[0], want.o), each(state, want.state)


def worst(each: Sequence[float]) -> float:
    """The largest of the errors; NaN if one is NaN."""
    return math.nan if any(math.isnan(e) for e in each) else max(each)


def errors(o: torch.Tensor, state: torch.Tensor, want: Reference) -> tuple[float, float]:
    """The worst of `head_errors` for o, and for the state."""
    of_o, of_state = head_errors(o, state, want)
    return worst(of_o), worst(of_state)
