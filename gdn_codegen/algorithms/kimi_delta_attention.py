"""Kimi Delta Attention, one chunk: the gated delta rule with a gate for each channel of the key (arXiv:2510.26692)."""
from ..ir.builder import (
    algorithm,
    carried,
    cumsum,
    decayed_product,
    exp,
    last,
    log,
    maximum,
    row_sum,
    strictly_lower,
    unit_lower_inverse,
)


@algorithm(q="C K", k="C K", v="C V", g="HV C K", beta="C", S=carried("K V", forgets="F"))
def kimi_delta_attention(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Token t: S <- Diag(exp(g)) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q."""
    G = cumsum(g)  # log decay of each channel since the chunk began
    A = strictly_lower(beta[:, None] * decayed_product(k, k, G))
    Tinv = unit_lower_inverse(A)  # (I + A)^-1
    U = Tinv @ (beta[:, None] * (v - (exp(G) * k) @ S))
    o = scale * ((exp(G) * q) @ S + decayed_product(q, k, G) @ U)
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ U
    F = g + log(maximum(1, abs(1 - beta * row_sum(k * k))))[:, None]  # with the log of the norm of I - beta k k^T
    return o, S
