"""A token whose decay is -inf, or too strong for float32, forgets all: nothing before it changes, what follows is exact."""
import shutil
from dataclasses import replace
from math import inf

import pytest
import torch
from reference import TOLERANCE, call, check, expected, in_parts, passed, problem, rms_error

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import SCHEDULES, named
from gdn_codegen.schedule.contract import Contract

pytestmark = pytest.mark.slow

LENGTHS = [70, 33]
#: Tokens of the first sequence that forget, of value heads 1 to 6: first, in the middle and last of a chunk of 32; several; a
#: whole chunk; all. Of head 0 none does.
TOKENS = [[32], [45], [63], [0, 31, 33, 34, 50], list(range(32, 64)), list(range(70))]
FREE = replace(SCHEDULES["replay"], name="free", form="gate-free", inverse="doubling")
BUILDS = [Build("triton", 32, schedule=s, dtype=d, head_dim_k=32, head_dim_v=32) for s, d in (
    ("fused", "float32"), ("staged", "float16"), ("prepared_vk", "float16"), ("walk", "bfloat16"), (FREE, "float16"))]
#: A kernel takes seconds to compile: of those that other tests have.
BUILDS += [Build("tilelang", 32, "bthd", schedule="fused", dtype="float16", head_dim_k=32, head_dim_v=64),
           Build("tilelang", 32, "bhtd", schedule="staged", dtype="float16", head_dim_k=64, head_dim_v=32),
           Build("tilelang", 32, "bhtd", schedule="replay", dtype="float32", head_dim_k=32, head_dim_v=32)]
BUILDS += [Build("pto", 32, schedule=s, dtype=d, head_dim_k=32, head_dim_v=32) for s, d in (
    ("fused", "float32"), ("staged", "float16"))]
BUILDS += [Build("triton", 32, "bhtd", "simple_gla", dtype="float32", head_dim_k=32, head_dim_v=32)]
FORMS = [("triton", "g=raw"), ("triton", "g=linear"), ("tilelang", "g=linear"), ("pto", "g=raw")]


def needs(target):
    if target != "pto":
        pytest.importorskip(target)
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")


def forgetting(x, *decays):
    """The problem with such tokens; heads have the decays in rotation."""
    g = x["g"].clone()
    for head, tokens in enumerate(TOKENS, 1):
        g[tokens, head] = decays[head % len(decays)]
    return {**x, "g": g}


@pytest.mark.parametrize("b", BUILDS, ids=lambda b: f"{b.target}-{b.name}")
def test_a_token_that_forgets_all(b):
    needs(b.target)
    fn, options = function(b), {"layout": b.layout, "delta": b.algorithm == "gated_delta_rule"}
    bound = TOLERANCE[b.dtype] * (10 if b.dtype == "float32" else 1)  # sums of 105 and more keep fewer digits (docs/design.md)
    x = problem(LENGTHS, 1, 7, b.head_dim_k, b.head_dim_v, getattr(torch, b.dtype), gate=-0.2)
    y = forgetting(x, -inf, -1e30)
    (without, _), (o, S), (want, want_S) = call(fn, x, **options), call(fn, y, **options), expected(y, options["delta"])
    for head, tokens in enumerate(TOKENS, 1):
        assert rms_error(o[:, head], want[:, head]) < bound and rms_error(S[:, head], want_S[:, head]) < bound, tokens
        assert torch.equal(o[:tokens[0], head], without[:tokens[0], head]), f"rows before token {tokens[0]} changed"
    assert torch.equal(o[:, 0], without[:, 0]) and torch.equal(o[70:], without[70:]), "other heads or sequences changed"


@pytest.mark.parametrize("target, accept", FORMS)
def test_in_other_forms(target, accept):
    needs(target)
    b = Build(target, 32, head_dim_k=32, head_dim_v=32, contract=Contract.parse(accept))
    x, page = passed(LENGTHS, 1, 7, 32, 32, dict(b.contract.inputs))
    x = forgetting(x, 0.0 if accept == "g=linear" else 3e38)
    check(function(b), x, page=forgetting(page, -inf))
    x["g"][5, 0] = torch.nan  # not a decay: the caller must see the NaN
    o, S = call(function(b), x)
    assert o[5:32, 0].isnan().all() and S[0, 0].isnan().all() and not o[:, 1:].isnan().any()


@pytest.mark.parametrize("b", BUILDS[:1] + BUILDS[5:9], ids=lambda b: f"{b.target}-{b.name}")
def test_nan_stays(b):
    needs(b.target)
    x = problem([40], 1, 2, b.head_dim_k, b.head_dim_v, getattr(torch, b.dtype))
    x["g"][5, 1] = torch.nan
    o, S = call(function(b), x, layout=b.layout)
    assert o[5:32, 1].isnan().all() and S[0, 1].isnan().all() and not o[:, 0].isnan().any()


@pytest.mark.parametrize("target, partition", [("triton", "decay"), ("triton", "exact"), ("tilelang", "decay")])
def test_in_parts(target, partition):
    needs(target)
    plan = replace(named("replay"), partition=partition)
    fn = function(Build(target, 16, "bhtd", schedule=plan, head_dim_k=16, head_dim_v=32))
    x = problem([150, 16], 1, 4, 16, 32, gate=-0.02)
    for head, tokens in enumerate(([40], [15, 16, 47, 48, 64], range(32, 48), range(0, 150, 3))):
        x["g"][list(tokens), head] = -inf
    check(in_parts(fn, 1), x, 1e-3, layout="bhtd")
