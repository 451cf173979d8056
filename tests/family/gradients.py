"""Gradients of the members of the family by torch.autograd, through the recurrence of a token in float64."""
from __future__ import annotations

from collections.abc import Callable

import torch
from members import MEMBERS, Case, of_head
from torch import Tensor
from torch.nn.functional import softplus

from gdn_codegen.algorithms import find


def outputs(name: str, c: Case, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """o [tokens, HV, V] and the final states [N, HV, K, V] by the recurrence, as functions that autograd follows. x: inputs by
    name, packed, and S, the initial states."""
    K, V = x["S"].shape[2:]
    numbers = find(name).scalar_defaults({"K": K, "V": V})
    rows: dict[tuple[int, int], Tensor] = {}
    finals, start = [], 0
    for n, length in enumerate(c.lengths):
        for head in range(c.value_heads):
            mine = {i: of_head(y, head, c.value_heads) for i, y in x.items() if i != "S"}
            S = x["S"][n, head]
            for t in range(start, start + length):
                token = {i: y[t] if x[i].ndim > 1 else y for i, y in mine.items()}
                rows[t, head], S = MEMBERS[name].recurrence(S, **token, **numbers)
            finals.append(S)
        start += length
    tokens = range(sum(c.lengths))
    o = torch.stack([torch.stack([rows[t, h] for h in range(c.value_heads)]) for t in tokens]) if len(tokens) else \
        x["S"].new_zeros(0, c.value_heads, V)
    return o, torch.stack(finals).view(len(c.lengths), c.value_heads, K, V)


#: By name, what the page reads of callers' inputs.
Forms = dict[str, Callable[[dict[str, Tensor]], Tensor]]


def norm(name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    """The form of an input whose rows the kernels divide by their norms."""
    return lambda x: x[name] * (x[name].square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def raw_gate(x: dict[str, Tensor]) -> Tensor:
    """What the page reads of raw gates g, and of A_log and dt_bias."""
    rate = x["A_log"].exp()
    return -rate.view(-1, *[1] * (x["g"].ndim - 2)) * softplus(x["g"] + x["dt_bias"])


def expected(name: str, c: Case, x: dict[str, Tensor], d_o: Tensor, d_final: Tensor, forms: Forms | None = None
             ) -> dict[str, Tensor]:
    """The gradient of sum(o * d_o) + sum(final states * d_final) by each input and by S, in float64. x: as callers have them."""
    leaves = {n: y.double().detach().requires_grad_() for n, y in x.items()}
    page = {n: forms[n](leaves) if forms and n in forms else leaves[n] for n in (*find(name).inputs, "S")}
    o, final = outputs(name, c, page)
    loss = (o * d_o.double()).sum() + (final * d_final.double()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(y) if d is None else d for (n, y), d in zip(leaves.items(), found, strict=True)}


def of_input(name: str, got: dict[str, Tensor], want: Tensor) -> Tensor:
    """The gradient by an input, or by the initial states S, of what the program of the gradients returns by name: summed over
    the value heads of a key head, and over tokens, or chunks and columns, for a number or vector of a value head."""
    y = got["d_initial_state" if name == "S" else f"d_{name}"]
    if name != "S" and y.ndim > want.ndim:
        return y.sum(0).flatten(want.ndim).sum(-1) if y.ndim > want.ndim + 1 else y.sum(0)
    return y if y.shape == want.shape else y.unflatten(1, (want.shape[1], -1)).sum(2)


def relative(got: Tensor, want: Tensor) -> float:
    """RMSE over RMS. NaN if `got` has NaN."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-300))
