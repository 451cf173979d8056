"""Gated DeltaNet, one chunk (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464; chunked form: arXiv:2406.06484)."""
from math import inf

from ..ir.builder import algorithm, carried, cumsum, exp, last, log, lower, maximum, row_sum, strictly_lower, unit_lower_inverse


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V", forgets="F"))
def gated_delta_rule(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Token t: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q."""
    G = cumsum(g)  # log decay since the chunk began
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))  # decay from token j to token i
    A = strictly_lower(beta[:, None] * (k @ k.T) * D)
    Tinv = unit_lower_inverse(A)  # (I + A)^-1
    U = Tinv @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    F = g + log(maximum(1, abs(1 - beta * row_sum(k * k))))  # log of the norm of a token's exp(g) (I - beta k k^T)
    return o, S
