"""RWKV-7, one chunk: a decay for each channel, and a rank-1 term b a^T instead of the delta rule's -k k^T (arXiv:2503.14456)."""
from ..ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, unit_lower_inverse


@algorithm(r="HV C K", w="HV C K", k="HV C K", v="C V", a="HV C K", b="HV C K", S=carried("K V"))
def rwkv7(r, w, k, v, a, b, S, *, scale=1.0):
    """Token t: z = S^T a; S <- Diag(exp(w)) S + b z^T + k v^T; o = scale S^T r."""
    W, W0 = cumsum(w), cumsum(w, exclusive=True)  # log decay of each channel since the chunk began; a reads S before it decays
    Tinv = unit_lower_inverse(-decayed_product(a, b, W, W0))
    Z = Tinv @ ((exp(W0) * a) @ S + decayed_product(a, k, W, W0) @ v)
    o = scale * ((exp(W) * r) @ S + decayed_product(r, b, W) @ Z + decayed_product(r, k, W) @ v)
    to_end = exp(last(W)[None, :] - W)
    S = exp(last(W))[:, None] * S + (to_end * b).T @ Z + (to_end * k).T @ v
    return o, S
