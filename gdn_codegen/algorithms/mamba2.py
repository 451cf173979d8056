"""Mamba-2's state space duality, one chunk (Dao, Gu 2024, arXiv:2405.21060). The paper has C, B and x for q, k and v."""
from math import inf

from ..ir.builder import algorithm, carried, cumsum, exp, last, lower, per_head


@algorithm(q="C K", k="C K", v="C V", dt="C", A="HV", D=per_head(0.0), S=carried("K V", forgets="g"))
def mamba2(q, k, v, dt, A, D, S):
    """Token t: S <- exp(dt A) S + k (dt v)^T; o = S^T q + D v, with numbers A and D for each head."""
    g = A * dt
    G = cumsum(g)  # log decay since the chunk began
    decays = exp(lower(G[:, None] - G[None, :], fill=-inf))  # decay from token j to token i
    o = D * v + exp(G)[:, None] * (q @ S) + ((q @ k.T) * decays) @ (dt[:, None] * v)
    S = exp(last(G)) * S + k.T @ ((dt * exp(last(G) - G))[:, None] * v)
    return o, S
