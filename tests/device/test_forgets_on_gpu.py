"""Tokens whose decay is -inf, or a NaN, on a CUDA GPU. Run with: pytest -m device tests/device"""
from dataclasses import replace
from math import inf

import pytest
import torch
from reference import call, expected, problem, rms_error

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import SCHEDULES, named
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BUILDS = [Build(t, schedule=s) for t in OWN if t != "pto" and runs(t, "cuda") for s in SCHEDULES]
if runs("tilelang", "cuda"):  # running sums of heads side by side
    BUILDS += [Build("tilelang", schedule=replace(named("walk"), name="two_heads", value_heads=2))]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        BUILDS += [Build("tilelang", schedule=s, arch="sm_90a") for s in ("walk", "fused_walk")]
#: Kimi Delta Attention with gates that count as -5 where they are less.
BOUNDED = [(t, s, "", 64) for t in OWN if t != "pto" and runs(t, "cuda") for s in ("fused", "staged")]
if runs("tilelang", "cuda") and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    BOUNDED += [("tilelang", "operand_walk", "sm_90a", 64), ("tilelang", "walk_in_turn", "sm_90a", 16)]
#: Of value heads 1 to 5: first, in the middle and last of a chunk; several; all of a chunk.
TOKENS = [[64], [90], [127], [0, 63, 65, 66, 100], list(range(64, 128))]


def on_gpu(fn):
    def run(*tensors, initial_state, cu_seqlens, **options):
        o, S = fn(*(x.cuda() for x in tensors), initial_state=initial_state.cuda(), cu_seqlens=cu_seqlens.cuda(), **options)
        return o.cpu(), S.cpu()
    return run


@pytest.mark.parametrize("b", BUILDS, ids=lambda b: f"{b.target}-{b.name}")
def test_a_token_that_forgets_all(b):
    fn, x = on_gpu(function(b)), problem([200, 70], 1, 6, 128, 128, gate=-0.1)
    y = {**x, "g": x["g"].clone()}
    for head, tokens in enumerate(TOKENS, 1):
        y["g"][tokens, head] = -inf if head % 2 else -1e30
    (without, _), (o, S), (want, want_S) = call(fn, x), call(fn, y), expected(y)
    for head, tokens in enumerate(TOKENS, 1):
        assert rms_error(o[:, head], want[:, head]) < 5e-3 and rms_error(S[:, head], want_S[:, head]) < 5e-3, tokens
        assert torch.equal(o[:tokens[0], head], without[:tokens[0], head]), f"rows before token {tokens[0]} changed"
    assert torch.equal(o[:, 0], without[:, 0]) and torch.equal(o[200:], without[200:])
    y["g"][5, 0] = torch.nan
    o, S = call(fn, y)
    assert o[64:200, 0].isnan().all() and S[0, 0].isnan().all() and not o[:, 1:].isnan().any()


@pytest.mark.parametrize("target, schedule, arch, chunk", BOUNDED)
def test_a_bounded_gate_that_is_nan(target, schedule, arch, chunk):
    """It is no gate of -5: what a channel has forgotten is not known from then on."""
    fn = on_gpu(function(Build(target, chunk, algorithm="kimi_delta_attention", dtype="bfloat16", schedule=schedule, arch=arch,
                               contract=Contract.parse("g=floored"))))
    x = problem([200, 70], 1, 2, 128, 128, torch.bfloat16, gate=-0.1)
    x["g"] = x["g"][:, :, None].repeat(1, 1, 128)
    x["g"][5, 0, 3] = torch.nan
    o, S = call(fn, x)
    assert o[64:200, 0].isnan().all() and S[0, 0, 3].isnan().all()
    assert o[:, 1].isfinite().all() and o[200:].isfinite().all() and S[1].isfinite().all() and S[:, 1].isfinite().all()
