"""Bounds of the terms of running sums: a term has one, and only one."""
from dataclasses import replace
from math import inf

import pytest
import torch
from reference import rms_error

from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, lower, maximum, valid
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.schedule.schedule import varied
from gdn_codegen.targets import lower as lower_program

SIZES, LENGTHS = {"C": 16, "K": 8, "V": 8}, [33, 0, 16, 5]


def summed(bound):
    """A page whose gates count as `bound` where they are less."""
    @algorithm(q="C K", k="C K", v="C V", g="HV C K", S=carried("K V"))
    def page(q, k, v, g, S, *, scale="K ** -0.5"):
        G = cumsum(valid(maximum(g, bound)))
        o = scale * (lower(decayed_product(q, k, G)) @ v + (q * exp(G)) @ S)
        S = exp(last(G))[:, None] * S + (k * exp(last(G)[None, :] - G)).T @ v
        return o, S
    return page


def run(p, x):
    return interpret(p, Problem(LENGTHS, 1, 1), x, dict.fromkeys(p.scalars, 0.5))


@pytest.mark.parametrize("bound, again", [(-5.0, False), (-105.0, False), (-106.0, True), (-1e4, True)])
def test_terms_get_a_bound_unless_they_have_one(bound, again):
    """Beside the page in chunks of one token, with gates of 0 to -inf in one chunk."""
    p = lower_program(summed(bound).trace(), "triton", varied("fused"), SIZES, "float32")
    sums = [o for k in p.kernels for o in walk(k.body) if o.kind == "cumsum"]
    assert sums and all((o.attr("least") is not None) == again for o in sums)
    gen, n = torch.Generator().manual_seed(0), sum(LENGTHS)
    x = {name: torch.randn(n, 1, 8, generator=gen, dtype=torch.float64) for name in "qkv"}
    x["g"] = torch.tensor([0.0, -0.05, -3.0, -50.0, -200.0, -inf]).double()[torch.randint(6, (n, 1, 8), generator=gen)]
    x["initial_state"] = torch.randn(len(LENGTHS), 1, 8, 8, generator=gen, dtype=torch.float64)
    want = run(replace(summed(max(bound, -300.0)).trace(), dims=(("C", 1), ("K", 8), ("V", 8))), x)
    got = run(p, x)
    assert all(rms_error(got[name], want[name]) < 1e-9 for name in want)
