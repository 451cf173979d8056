"""Problems for `bench` and `tune`: seeded tensors of a shape, and errors of results against float64.

An error is RMSE over RMS for each value head, against the page in float64.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .. import algorithms
from ..ir.decays import by_channel, log_decays
from ..ir.interpret import TORCH, interpret
from ..ir.interpret import Problem as Sequences
from ..ir.page import Algorithm
from .cases import MIXED, mixed
from .layer_inputs import as_the_page_reads
from .peers import Problem
from .shapes import Shape
from .verify import rms_error

#: How log decays are drawn: words, beside a number, which all log decays then are.
GATES = ("layer", "uniform", "mixed", "alike")
#: For similar keys: the noise on the keys of each key head, and beta of each value head, repeated over heads. No beta is a power
#: of two, because that would multiply without rounding.
NOISE, BETAS = (0.0, 0.02), (0.6, 1.1, 1.6, 1.9)
#: The log decay beside equal keys: it forgets little of a chunk.
SLOW = -0.01


def check_gates(words: str) -> tuple[str, ...]:
    """The words of a list such as layer,0,-50,mixed. ValueError for one that `problem` does not know."""
    def known(word: str) -> bool:
        try:
            return word in GATES or -math.inf < float(word) <= 0
        except ValueError:
            return False
    found = tuple(dict.fromkeys(words.split(",")))
    for word in found:
        if not known(word):
            raise ValueError(f"gates: got {word!r}; accepted: {', '.join(GATES)}, or a log decay of 0 or less")
    return found


class _Draws:
    """Draws inputs of a page on a device. shape: [1, T, heads, dims], or [HV, dims] for what heads have."""

    def __init__(self, gates: str, seed: int, device: str) -> None:
        self.gates, self.device = gates, device
        self.gen = torch.Generator(device=device).manual_seed(seed)

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.gen)

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(*shape, device=self.device, generator=self.gen)

    def decays(self, shape: Sequence[int]) -> torch.Tensor:
        """Log decays of tokens, for each head or channel."""
        if self.gates == "uniform":
            return -self.uniform(shape)
        if self.gates == "mixed":
            return mixed(self.uniform(shape), channels=len(shape) > 3)
        return self.layer(shape) if self.gates == "layer" else self.constant(shape)

    def layer(self, shape: Sequence[int]) -> torch.Tensor:
        """Log decays of tokens as a layer of Gated DeltaNet or KDA draws them at initialisation."""
        heads, low, high = shape[2], math.log(0.001), math.log(0.1)
        rate = self.uniform([heads]).view(heads, *(1 for _ in shape[3:])) * 16
        step = torch.exp(self.uniform(shape[2:]) * (high - low) + low)
        return -rate * F.softplus(self.normal(shape) + step + torch.log(-torch.expm1(-step)))

    def constant(self, shape: Sequence[int]) -> torch.Tensor:
        """The log decay that all tokens have."""
        return torch.full(shape, SLOW if self.gates == "alike" else float(self.gates), device=self.device)

    def of_heads(self, shape: Sequence[int]) -> torch.Tensor:
        """Log decays that a head has for all tokens. Those of "layer" are of the first layer of lightning attention."""
        if self.gates == "uniform":
            return -self.uniform(shape)
        if self.gates not in ("layer", "mixed"):
            return self.constant(shape)
        heads = torch.arange(shape[0], device=self.device)
        slopes = -8 / shape[0] * heads if self.gates == "layer" else MIXED[-1] / max(1, shape[0] - 1) * heads
        return slopes.view(-1, *(1 for _ in shape[1:])).expand(shape).contiguous()


def problem(s: Shape, dtype: str, K: int, V: int, gates: str = "layer", seed: int = 0, device: str = "cuda",
            algorithm: str | Algorithm = "gated_delta_rule") -> Problem:
    """Inputs of a page for the sequences of a shape: keys and queries of norm 1, other rows normal, log decays by `gates`, other
    numbers of tokens sigmoid(normal).

    Gates "layer" are drawn as a layer draws them at initialisation, so that decay differs between heads; "uniform" gates are
    -U(0, 1) per token and channel, under which a state decays within a chunk. "mixed" has 0 to -50 in a chunk, as the cases of
    `verify`. A number is the log decay of all tokens. "alike" has log decays of -0.01, equal keys and queries of all tokens of a
    sequence, as a repeated token gives, and numbers of tokens up to 2 in place of 1.
    """
    page, draws, inputs = algorithms.find(algorithm), _Draws(gates, seed, device), dict[str, torch.Tensor]()
    p, sizes, T = page.trace(), {"C": 1, "K": K, "V": V}, sum(s.lens)
    decays, keys = log_decays(p), {dims[0] for dims in page.states.values()}
    ends = torch.tensor([0, *s.lens], device=device).cumsum(0).to(torch.int32)
    first = torch.repeat_interleave(ends[:-1].long(), ends.diff().long())  # of each token's sequence
    for t in sorted(p.role("input"), key=lambda t: t.name in decays):
        how, dims = algorithms.DRAWN.get((page.name, t.name), ""), t.tile.shape(sizes)[t.index == "token":]
        if t.index not in ("token", "head"):
            continue
        shape = [1, T, s.H if t.heads == "H" else s.HV, *dims] if t.index == "token" else [s.HV, *dims]
        if t.name in decays:
            x = (draws.decays if t.index == "token" else draws.of_heads)(shape)
        elif how.startswith("minus"):
            x = -inputs[how.split()[1]] * torch.sigmoid(draws.normal([*shape[:3], 1]))
        elif how == "share" or t.index == "token" and not dims:
            x = torch.sigmoid(draws.normal(shape)) * (2 if gates == "alike" and not dims else 1)
        else:
            x = draws.normal(shape)
            if t.index == "token" and t.dims[1] in keys:
                x = F.normalize(x, dim=-1)
                x = x[:, first] if gates == "alike" else x
        inputs[t.name] = x.to(TORCH[dtype] if t.index == "token" and dims and not t.wide else torch.float32)
    return Problem(page, {n: inputs[n] for n in page.inputs}, ends, s.lens, (s.H, s.HV), (K, V), TORCH[dtype])


def alike(x: Problem) -> Problem:
    """The same problem of Gated DeltaNet with similar keys: each is the first of its sequence plus noise. g = 0, so there is no
    decay."""
    k, g, beta = (x.inputs[n] for n in ("k", "g", "beta"))
    first = torch.repeat_interleave(x.ends[:-1].long(), x.ends.diff().long())
    noise = torch.tensor(NOISE, device=k.device).repeat(x.heads[0])[:x.heads[0], None]
    k = F.normalize(k[:, first].float() + noise * k.float(), dim=-1).to(k.dtype)
    beta = torch.tensor(BETAS, device=beta.device).repeat(x.heads[1])[:x.heads[1]].expand_as(beta).contiguous()
    return replace(x, inputs={**x.inputs, "k": k, "g": torch.zeros_like(g), "beta": beta})


@dataclass(frozen=True)
class Reference:
    """Outputs [T, heads, ...] and final states [N, heads, ...] of some value heads, in float64."""

    heads: tuple[int, ...]
    outputs: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]


def reference(x: Problem, heads: Sequence[int] = (0, -1)) -> Reference:
    """What the page computes of these value heads in float64, by chunks, where the tensors are."""
    x, (H, HV) = as_the_page_reads(x), x.heads
    mine = tuple(dict.fromkeys(h % HV for h in heads))
    theirs = [h // (HV // H) for h in mine]
    p = x.page.trace()
    chunk = 16 if by_channel(p) else 64  # a product of channels' decays takes as much as C x C x K exponentials
    p = replace(p, dims=(("C", chunk), ("K", x.dims[0]), ("V", x.dims[1])))
    given: dict[str, torch.Tensor | None] = {}
    for t in p.role("input"):
        if t.name in x.inputs:
            of = theirs if t.heads == "H" else list(mine)
            given[t.name] = x.inputs[t.name][0][:, of] if t.index == "token" else x.inputs[t.name][of]
    with torch.device(x.ends.device):
        got = interpret(p, Sequences(list(x.lengths), len(mine), len(mine)), given, x.numbers)
    outs = p.role("output")
    return Reference(mine, *(tuple(got[t.name] for t in outs if t.index == index) for index in ("token", "sequence")))


def gradients(x: Problem, d_o: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients by all inputs in float64, through `reference` of all value heads. d_o: of the loss by o [1, T, HV, ...]."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in x.inputs.items()}
    with torch.enable_grad():
        (o,) = reference(replace(x, inputs=leaves), range(x.heads[1])).outputs
    return dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), d_o[0].double()), strict=True))


def head_errors(results: Sequence[torch.Tensor], want: Reference) -> tuple[list[float], list[float]]:
    """RMSE over RMS of outputs [1, T, HV, ...] and of states [N, HV, ...], each head of `want`. Zeros are 1 off, and NaN gives
    NaN."""
    def each(got: torch.Tensor, ref: torch.Tensor) -> list[float]:
        if got[:, list(want.heads)].shape != ref.shape:
            raise ValueError(f"output: got shape {list(got.shape)}; {len(want.heads)} of its heads are {list(ref.shape)}")
        return [rms_error(got[:, h], ref[:, i]) for i, h in enumerate(want.heads)]
    n = len(want.outputs)
    of_o = [e for got, ref in zip(results[:n], want.outputs, strict=True) for e in each(got[0], ref)]
    return of_o, [e for got, ref in zip(results[n:], want.states, strict=True) for e in each(got, ref)]


def worst(each: Sequence[float]) -> float:
    """The largest of the errors, 0 if there are none; NaN if one is NaN."""
    return math.nan if any(math.isnan(e) for e in each) else max(each, default=0.0)


def errors(results: Sequence[torch.Tensor], want: Reference) -> tuple[float, float]:
    """The worst of `head_errors` for the outputs, and for the states; 0 without states."""
    of_o, of_state = head_errors(results, want)
    return worst(of_o), worst(of_state)
