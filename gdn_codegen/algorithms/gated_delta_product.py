"""Gated DeltaProduct with two Householder steps for each token, one chunk (Siems et al. 2025, arXiv:2502.10297)."""
from math import inf

from ..ir.builder import algorithm, carried, cumsum, exp, last, log, lower, maximum, row_sum, strictly_lower, unit_lower_inverse


@algorithm(q="C K", k1="C K", k2="C K", v1="C V", v2="C V", g="C", beta1="C", beta2="C", S=carried("K V", forgets="F"))
def gated_delta_product(q, k1, k2, v1, v2, g, beta1, beta2, S, *, scale="K ** -0.5"):
    """Token t: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T for k1, then for k2; o = scale S^T q."""
    G = cumsum(g)  # log decay since the chunk began
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))  # decay from token j to token i
    T1 = unit_lower_inverse(strictly_lower(beta1[:, None] * (k1 @ k1.T) * D))
    A = beta2[:, None] * (k2 @ k1.T) * D  # second steps also see the first step of their token
    X = T1 @ strictly_lower(beta1[:, None] * (k1 @ k2.T) * D)
    T2 = unit_lower_inverse(strictly_lower(beta2[:, None] * (k2 @ k2.T) * D - A @ X))
    Y = T1 @ (beta1[:, None] * (v1 - exp(G)[:, None] * (k1 @ S)))
    U2 = T2 @ (beta2[:, None] * (v2 - exp(G)[:, None] * (k2 @ S)) - A @ Y)
    U1 = Y - X @ U2
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k1.T) * D) @ U1 + ((q @ k2.T) * D) @ U2)
    W = exp(last(G) - G)[:, None]  # decay from a token to the end of the chunk
    S = exp(last(G)) * S + k1.T @ (W * U1) + k2.T @ (W * U2)
    F = g + log(maximum(1, abs(1 - beta1 * row_sum(k1 * k1)))) + log(maximum(1, abs(1 - beta2 * row_sum(k2 * k2))))
    return o, S
