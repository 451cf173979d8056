"""Pages whose states are vectors, or whose outputs are one number per token."""
import pytest
import torch

from gdn_codegen import pages
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, row_sum
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import Schedule
from gdn_codegen.targets import OWN
from gdn_codegen.tools.cases import Case

HERE = [t for t in OWN if runs(t, "cpu")]


@algorithm(q="C K", v="C V", g="C", n=carried("K"), m=carried("V"))
def vector_states(q, v, g, n, m):
    G = cumsum(g)
    y = (exp(G) * row_sum(q * n[None, :]))[:, None] * v + exp(G)[:, None] * m[None, :]
    n = exp(last(G)) * n
    m = exp(last(G)) * m
    return y, n, m


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def number_a_token(q, k, v, S):
    y = q @ S + lower(q @ k.T) @ v
    size = row_sum(y * y)
    S = S + k.T @ v
    return y, size, S


#: A kernel for each value; those of y and m have two blocks of V.
BLOCKS = Schedule("blocks", (("y",), ("n",), ("m",)), v_block=32)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("K, V", [(32, 64), (36, 44)])
def test_a_state_may_be_a_vector(target, K, V):
    options = {"target": target, "chunk": 32, "head_dim_k": K, "head_dim_v": V, "schedule": BLOCKS if V % 32 == 0 else "fused"}
    pages.verify(vector_states, [Case((40,)), Case((3, 0, 33), initial=False)], **options)
    x = [torch.randn(1, 40, 2, d).half() for d in (K, V)]
    y, n, m = pages.compile(vector_states, **options)(*x, -torch.rand(1, 40, 2))
    assert n is None and m is None and y.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_an_output_may_be_one_number_a_token(target):
    pages.verify(number_a_token, [Case((40,))], target=target, chunk=32, head_dim_k=32, head_dim_v=32)
