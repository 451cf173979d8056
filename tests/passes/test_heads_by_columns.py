"""Heads batched as columns: which kernels, and that every later pass means the same."""
from dataclasses import replace

import pytest
import torch
from reference import problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, sigmoid, valid
from gdn_codegen.ir.core import Batch, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.algebra.clamp_decay import FLOOR
from gdn_codegen.schedule import Schedule, named
from gdn_codegen.targets import lower

HEADS = ASCEND_A2.heads["columns"]
SIZES = {"C": 32, "K": 16, "V": 32}


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def sums(q, k, v, g, S):
    """Sums that no exp takes, so that their terms have no bound."""
    G = cumsum(g)
    o = G[:, None] * (q @ S)
    S = S + k.T @ v
    return o, S


def lowered(groups=(("G",), ("S",), ("o",)), target="pto", sizes=SIZES, page=sums):
    return lower(page.trace(), target, Schedule("mine", groups), sizes, "float16")


def together(p):
    """The kernels that take several heads at once."""
    return [k.name for k in p.kernels if any(o.attr("heads") for o in walk(k.body))]


@pytest.mark.parametrize("value_heads", [1, 2, HEADS, HEADS + 1, 2 * HEADS + 3])
def test_any_number_of_heads(value_heads):
    """The last item of a chunk has fewer heads than a whole one, or as many."""
    x = problem([33, 0, 5], 1, value_heads, 16, 32, torch.float16, gate="mixed")
    given = {**{n: x[n] for n in ("q", "k", "v", "g")}, "initial_state": x["S"]}
    traced = replace(sums.trace(), dims=tuple(SIZES.items()))
    got, want = (interpret(p, Problem(x["lengths"], 1, value_heads), given, {}) for p in (lowered(), traced))
    assert all(rms_error(got[n], want[n]) < 1e-11 for n in want)


def test_kernels_that_only_sum():
    assert together(lowered()) == ["G"]
    assert together(lowered((("S", "o"),))) == [] and together(lowered(target="triton")) == []
    bounded = lower(find("gated_delta_rule").trace(), "pto", named("staged"), SIZES, "float16")
    assert together(bounded) == ["G"]
    for p in (lowered(), bounded):
        (g,) = (k for k in p.kernels if k.name == "G")
        assert g.batch == Batch(HEADS, "columns") and {o.agent for o in walk(g.body)} == {"vector"}
        numbers = {o.out: o.attr("value") for o in walk(g.body) if o.kind == "const"}
        assert [numbers[o.args[1]] for o in walk(g.body) if o.kind == "maximum"] == ([FLOOR] if p is bounded else [])


def test_a_computed_gate_is_summed_head_by_head():
    @algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
    def page(q, k, v, g, S):
        G = cumsum(valid(sigmoid(g)))
        o = exp(-G)[:, None] * (q @ S)
        S = exp(-last(G)) * S + k.T @ v
        return o, S

    p = lower(page.trace(), "pto", Schedule("mine", (("G",), ("S",), ("o",))), SIZES, "float16")
    assert together(p) == []


def test_loads_move_as_many_heads_as_the_kernel_batches():
    p = lowered()
    kernels = tuple(replace(k, batch=Batch(8, "columns")) if k.name == "G" else k for k in p.kernels)
    with pytest.raises(VerifyError, match=r"takes 16 heads at once.*G has 8"):
        verify(replace(p, kernels=kernels))
