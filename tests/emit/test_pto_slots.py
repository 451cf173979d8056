"""PTO: channels of two tiles, one tile in L0, walks that work one chunk ahead, in the simulator."""
import shutil
from dataclasses import replace

import pytest
import torch
from reference import TOLERANCE, call, check, module, problem, rms_error
from test_pto import build, function, variant

from gdn_codegen import pages, pto_sim
from gdn_codegen.ir.builder import algorithm, carried, lower
from gdn_codegen.ir.core import loops, walk
from gdn_codegen.prove.happens_before import channels, without
from gdn_codegen.runtime import build as build_module
from gdn_codegen.runtime.build import lowered, render

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ 12 or newer")]
LENGTHS = [129, 0, 17, 64, 1, 96]  # five chunks, none, one, two, one, three: each slot first and last, on block 0 to 3
AHEAD = [("fused", "all"), ("fused", "loads"), ("fused", "operands"), ("replay", "all"), ("staged", "operands")]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("schedule, prefetch", AHEAD)
def test_walks_ahead(schedule, prefetch, dtype):
    fn = function(variant(schedule, prefetch=prefetch), dtype=dtype)
    check(fn, problem(LENGTHS, 1, 2, 32, 32, getattr(torch, dtype), gate=-0.2), TOLERANCE[dtype])
    check(fn, problem([0, 0], 1, 2, 32, 32, getattr(torch, dtype)), TOLERANCE[dtype])


@pytest.mark.parametrize("changes", [{"prefetch": "all"}, {"value_heads": 1, "order": "page"},
                                     {"prefetch": "loads", "order": "page"}])
@pytest.mark.parametrize("schedule", ["staged", "fused"])
def test_two_slots_a_channel(schedule, changes):
    fn = function(variant(schedule, channel_slots=2, **changes))
    check(fn, problem(LENGTHS, 1, 3, 32, 32, gate=-0.2))


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def summed(q, k, v, S):
    return q @ S + lower(q @ k.T) @ v, S + k.T @ v


def test_a_product_for_the_caller_alone_is_not_rounded_ahead():
    """The gradient of `summed` by q depends on no carried state, and is a sum of two products. The store rounds it."""
    op = pages.compile(summed, target="pto", chunk=16, head_dim_k=32, head_dim_v=16, dtype="float16")
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 37, 1, n, generator=draw).half().requires_grad_() for n in (32, 32, 16)]
    wide = [x.detach().double().requires_grad_() for x in given]
    q, k, v = (x[0, :, 0] for x in wide)
    got = torch.autograd.grad(op(*given)[0].sum(), given)
    want = torch.autograd.grad(((q @ k.T).tril() @ v).sum(), wide)
    assert all(rms_error(x, y) < TOLERANCE["float16"] for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_interleavings(monkeypatch, seed):
    monkeypatch.setenv("PTO_SIM_SHUFFLE", str(seed))
    check(function(variant("fused", prefetch="all", channel_slots=2)), problem(LENGTHS, 1, 2, 32, 32, gate=-0.2))


def test_blocks_of_columns_ahead():
    check(function(variant("fused", prefetch="all", v_block=16)), problem(LENGTHS, 1, 2, 32, 32, gate=-0.2))


@pytest.mark.parametrize("changes", [{"prefetch": "all"}, {"channel_slots": 2, "order": "page"}])
def test_a_wait_between_turns_taken_out_stops_the_simulator(monkeypatch, changes):
    """Channels that order an iteration with an earlier one, as slots need."""
    b = build(variant("fused", **changes))
    p = lowered(b)
    (k,) = p.kernels
    before = {o.attr("channel") for lp in loops(k.body) if lp.index == "item" for s in lp.body for o in walk((s,))
              if o.kind == "signal" and s is o}
    inside = {o.attr("channel") for lp in loops(k.body) if lp.index == "chunk" for o in walk(lp.body) if o.kind == "wait"}
    between = [n for n in channels(k) if n in before & inside]
    assert between
    for n in between:
        broken = replace(p, kernels=(without(k, n),))
        monkeypatch.setattr(build_module, "lowered", lambda b, broken=broken: broken)
        fn = getattr(module(render(b)), b.function)
        with pytest.raises(pto_sim.PtoSimError):
            call(fn, problem([160, 160, 160, 160, 160], 1, 1, 32, 32))
