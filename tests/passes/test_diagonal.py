"""diagonal: a sum of squares that a product has already is read off it."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.schedule import named
from gdn_codegen.targets import find as find_target
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 32, "V": 16}


def lowered(schedule, dtype="float16", target="tilelang", arch=""):
    return lower(find("gated_delta_rule").trace(), target, replace(named(schedule, arch), partition="decay"), SIZES, dtype, arch)


def kinds(p):
    return [[o.kind for o in walk(k.body)] for k in p.kernels]


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_the_kernel_that_has_the_product_reads_it_off(target):
    first, *rest = kinds(lowered("replay", target=target))
    assert "diagonal" in first and "row_sum" not in first
    assert not any("diagonal" in k for k in rest)


@pytest.mark.slow
def test_no_product_or_float32_keeps_the_sum():
    assert "row_sum" in kinds(lowered("fused"))[1] and not any("diagonal" in k for k in kinds(lowered("fused")))
    assert "row_sum" in kinds(lowered("replay", "float32"))[0]


@pytest.mark.parametrize("keys", [1.0, 1.7])
def test_it_means_the_same(keys):
    """Keys longer than 1, as there what is kept of a state depends on the sum."""
    x = problem([70, 5], 1, 2, 32, 16, torch.float64, gate=-0.01, beta=0.999)
    x["k"] = x["k"] * keys
    p = lowered("replay")
    run = Interpreter(p, Problem(x["lengths"], 1, 2, 2), {"scale": x["scale"]}, exact=True)
    got = run.run({**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]})
    want = expected(x)
    assert rms_error(got["o"], want[0]) < 1e-11 and rms_error(got["final_state"], want[1]) < 1e-11
    # what the kernel stored of the gates: the sum of log max(1, |1 - beta |k|^2|) and g over each chunk
    F = x["g"] + torch.log(torch.clamp((1 - x["beta"] * x["k"].pow(2).sum(-1)).abs(), min=1))
    (name,) = {o.attr("tensor") for k in p.kernels for o in walk(k.body) if o.kind == "warm_up_length" and o.attr("tensor")}
    stored = run.memory[name]
    assert rms_error(stored[0].reshape(2), F[:16].sum(0)) < 1e-12
    assert (F > 0).any() == (keys > 1.5)


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_each_target_writes_it(target):
    kernels = find_target(target).emit(lowered("replay", target=target), "bthd", None)
    assert ("if i == j:" in kernels[0].body) if target == "tilelang" else ("== i_C[None, :]" in kernels[0].body)
