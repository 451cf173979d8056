"""The members of the family: for each page its recurrence, how its inputs are drawn, and what a built module makes of them."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import recurrences
import torch
from torch import Tensor
from torch.nn.functional import normalize

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import Program
from gdn_codegen.ir.interpret import TORCH
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function

#: Log decays of entries of a chunk, and how often each occurs: most entries keep, a few forget at once.
DECAYS, OFTEN = (0.0, -0.05, -3.0, -50.0), (0.6, 0.34, 0.03, 0.03)
#: The key of tokens FIRST to LAST of a pack is one key.
FIRST, LAST = 5, 40


@dataclass(frozen=True)
class Case:
    """Sequences to run. repeat: tokens FIRST to LAST have one key. gates: "mixed" (0 to -50) or "slow" (0 to -0.1).
    strength: the largest beta."""

    lengths: tuple[int, ...]
    heads: int = 1
    value_heads: int = 2
    batched: bool = False
    initial: bool = True
    gates: str = "mixed"
    repeat: bool = False
    strength: float = 1.0
    seed: int = 0


class Draws:
    """Draws one input after another. Each method takes a shape [tokens or none, heads, dims]."""

    def __init__(self, case: Case) -> None:
        self.case, self.gen = case, torch.Generator().manual_seed(case.seed)
        self.drawn: dict[str, Tensor] = {}

    def normal(self, shape: Iterable[int]) -> Tensor:
        return torch.randn(*shape, generator=self.gen)

    def share(self, shape: Iterable[int]) -> Tensor:
        """Numbers from 0 to 1."""
        return torch.rand(*shape, generator=self.gen)

    def skip(self, shape: Iterable[int]) -> Tensor:
        """Small numbers, beside which a product with a state is not lost."""
        return self.share(shape) / 8

    def beta(self, shape: Iterable[int]) -> Tensor:
        return self.case.strength * self.share(shape)

    def unit(self, shape: Iterable[int]) -> Tensor:
        """Rows of norm 1, some of which are equal."""
        x = normalize(self.normal(shape), dim=-1)
        if self.case.repeat:
            x[FIRST:LAST] = x[FIRST:FIRST + 1]  # none in a shorter pack
        return x

    def log_decay(self, shape: Iterable[int]) -> Tensor:
        shape = tuple(shape)
        if self.case.gates == "slow":
            return -0.1 * self.share(shape)
        n = torch.Size(shape).numel()
        at = torch.multinomial(torch.tensor(OFTEN), max(1, n), True, generator=self.gen)[:n]
        return torch.tensor(DECAYS)[at].reshape(shape)

    def rate(self, shape: Iterable[int]) -> Tensor:
        """Numbers a head below 0: the first forgets slowly, the last most."""
        return -torch.linspace(0.02, 0.1 if self.case.gates == "slow" else 50, torch.Size(shape).numel()).reshape(tuple(shape))

    def minus(self, name: str) -> Callable[[Iterable[int]], Tensor]:
        """Minus another input, times numbers from 0 to 1 for each token and head."""
        return lambda shape: -self.drawn[name] * self.share((*self.drawn[name].shape[:2], 1))


@dataclass(frozen=True)
class Member:
    """recurrence: of one token. inputs: by name, how each is drawn: the name of a method of Draws, or "minus NAME", in the order
    in which they are drawn."""

    recurrence: Callable[..., tuple[Tensor, Tensor]]
    inputs: dict[str, str]


def _two_steps(S: Tensor, q: Tensor, g: Tensor, scale: float, **x: Tensor) -> tuple[Tensor, Tensor]:
    """Gated DeltaProduct of two steps, as the page has them."""
    k, v, beta = ([x[n + "1"], x[n + "2"]] for n in ("k", "v", "beta"))
    return recurrences.gated_delta_product(S, q, k, v, g, beta, scale)


_QKV = {"q": "unit", "k": "unit", "v": "normal"}
MEMBERS = {
    "gated_delta_rule": Member(recurrences.gated_delta_rule, {**_QKV, "g": "log_decay", "beta": "beta"}),
    "delta_rule": Member(recurrences.delta_rule, {**_QKV, "beta": "beta"}),
    "simple_gla": Member(recurrences.simple_gla, {**_QKV, "g": "log_decay"}),
    "gated_delta_product": Member(_two_steps, {"q": "unit", "k1": "unit", "k2": "unit", "v1": "normal", "v2": "normal",
                                               "g": "log_decay", "beta1": "beta", "beta2": "beta"}),
    "gla": Member(recurrences.gla, {**_QKV, "g": "log_decay"}),
    "kimi_delta_attention": Member(recurrences.kimi_delta_attention, {**_QKV, "g": "log_decay", "beta": "beta"}),
    "gated_delta_rule_2": Member(recurrences.gated_delta_rule_2, {**_QKV, "g": "log_decay", "b": "beta", "w": "share"}),
    "rwkv7": Member(recurrences.rwkv7, {"r": "unit", "w": "log_decay", "k": "unit", "v": "normal", "a": "unit", "b": "minus a"}),
    "mamba2": Member(recurrences.mamba2, {**_QKV, "dt": "share", "A": "rate", "D": "skip"}),
    "lightning_attention": Member(recurrences.lightning_attention, {**_QKV, "g": "rate"}),
}


def drawn(name: str, c: Case, p: Program, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The inputs of a program: packed [tokens, heads, dims], or [heads] for a number a head, in the dtypes that the program
    reads; and S, the initial state [N, HV, K, V]."""
    draws, tensors = Draws(c), {t.name: t for t in p.role("input")}
    for n, how in MEMBERS[name].inputs.items():
        t = tensors[n]
        heads = c.heads if t.heads == "H" else c.value_heads
        shape = (sum(c.lengths), heads, *t.tile.shape(sizes)[1:]) if t.index == "token" else (heads,)
        method, *of = how.split()
        draw = draws.minus(*of) if of else getattr(draws, method)
        draws.drawn[n] = draw(shape).to(TORCH[t.dtype])
    state = (len(c.lengths), c.value_heads, sizes["K"], sizes["V"])
    return {**draws.drawn, "S": draws.normal(state) / 4 if c.initial else torch.zeros(state)}


def of_head(x: Tensor, head: int, heads: int) -> Tensor:
    """What a value head reads of an input, of `heads` value heads."""
    at = 1 if x.ndim > 1 else 0
    return x.select(at, head * x.shape[at] // heads)


def expected(name: str, c: Case, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """o [tokens, HV, V] and the final states, by the recurrence."""
    K, V = x["S"].shape[2:]
    numbers = find(name).scalar_defaults({"K": K, "V": V})
    o, final, start = torch.zeros(sum(c.lengths), c.value_heads, V, dtype=torch.float64), x["S"].double().clone(), 0
    for n, length in enumerate(c.lengths):
        for head in range(c.value_heads):
            mine = {i: of_head(y.double(), head, c.value_heads) for i, y in x.items() if i != "S"}
            for t in range(start, start + length):
                token = {i: y[t] if x[i].ndim > 1 else y for i, y in mine.items()}
                o[t, head], final[n, head] = MEMBERS[name].recurrence(final[n, head], **token, **numbers)
        start += length
    return o, final


def computed(b: Build, c: Case, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the module of the build gives, packed like `expected`'s. A pack has rows of NaN past its end, of which o must have
    zeros."""
    rows, rest = (len(c.lengths), 0) if c.batched else (1, 3)
    def shaped(y: Tensor) -> Tensor:
        y = torch.cat([y, y.new_full((rest, *y.shape[1:]), float("nan"))])
        y = y.reshape(rows, len(y) // rows, *y.shape[1:])
        return y if b.layout == "bthd" else y.transpose(1, 2).contiguous()
    given: dict[str, Any] = {n: shaped(y) if y.ndim > 1 else y for n, y in x.items() if n != "S"}
    ends = torch.tensor([0, *c.lengths]).cumsum(0).to(torch.int32)
    o, final = function(b)(**given, initial_state=x["S"] if c.initial else None, output_final_state=True,
                           cu_seqlens=None if c.batched else ends)
    o = (o if b.layout == "bthd" else o.transpose(1, 2)).flatten(0, 1)
    total = sum(c.lengths)
    assert (o[total:] == 0).all(), "rows of no sequence are not zero"
    return o[:total], final
