"""The scale of a product's operand leaves it, unless a schedule names the operand."""
from math import inf

import pytest
import torch

from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, lower
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import Schedule


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def scaled(q, k, v, g, S):
    """q k^T is out of the range of float16, a thousandth of it is not."""
    G = cumsum(g)
    P = 0.001 * (q @ k.T) * exp(lower(G[:, None] - G[None, :], fill=-inf))
    o = P @ v
    S = S + k.T @ v
    return o, S


@pytest.mark.slow
@pytest.mark.parametrize("dtype, kernels, finite", [
    ("float16", (("P",), ("@output", "@state")), True), ("bfloat16", (("@output", "@state"),), True),
    ("float16", (("@output", "@state"),), False)])
def test_a_value_that_a_schedule_names_keeps_its_scale(dtype, kernels, finite):
    x = [torch.full((1, 16, 1, 16), n, dtype=getattr(torch, dtype)) for n in (100.0, 100.0, 0.5)]
    b = Build("triton", 16, algorithm=f"{__file__}:scaled", schedule=Schedule("own", kernels), dtype=dtype, head_dim_k=16,
              head_dim_v=16)
    assert function(b)(*x, torch.zeros(1, 16, 1))[0].isfinite().all() == finite
