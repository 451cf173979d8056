"""Lightning attention, one chunk: a constant decay for each head, no delta rule (Qin et al. 2024, arXiv:2405.17381)."""
from math import inf

from ..ir.builder import algorithm, carried, cumsum, exp, last, lower, per_token


@algorithm(q="C K", k="C K", v="C V", g="HV", S=carried("K V", forgets="gs"))
def lightning_attention(q, k, v, g, S, *, scale="K ** -0.5"):
    """Token t: S <- exp(g) S + k v^T; o = scale S^T q, with a number g for each head."""
    gs = per_token(g)  # the log decay of every token
    G = cumsum(gs)  # log decay since the chunk began
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))  # decay from token j to token i
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ v)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    return o, S
