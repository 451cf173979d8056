"""One token of each member of the family, as its definition says: in float64, for one sequence and one value head.

A function takes the state S [K, V] before the token, the token's inputs by name, and the scale. It returns the token's output
[V] and the state after it. Nothing here reads a page.
"""
from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, exp, outer


def delta_rule(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """S <- S + k u^T with u = beta (v - S^T k) (arXiv:2406.06484)."""
    u = beta * (v - S.T @ k)
    S = S + outer(k, u)
    return scale * (S.T @ q), S


def gated_delta_rule(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """S <- exp(g) S, then the delta rule (arXiv:2412.06464)."""
    return delta_rule(exp(g) * S, q, k, v, beta, scale)


def simple_gla(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """S <- exp(g) S + k v^T, with a number g for each token."""
    S = exp(g) * S + outer(k, v)
    return scale * (S.T @ q), S


def gla(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """S <- Diag(exp(g)) S + k v^T, with g [K] (arXiv:2312.06635)."""
    S = exp(g)[:, None] * S + outer(k, v)
    return scale * (S.T @ q), S


def kimi_delta_attention(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
                         scale: float) -> tuple[Tensor, Tensor]:
    """S <- Diag(exp(g)) S, with g [K], then the delta rule (arXiv:2510.26692)."""
    S = exp(g)[:, None] * S
    S = S + outer(k, beta * (v - S.T @ k))
    return scale * (S.T @ q), S


def gated_delta_rule_2(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor,
                       scale: float) -> tuple[Tensor, Tensor]:
    """S <- (I - k (b k)^T) Diag(exp(g)) S + k (w v)^T, with g, b [K] and w [V]."""
    S = exp(g)[:, None] * S
    S = S - outer(k, S.T @ (b * k)) + outer(k, w * v)
    return scale * (S.T @ q), S


def rwkv7(S: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """S <- Diag(exp(w)) S + b (a^T S) + k v^T, with log decays w [K] (arXiv:2503.14456). a reads S before it decays."""
    S = exp(w)[:, None] * S + outer(b, S.T @ a) + outer(k, v)
    return scale * (S.T @ r), S


def mamba2(S: Tensor, q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """S <- exp(dt A) S + k (dt v)^T; o = S^T q + D v, with numbers A and D for each head (arXiv:2405.21060)."""
    S = exp(dt * A) * S + outer(k, dt * v)
    return S.T @ q + D * v, S


def lightning_attention(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """S <- exp(g) S + k v^T, with a number g for each head (arXiv:2405.17381)."""
    S = exp(g) * S + outer(k, v)
    return scale * (S.T @ q), S


def gated_delta_product(S: Tensor, q: Tensor, k: Iterable[Tensor], v: Iterable[Tensor], g: Tensor, beta: Iterable[Tensor],
                        scale: float) -> tuple[Tensor, Tensor]:
    """S <- exp(g) S, then the delta rule for each of n keys k [n, K], v [n, V], beta [n] in order (arXiv:2502.10297)."""
    S = exp(g) * S
    for key, value, write in zip(k, v, beta, strict=True):
        S = S + outer(key, write * (value - S.T @ key))
    return scale * (S.T @ q), S
