"""What the matrix holds calls against, on a device: the recurrence, and what a plain chunked form makes of roundings."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Means = dict[str, Any]


class Rows:
    """Packed tensors of a problem [T, heads, ...] as [longest, N HV, ...], zeros past a sequence's end, and back."""

    def __init__(self, x: Means, device: str, multiple: int = 1) -> None:
        self.device, self.lengths, (self.H, self.K), (self.HV, self.V) = device, x["lengths"], x["k"].shape[1:], x["v"].shape[1:]
        self.N, self.total = len(self.lengths), sum(self.lengths)
        self.longest = -(-max(self.lengths) // multiple) * multiple
        self.sequence = torch.repeat_interleave(torch.arange(self.N), torch.tensor(self.lengths))
        self.token = torch.arange(self.total) - torch.tensor([0, *self.lengths]).cumsum(0)[self.sequence]

    def padded(self, t: torch.Tensor) -> torch.Tensor:
        t = t[:self.total].double()
        t = t if t.shape[1] == self.HV else t.repeat_interleave(self.HV // self.H, 1)
        out = torch.zeros(self.longest, self.N, *t.shape[1:], dtype=torch.float64)
        out[self.token, self.sequence] = t
        return out.flatten(1, 2).to(self.device)

    def state(self, S: torch.Tensor | None) -> torch.Tensor:
        S = torch.zeros(self.N, self.HV, self.K, self.V, dtype=torch.float64) if S is None else S.double()
        return S.to(self.device, copy=True).flatten(0, 1)

    def packed(self, o: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(like.shape, dtype=torch.float64)
        out[:self.total] = o.cpu().double().unflatten(1, (self.N, self.HV))[self.token, self.sequence]
        return out


def expected_on(device: str) -> Callable[[Means], tuple[torch.Tensor, torch.Tensor]]:
    """`reference.expected` on a device, all sequences and heads at once: token by token, in float64."""
    def expected(x: Means) -> tuple[torch.Tensor, torch.Tensor]:
        rows = Rows(x, device)
        q, k, v, beta = (rows.padded(x[n]) for n in ("q", "k", "v", "beta"))
        decay, S = rows.padded(x["g"]).exp(), rows.state(x["S"])
        o = torch.zeros_like(v)
        for t in range(rows.longest):
            S *= decay[t, :, None, None]
            u = beta[t, :, None, None] * (v[t, :, None] - k[t, :, None] @ S)
            S.baddbmm_(k[t, :, :, None], u)
            o[t] = (q[t, :, None] @ S)[:, 0]
        return rows.packed(x["scale"] * o, x["v"]), S.cpu().unflatten(0, (rows.N, rows.HV))
    return expected


def _tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


def chunked(x: Means, dtype: str, chunk: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """o and final states by the textbook's chunked form, its inverse exact, what products read rounded to `dtype` ("tf32", too).
    On keys that are alike this is what roundings cost, however good a kernel is."""
    kept = torch.float32 if dtype == "float32" else torch.float64
    r = {"tf32": _tf32, "float32": lambda t: t}.get(dtype, lambda t: t.to(getattr(torch, dtype)).double())
    rows = Rows(x, device, chunk)
    q, k, v, beta, g = (rows.padded(x[n]).to(kept) for n in ("q", "k", "v", "beta", "g"))
    S, os = rows.state(x["S"]).to(kept), []
    low = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()
    eye = torch.eye(chunk, dtype=torch.float64, device=device)
    for at in range(0, rows.longest, chunk):
        qc, kc, vc, bc, gc = (t[at:at + chunk].transpose(0, 1) for t in (q, k, v, beta, g))
        G = gc.clamp(min=-1e4).cumsum(1)
        decay = (G[:, :, None] - G[:, None]).masked_fill(~low, -torch.inf).exp()
        A = (bc[:, :, None] * (r(kc) @ r(kc).mT) * decay).tril(-1).double()
        inverse = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True).to(kept)
        head = G.exp()[:, :, None]
        U = r(inverse) @ r(bc[:, :, None] * (vc - head * (r(kc) @ r(S))))
        os.append(head * (r(qc) @ r(S)) + r(r(qc) @ r(kc).mT * decay) @ r(U))
        S = head[:, -1:] * S + r(kc).mT @ r((G[:, -1:] - G).exp()[:, :, None] * U)
    o = torch.cat(os, 1).transpose(0, 1) if os else v
    return rows.packed(x["scale"] * o, x["v"]), S.cpu().double().unflatten(0, (rows.N, rows.HV))
