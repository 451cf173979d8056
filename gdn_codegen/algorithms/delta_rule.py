"""DeltaNet, one chunk: the delta rule without a gate (Yang, Wang, Zhang, Shen, Kim 2024, arXiv:2406.06484)."""
from ..ir.builder import algorithm, carried, log, lower, maximum, row_sum, strictly_lower, unit_lower_inverse


@algorithm(q="C K", k="C K", v="C V", beta="C", S=carried("K V", forgets="F"))
def delta_rule(q, k, v, beta, S, *, scale="K ** -0.5"):
    """Token t: u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q."""
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T)))  # (I + A)^-1
    U = Tinv @ (beta[:, None] * (v - k @ S))
    o = scale * (q @ S + lower(q @ k.T) @ U)
    S = S + k.T @ U
    F = log(maximum(1, abs(1 - beta * row_sum(k * k))))  # log of the norm of a token's I - beta k k^T
    return o, S
