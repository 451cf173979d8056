"""heads: which kernels take several value heads at once, and that every pass after it means the same."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, sigmoid, valid
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.schedule import Schedule, named
from gdn_codegen.schedule.heads import HEADS, heads
from gdn_codegen.schedule.pipelines import lower

SIZES = {"C": 32, "K": 16, "V": 32}


def lowered(schedule="staged", target="pto", sizes=SIZES):
    return lower(find("gated_delta_rule").trace(), target, named(schedule), sizes, "float16")


def together(p):
    """The kernels that take several heads at once."""
    return [k.name for k in p.kernels if any(o.attr("heads") for o in walk(k.body))]


@pytest.mark.parametrize("value_heads", [1, 2, HEADS, HEADS + 1, 2 * HEADS + 3])
def test_any_number_of_heads(value_heads):
    """The last item of a chunk has fewer heads than a whole one, or as many."""
    x = problem([33, 0, 5], 1, value_heads, 16, 32, torch.float16, gate="mixed")
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    got = interpret(lowered(), Problem(x["lengths"], 1, value_heads), given, {"scale": x["scale"]})
    o, S = expected(x)
    assert rms_error(got["o"], o) < 1e-11 and rms_error(got["final_state"], S) < 1e-11


def test_kernels_that_only_sum():
    assert together(lowered()) == ["G"]
    assert together(lowered("prepared")) == [] and together(lowered("fused")) == []
    assert together(lowered(target="triton")) == []
    (g,) = (k for k in lowered().kernels if k.name == "G")
    assert g.lanes == HEADS and {o.agent for o in walk(g.body) if o.kind not in ("signal", "wait")} == {"cube"}


def test_a_mask_that_does_not_fit_is_none():
    """L0B takes a mask of 128 x 128 float32 and no larger one; such a chunk is summed head by head."""
    assert together(lowered(sizes={**SIZES, "C": 128})) == ["G"]
    small = replace(ASCEND_A2, spaces={**ASCEND_A2.spaces, "L0B": 32 * 1024})
    p = lower(find("gated_delta_rule").trace(), "triton", named("staged"), {**SIZES, "C": 128}, "float16")
    assert heads(p, small) is p


def test_a_computed_gate_is_summed_head_by_head():
    @algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
    def page(q, k, v, g, S):
        G = cumsum(valid(sigmoid(g)))
        o = exp(-G)[:, None] * (q @ S)
        S = exp(-last(G)) * S + k.T @ v
        return o, S

    p = lower(page.trace(), "pto", Schedule("mine", (("G",), ("S",), ("o",))), SIZES, "float16")
    assert together(p) == []


def test_heads_are_as_many_as_lanes():
    p = lowered()
    kernels = tuple(replace(k, lanes=8) if k.name == "G" else k for k in p.kernels)
    with pytest.raises(VerifyError, match=r"takes 16 heads at once.*G has 8"):
        verify(replace(p, kernels=kernels))
