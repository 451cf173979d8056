"""A page outside the package: linear attention with a decaying state and a key normaliser, on every target.

    gdn_codegen build --target all --algorithm examples/my_linear_attention.py:decayed_linear_attention
"""
from math import inf

from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, row_norm


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def decayed_linear_attention(q, k, v, g, S, *, scale="K ** -0.5"):
    """Token t: S <- exp(g) S + n(k) v^T with n(k) = k / |k|; o = scale S^T n(q)."""
    qn, kn = row_norm(q), row_norm(k)
    G = cumsum(g)
    P = (qn @ kn.T) * exp(lower(G[:, None] - G[None, :], fill=-inf))
    o = scale * (exp(G)[:, None] * (qn @ S) + P @ v)
    S = exp(last(G)) * S + kn.T @ (exp(last(G) - G)[:, None] * v)
    return o, S
