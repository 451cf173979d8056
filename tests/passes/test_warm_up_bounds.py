"""near: keys are read for the bound only where parts begin, and what was not read is never enough."""
from dataclasses import replace
from math import inf

import pytest
import torch
import torch.nn.functional as F
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, log, maximum, row_sum
from gdn_codegen.ir.builder import lower as tril
from gdn_codegen.ir.core import Loop, walk
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.cut.partition import BOUND
from gdn_codegen.schedule import Schedule, named
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 16, "V": 16}


@pytest.fixture(autouse=True)
def short_reach(monkeypatch):
    """Warm-ups are two parts long at most, on any device, so that short sequences have summaries."""
    monkeypatch.setattr("gdn_codegen.passes.cut.partition.longest_warm_up", lambda device: 2)


def lowered(schedule="fused_walk", page="gated_delta_rule", dtype="float16", partition="decay", target="triton"):
    s = schedule if isinstance(schedule, Schedule) else named(schedule)
    page = find(page) if isinstance(page, str) else page
    return lower(page.trace(), target, replace(s, partition=partition), SIZES, dtype)


def ran(p, x, span):
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    i = Interpreter(p, Problem(x["lengths"], x["q"].shape[1], x["v"].shape[1], span), {"scale": x["scale"]})
    got, want = i.run({t.name: given[t.name] for t in p.role("input")}), expected(x)
    assert max(rms_error(got["o"], want[0]), rms_error(got["final_state"], want[1])) < 1e-4
    return i


def bounds(p):
    """Kernels that say what chunks before a part forget."""
    return [k.name for k in p.kernels if [s.index for s in k.body if isinstance(s, Loop)] == ["before"]]


def gates(lengths, heads, *per_token, norm=1.0):
    x = problem(lengths, 1, heads, 16, 16, torch.float32)
    for h, g in enumerate(per_token):
        x["g"][:, h] = g
    x["k"] = F.normalize(x["k"], dim=-1) * norm
    return x


@pytest.mark.slow
@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_where_it_reads_less(target):
    for schedule, first in (("fused_walk", "G_beta_F_chunk_least"), ("fused", "F_chunk_least")):
        p = lowered(schedule, target=target)
        assert bounds(p) == ["F_chunk"] and [k.name for k in p.kernels][:2] == [first, "F_chunk"]
        assert {o.attr("tensor") for o in walk(p.kernels[0].body) if o.kind == "load"} <= {"g", "beta"}
    assert bounds(lowered("walk")) == []  # whose first kernel multiplies k
    assert bounds(lowered("fused_walk", "simple_gla")) == []  # whose bound is the gates
    assert bounds(lowered("fused_walk", partition="exact")) == bounds(lowered("fused_walk", partition=None)) == []


def test_chunks_that_parts_forget_are_not_read():
    """Gates of which 3 chunks are enough, or 1, and room for a quarter and one more; parts of 8."""
    x = gates([24 * 16 + 5, 16, 8 * 16 + 1], 2, -BOUND["float16"] / 40, -50.0)
    i = ran(lowered(), x, 8)
    sums = i.memory["F_chunk_ws"]
    known = [[n for n in range(25) if sums[n, h] != float("inf")] for h in (0, 1)]  # NaN was not written
    assert known == [[4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23], [6, 7, 14, 15, 22, 23]]
    assert i.memory["S_warm_up"][1:4, 0].tolist() == [3, 3, 3]
    assert torch.allclose(sums[4, 0], x["g"][64:80, 0].double().sum())


@pytest.mark.slow
def test_it_begins_where_it_would_had_it_read_all_keys():
    x = gates([40 * 16], 4, -0.02, -0.1, -0.4, -3.0)
    x["g"] *= torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(3)) + 0.5
    for norm in (1.0, 1.42):  # of the second, 1 - beta |k|^2 is -1 or a little less for the largest beta
        x["k"] = F.normalize(x["k"], dim=-1) * norm
        seldom, often = (ran(lowered(s), x, 4).memory["S_warm_up"][1:10] for s in ("fused_walk", "walk"))
        assert torch.equal(seldom, often) and (often >= 0).any() and (often[:, 0] < 0).any()


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_keys_that_hold_memory_up_are_summed_up(target):
    """By gates alone a chunk is enough; tokens of norm 2 make the state grow nearly as much, so that ten would not be."""
    x = gates([12 * 16], 1, -1.15, norm=2.0)
    x["beta"][:] = 1.0
    i = ran(lowered(target=target), x, 2)
    assert i.memory["S_warm_up"][1:6, 0].tolist() == [-1] * 5
    assert BOUND["float16"] < 1.15 * 16  # which is what gates say


@pytest.mark.parametrize("wrong", [{"warm_up": ""}, {"carried": True}])
def test_the_verifier_knows_loops_before_a_part(wrong):
    p = lowered()
    k = next(k for k in p.kernels if k.slices > 1)
    walked = next(s for x in p.kernels for s in x.body if isinstance(s, Loop) and s.carried)
    change = {"carried": walked.carried} if "carried" in wrong else wrong
    body = tuple(replace(s, **change) if isinstance(s, Loop) else s for s in k.body)
    with pytest.raises(VerifyError, match="needs a warm-up length, and carries nothing"):
        verify(replace(p, kernels=tuple(replace(x, body=body) if x is k else x for x in p.kernels)))


def decayed(bound):
    """A page of a state that gates alone shrink; what it says of that is a bound, if not the least."""
    @algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V", forgets="F"))
    def page(q, k, v, g, S, *, scale=1.0):
        G = cumsum(g)
        F = bound(g, row_sum(k * k))  # noqa: F841
        D = exp(tril(G[:, None] - G[None, :], fill=-inf))
        o = scale * (exp(G)[:, None] * (q @ S) + tril((q @ k.T) * D) @ v)
        S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
        return o, S
    return page


BOUNDS = {"g + log(maximum(1, n))": True, "log(maximum(n, 2)) + g": True, "maximum(1, n) + g": True,
          "g + n": False, "maximum(g, g + n)": False, "g + log(maximum(1, n)) + n": False}


@pytest.mark.parametrize("text", BOUNDS)
def test_what_is_at_least_is_known_of_sums_with_what_is_never_negative(text):
    page = decayed(eval(f"lambda g, n: {text}", {"log": log, "maximum": maximum}))
    p = lower(page.trace(), "triton", Schedule("mine", (("o", "S"),), partition="decay"), SIZES, "float32")
    assert bool(bounds(p)) == BOUNDS[text]
