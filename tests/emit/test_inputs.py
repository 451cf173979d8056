"""Inputs in the forms and dtypes of a contract, in generated modules; each against the recurrence in float64."""

import pytest
import torch
from reference import TOLERANCE, check, expected, passed, rms_error

from gdn_codegen.cli import main
from gdn_codegen.ops import chunk_gated_delta_rule
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule.contract import Contract

FULL = "beta=sigmoid,g=raw,k=l2norm,q=l2norm"
NARROW = "beta=sigmoid/float16,dt_bias=bfloat16,g=raw/bfloat16,k=l2norm,q=l2norm"
OTHER = "beta=twice_sigmoid/bfloat16,g=linear/float16"
RAGGED = [1, 17, 0, 65]


def agrees(target, accept, schedule="fused", lengths=RAGGED, dtype="float16", layout="bthd", page="gated_delta_rule", seed=0):
    c = Contract.parse(accept)
    dtypes = {n: getattr(torch, d) for n, d in c.dtypes}
    x, read = passed(lengths, 1, 2, 32, 32, dict(c.inputs), dtypes, getattr(torch, dtype), seed)
    fn = function(Build(target, 32, layout, page, schedule, dtype, 32, 32, contract=c))
    check(fn, x, TOLERANCE[dtype], read, layout=layout, delta=page == "gated_delta_rule")
    return fn, x


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fused", "staged", "prepared", "replay", "walk"])
@pytest.mark.parametrize("accept", [FULL, OTHER])
def test_triton(accept, schedule):
    agrees("triton", accept, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("accept", [NARROW, OTHER])
def test_triton_dtypes(accept, dtype):
    agrees("triton", accept, "replay", dtype=dtype, layout="bhtd")


@pytest.mark.slow
@pytest.mark.parametrize("target, accept, schedule, options", [
    ("tilelang", NARROW, "replay", {"layout": "bhtd"}), ("tilelang", OTHER, "fused", {}),
    ("pto", FULL, "fused", {}), ("pto", NARROW, "staged", {"layout": "bhtd"}),
    ("pto", OTHER, "staged", {"lengths": [33, 2], "dtype": "bfloat16"})])
def test_other_targets(target, accept, schedule, options):
    agrees(target, accept, schedule, **options)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["triton", "pto"])
def test_the_other_page(target):
    agrees(target, "g=raw,k=l2norm,q=l2norm", page="simple_gla")


def test_factors_of_zero():
    """A gate of 0 forgets at once, and nothing becomes NaN."""
    fn = function(Build("triton", 32, head_dim_k=32, head_dim_v=32, contract=Contract.parse("g=linear")))
    x, read = passed([40], 1, 2, 32, 32, {"g": "linear"})
    x["g"][5], read["g"][5] = 0, -1e4
    check(fn, x, page=read)


def test_zero_keys_of_large_values():
    """In float16 values of 200 times 1 / sqrt(1e-6) would be infinite, and nothing of them is left."""
    fn = function(Build("triton", 32, head_dim_k=32, head_dim_v=32, contract=Contract.parse("k=l2norm")))
    x, read = passed([40], 1, 2, 32, 32, {"k": "l2norm"})
    zero = x["k"][:, 0].abs().sum(-1) == 0
    assert zero.sum() == 1
    x["v"][zero], read["v"][zero] = 200, 200
    check(fn, x, page=read)


def test_what_comes_is_checked_and_never_rounded():
    fn, x = agrees("triton", NARROW, lengths=[5])
    args = {n: x[n][None] for n in ("q", "k", "v", "g", "beta")} | x["more"]
    a_log, dt_bias = args["A_log"], args["dt_bias"]
    wrong = [("g", args["g"].float(), "g: got torch.float32; accepted: torch.bfloat16"),
             ("beta", args["beta"].bfloat16(), "beta: got torch.bfloat16; accepted: torch.float16"),
             ("A_log", None, "A_log: got NoneType; accepted: a torch.Tensor"),
             ("A_log", a_log[:1], r"A_log: got shape \(1,\); accepted: shape \(2,\)"),
             ("A_log", a_log[None], r"A_log: got shape \(1, 2\)"),
             ("A_log", a_log.int(), "A_log: got torch.int32; accepted: torch.float16, torch.bfloat16, torch.float32"),
             ("dt_bias", dt_bias.float(), "dt_bias: got torch.float32; accepted: torch.bfloat16"),
             ("dt_bias", dt_bias.to("meta"), "dt_bias: got device meta")]
    for name, value, message in wrong:
        with pytest.raises(ValueError, match=message):
            fn(**{**args, name: value})
    zeros = fn(**{**args, "dt_bias": torch.zeros_like(dt_bias)})[0]
    assert torch.equal(fn(**{**args, "dt_bias": None})[0], zeros)
    assert not torch.equal(fn(**args)[0], zeros)


def test_no_copy_of_what_has_the_contracts_dtype(monkeypatch):
    fn, x = agrees("triton", NARROW, lengths=[5])
    args = [x[n][None] for n in ("q", "k", "v", "g", "beta")]
    space = fn.__globals__
    monkeypatch.setitem(space, "_plain", lambda x, dtype: pytest.fail(f"converted a tensor of {x.dtype}"))
    fn(*args, **x["more"])


def test_a_plain_module_knows_nothing_of_it():
    text = render(Build("triton"))
    own = text[:text.index("# --- host")] + text[text.index("# --- this module"):]
    assert "head_inputs" not in own and "A_log" not in own


@pytest.mark.slow
def test_command_line(capsys):
    small = ["--target", "triton", "--chunk", "32", "--head-dim-k", "32", "--head-dim-v", "32", "--quick"]
    assert main(["verify", *small, "--accept", FULL]) == 0
    assert "all comparisons hold" in capsys.readouterr().out
    assert main(["verify", *small, "--accept", "q=raw"]) == 2
    assert "accept: got q=raw; accepted for q: l2norm" in capsys.readouterr().err


@pytest.mark.slow
def test_through_the_front_door():
    """FLA's flags; bfloat16 numbers of a head are widened by the host where nothing says that they come so."""
    forms = {"beta": "twice_sigmoid", "g": "raw", "k": "l2norm", "q": "l2norm"}
    narrow = {"g": torch.bfloat16, "dt_bias": torch.bfloat16}
    x, read = passed(RAGGED, 1, 2, 32, 32, forms, narrow)
    ends = torch.tensor([0, 1, 18, 18, 83])
    o, S = chunk_gated_delta_rule(
        *(x[n][None] for n in ("q", "k", "v", "g", "beta")), initial_state=x["S"], output_final_state=True, cu_seqlens=ends,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        target="triton", chunk_size=32, **x["more"])
    want_o, want_S = expected(read)
    assert rms_error(o[0], want_o) < TOLERANCE["float16"] and rms_error(S, want_S) < TOLERANCE["float16"]
