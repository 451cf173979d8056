"""Decays of channels that a page spells in other ways: operands that are expressions, sums that no exponent reads."""
import pytest
import torch
from reference import rms_error

from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function


@algorithm(q="C K", k="C K", v="C V", g="C K", h="C K", Z=carried("K V"))
def spelled(q, k, v, g, h, Z):
    """Token t: Z <- Diag(exp(g + h)) Z + k v^T; y = (q * exp(g + h - g)) Z, and beside it the sums of v + v before the token."""
    total = cumsum(g + h)
    before = total - (g + h)
    y = (exp(total) * q) @ Z + decayed_product(q, k, total) @ v + cumsum(v + v, exclusive=True)
    y = y + decayed_product(q, k, total, before) @ v
    Z = exp(last(total))[:, None] * Z + (exp(last(total)[None, :] - total) * k).T @ v
    return y, Z


@pytest.mark.slow
@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_operands_may_be_expressions(target):
    gen, T, N = torch.Generator().manual_seed(0), 21, 32
    q, k, v, g, h = (torch.randn(1, T, 1, N, generator=gen) for _ in range(5))
    g, h = -g.abs() / 8, -h.abs() / 8
    got, final = function(Build(target, 16, algorithm=spelled, dtype="float32", head_dim_k=N, head_dim_v=N))(
        q=q, k=k, v=v, g=g, h=h, output_final_state=True)
    Z, want = torch.zeros(N, N, dtype=torch.float64), []
    for t in range(T):
        a, b, x, decay = (y[0, t, 0].double() for y in (q, k, v, (g + h).exp()))
        earlier = 2 * v[0, t // 16 * 16:t, 0].double().sum(0)  # of the chunk
        old = sum(((a * b2 * d).sum() * x2 for b2, x2, d in _earlier(k, v, g + h, t)), torch.zeros(N, dtype=torch.float64))
        Z = decay[:, None] * Z + torch.outer(b, x)
        want.append(Z.T @ a + earlier + old)
    assert rms_error(got[0, :, 0].double(), torch.stack(want)) < 1e-5
    assert rms_error(final[0, 0].double(), Z) < 1e-5


def _earlier(k, v, g, t):
    """The keys and values of earlier tokens of token t's chunk, with the decays up to the token before t."""
    for j in range(t // 16 * 16, t):
        yield k[0, j, 0].double(), v[0, j, 0].double(), g[0, j + 1:t, 0].double().sum(0).exp()
