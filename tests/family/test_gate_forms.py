"""Gates for each channel as callers pass them: raw, bounded, in 16 bits; norms of rows of q and k. Each beside the recurrence."""
import pytest
import torch
from members import Case, computed, drawn, expected
from reference import rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.choose import by_token
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract, ContractError

CASE = Case((17, 0, 40), gates="slow")
SIZES = dict(head_dim_k=32, head_dim_v=64)


def build(name, accept, target="triton", **options):
    return Build(target, algorithm=name, contract=Contract.parse(accept), **{**SIZES, "chunk": 32, **options})


def gate(form, x, A_log, dt_bias, bound):
    """Log decays [T, HV, K] in float64, written out."""
    x, rate = x.double() + dt_bias.double(), A_log.double().exp()[:, None]
    if form == "raw":
        return -rate * torch.log1p(x.exp())
    return bound.double()[:, None] / (1 + torch.exp(-rate * x))


def made(b, form, narrow):
    """Inputs in callers' forms, and what the recurrence makes of what they mean."""
    x = drawn(b.algorithm, CASE, lowered(b), b.sizes)
    of = "w" if b.algorithm == "rwkv7" else "g"
    gen = torch.Generator().manual_seed(7)
    raw = 2 * torch.randn(x[of].shape, generator=gen)
    more = {"A_log": torch.randn(2, generator=gen) / 2, "dt_bias": torch.randn(2, b.sizes["K"], generator=gen),
            "lower_bound": torch.tensor([-5.0, -0.5])}
    raw = raw.bfloat16() if narrow else raw
    want = expected(b.algorithm, CASE, {**x, of: gate(form, raw, **{n.replace("lower_", ""): y for n, y in more.items()})})
    return {**x, of: raw}, {n: y for n, y in more.items() if form != "raw" or n != "lower_bound"}, want


def near(got, want, most=5e-3):
    for y, z in zip(got, want, strict=True):
        assert rms_error(y, z) < most


def call(b, x, more):
    ends = torch.tensor([0, *CASE.lengths]).cumsum(0)
    given = {n: y[None] for n, y in x.items() if n != "S"}
    o, final = function(b)(**given, **more, initial_state=x["S"], output_final_state=True, cu_seqlens=ends)
    return o[0], final


@pytest.mark.slow
@pytest.mark.parametrize("name, accept, target", [
    ("kimi_delta_attention", "g=raw", "triton"), ("kimi_delta_attention", "g=bounded/bfloat16", "triton"),
    ("gla", "g=raw/bfloat16", "triton"), ("rwkv7", "w=bounded", "triton"), ("rwkv7", "w=safe", "triton"),
    ("gated_delta_rule_2", "g=bounded", "triton"),
    ("kimi_delta_attention", "g=raw/bfloat16", "tilelang"), ("kimi_delta_attention", "g=bounded/bfloat16", "pto"),
    pytest.param("kimi_delta_attention", "g=safe/bfloat16", "triton", marks=pytest.mark.long),
    ("gated_delta_rule_2", "g=safe", "tilelang"), pytest.param("kimi_delta_attention", "g=safe", "pto", marks=pytest.mark.long)])
def test_raw_gates_of_channels(name, accept, target):
    b = build(name, accept, target, dtype="bfloat16" if "safe" in accept else "float16")
    form = "raw" if "raw" in accept else "bounded"
    x, more, want = made(b, form, "bfloat16" in accept)
    near(call(b, x, more), want)


@pytest.mark.parametrize("name", ["kimi_delta_attention", "gated_delta_rule_2"])
def test_raw_gates_in_short_chunks_of_warp_groups(name):
    """As lowered for Hopper, in the interpreter."""
    b = build(name, "g=safe,k=l2norm,q=l2norm", "tilelang", chunk=16, head_dim_k=64, dtype="bfloat16", arch="sm_90a",
              schedule=varied("operand_walk", "sm_90a", stages=4))
    p, (x, more, want) = lowered(b), made(b, "bounded", False)
    given = {**x, **more, "q": 3 * x["q"], "k": 5 * x["k"], "initial_state": x["S"]}
    got = interpret(p, Problem(list(CASE.lengths), 1, 2), {t.name: given[t.name] for t in p.role("input")}, {"scale": 64 ** -0.5})
    near((got["o"], got["final_state"]), want)


@pytest.mark.slow
def test_raw_gates_in_chunks_of_one_token():
    b = by_token(build("kimi_delta_attention", "g=raw", chunk=1), few=False)
    x, more, want = made(b, "raw", False)
    near(call(b, x, more), want)


@pytest.mark.slow
def test_numbers_that_may_be_absent():
    """A rate of 1, no bias, and the bound -5."""
    b = build("kimi_delta_attention", "g=bounded")
    x, _, _ = made(b, "bounded", False)
    zero, five = torch.zeros(2), torch.full((2,), -5.0)
    want = expected(b.algorithm, CASE, {**x, "g": gate("bounded", x["g"], zero, zero[:, None], five)})
    near(call(b, x, {}), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi_delta_attention", "gla", "gated_delta_rule_2"])
def test_norms_of_rows(name):
    b = build(name, "k=l2norm,q=l2norm")
    x = drawn(name, CASE, lowered(b), b.sizes)
    want = expected(name, CASE, x)
    scaled = {**x, "q": 3 * x["q"], "k": 5 * x["k"]}
    near(computed(b, CASE, scaled), want)


@pytest.mark.slow
@pytest.mark.parametrize("name, accept", [
    ("kimi_delta_attention", "beta=sigmoid,g=raw,k=l2norm,q=l2norm"), ("rwkv7", "w=floored"), ("gla", "g=linear/bfloat16"),
    *(pytest.param(n, "", marks=pytest.mark.long) for n in ("rwkv7", "gated_delta_rule_2"))])
def test_modules_check_themselves(name, accept):
    for what, (error, most) in function(build(name, accept)).__globals__["check"]().items():
        assert error <= most / 5, what


@pytest.mark.parametrize("accept, message", [
    ("q=bfloat16", "dtypes: got q='bfloat16'; accepted: a dtype for inputs of one number per token and head, and log "
                   "decays: g, beta"),
    ("dt_bias=bfloat16,g=raw", "dtypes: got dt_bias='bfloat16'; accepted: no dtype for a vector")])
def test_contracts_that_are_refused(accept, message):
    with pytest.raises(ContractError, match=message):
        lowered(build("kimi_delta_attention", accept))


def test_what_comes_is_checked():
    b = build("kimi_delta_attention", "g=raw/bfloat16")
    x, more, _ = made(b, "raw", True)
    assert find(b.algorithm).inputs["g"] == ("HV", ("C", "K"))
    for said, message in (({"dt_bias": more["dt_bias"][:, :1]}, r"dt_bias: got shape \(2, 1\); accepted: shape \(2, 32\)"),
                          ({"A_log": None}, "A_log: got NoneType")):
        with pytest.raises(ValueError, match=message):
            call(b, x, {**more, **said})
    with pytest.raises(ValueError, match=r"g: got torch\.float32; accepted: torch\.bfloat16"):
        call(b, {**x, "g": x["g"].float()}, more)
