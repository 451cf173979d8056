"""Gated delta rule 2, one chunk: gates per channel for what a token forgets, erases and writes (GDN-2)."""
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
    sqrt,
    strictly_lower,
    unit_lower_inverse,
)


@algorithm(q="C K", k="C K", v="C V", g="HV C K", b="HV C K", w="C V", S=carried("K V", forgets="F"))
def gated_delta_rule_2(q, k, v, g, b, w, S, *, scale="K ** -0.5"):
    """Token t: S <- Diag(exp(g)) S; u = w * v - S^T (b * k); S <- S + k u^T; o = scale S^T q."""
    G = cumsum(g)  # log decay of each channel since the chunk began
    erase = b * k
    Tinv = unit_lower_inverse(strictly_lower(decayed_product(erase, k, G)))
    U = Tinv @ (w * v - (exp(G) * erase) @ S)
    o = scale * ((exp(G) * q) @ S + decayed_product(q, k, G) @ U)
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ U
    d = row_sum(erase * k)
    r = maximum(0, row_sum(erase * erase) * row_sum(k * k) - d * d)  # 0 if b is the same in all channels
    F = g + log(maximum(1, (sqrt((2 - d) * (2 - d) + r) + sqrt(d * d + r)) / 2))[:, None]  # the norm of I - k (b * k)^T
    return o, S
