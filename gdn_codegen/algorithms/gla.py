"""Gated linear attention, one chunk: a gate for each channel of the key, no delta rule (arXiv:2312.06635)."""
from ..ir.builder import algorithm, carried, cumsum, decayed_product, exp, last


@algorithm(q="C K", k="C K", v="C V", g="HV C K", S=carried("K V", forgets="g"))
def gla(q, k, v, g, S, *, scale="K ** -0.5"):
    """Token t: S <- Diag(exp(g)) S + k v^T; o = scale S^T q."""
    G = cumsum(g)  # log decay of each channel since the chunk began
    o = scale * ((exp(G) * q) @ S + decayed_product(q, k, G) @ v)
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
    return o, S
