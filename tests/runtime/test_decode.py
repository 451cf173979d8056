"""Decoding: a few new tokens a sequence from the state before them."""
import pytest
import torch
from reference import check, expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime import calls
from gdn_codegen.runtime.build import TARGETS
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import named

HERE = [t for t in TARGETS if runs(t, "cpu")]
NAMES = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("target", HERE)
def test_new_tokens_agree_with_the_recurrence(target, tokens):
    op = lambda *a, **o: recurrent_gated_delta_rule(*a, **o, target=target)
    check(op, problem([tokens] * 3, 1, 2, 32, 32, seed=tokens), batched=True)


@pytest.mark.parametrize("target", HERE)
def test_sequences_of_unlike_lengths(target):
    op = lambda *a, **o: recurrent_gated_delta_rule(*a, **o, target=target)
    check(op, problem([1, 0, 16, 3], 1, 2, 32, 32, seed=4))


@pytest.mark.parametrize("target", HERE)
def test_prefill_then_decode_is_one_prefill(target):
    """Split where chunks end and where they do not; the last step of one token and of several."""
    T, x = 40, problem([40], 1, 2, 32, 32, seed=3)
    want, S = expected(x)
    for at in ([33, 34, 40], [16, 32, 33], [24, 40]):
        state, outs, start = x["S"], [], 0
        for end in (*at, T) if at[-1] != T else at:
            part = [x[n][None, start:end] for n in NAMES]
            op = recurrent_gated_delta_rule if start else chunk_gated_delta_rule
            size = {} if start else {"chunk_size": 16}
            o, state = op(*part, scale=x["scale"], initial_state=state, output_final_state=True, target=target, **size)
            outs.append(o[0])
            start = end
        assert rms_error(torch.cat(outs), want) < 5e-3 and rms_error(state, S) < 5e-3, at


def test_more_tokens_than_a_step_takes():
    a = [problem([17], 1, 2, 32, 32)[n][None] for n in NAMES]
    with pytest.raises(ValueError, match=r"q: got T = 17; accepted: 1 to 16 tokens"):
        recurrent_gated_delta_rule(*a, target=HERE[0])
    with pytest.raises(ValueError, match=r"cu_seqlens: got a sequence of 17 tokens"):
        recurrent_gated_delta_rule(*a, cu_seqlens=torch.tensor([0, 17]), target=HERE[0])


def test_columns_are_split_until_walks_fill_the_gpu(monkeypatch):
    monkeypatch.setattr(calls, "units", lambda device: 132)
    plan = lambda walks, target="triton": calls.decode_plan(target, "cuda", walks, 128)
    assert [plan(n).v_block for n in (1, 32, 33, 64, 66, 132, 500)] == [32, 32, 32, 32, 64, 0, 0]
    assert plan(1, "pto") == plan(500) == named("fused") and plan(1).kernels == named("fused").kernels
    monkeypatch.setattr(calls, "units", lambda device: 0)
    assert plan(1) == named("fused")


@pytest.mark.parametrize("target", [t for t in HERE if t == "triton"])
def test_split_columns_compute_the_same(target):
    op = lambda *a, **o: recurrent_gated_delta_rule(*a, **o, target=target, schedule=calls._columns(named("fused"), 32))
    check(op, problem([3, 16], 1, 2, 32, 64))


def test_a_step_that_does_not_fit_in_one_kernel_runs_by_another_schedule(monkeypatch):
    monkeypatch.setattr(calls, "fits", lambda b: False)
    calls.forget()
    op = lambda *a, **o: recurrent_gated_delta_rule(*a, **o, target="triton" if "triton" in HERE else HERE[0])
    check(op, problem([2, 5], 1, 2, 32, 32))
    calls.forget()
