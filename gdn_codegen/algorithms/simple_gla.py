"""Simple gated linear attention, one chunk: scalar decay, no delta rule (Mamba-2, arXiv:2405.21060; GLA, arXiv:2312.06635)."""
from math import inf

from ..ir.builder import algorithm, carried, cumsum, exp, last, lower


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V", forgets="g"))
def simple_gla(q, k, v, g, S, *, scale="K ** -0.5"):
    """Token t: S <- exp(g) S + k v^T; o = scale S^T q."""
    G = cumsum(g)  # log decay since the chunk began
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))  # decay from token j to token i
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ v)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    return o, S
