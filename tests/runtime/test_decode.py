"""Decoding: a few new tokens per sequence from the state before them."""
import pytest
import torch
from choices import a_call
from devices import H200, passes_for
from reference import check, expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose, choose_decode, launch, tables
from gdn_codegen.runtime.call.tables import DECODE, Extent, Row
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
NAMES = ("q", "k", "v", "g", "beta")


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("target", HERE)
def test_new_tokens_agree_with_the_recurrence(target, tokens):
    op = lambda *a, **o: recurrent_gated_delta_rule(*a, **o, target=target)
    check(op, problem([tokens] * 3, 1, 2, 32, 32, seed=tokens), batched=True)


@pytest.mark.slow
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


@pytest.mark.parametrize("target", [t for t in HERE if t == "triton"])
def test_split_columns_compute_the_same(target):
    op = lambda *a, **o: recurrent_gated_delta_rule(*a, **o, target=target, schedule=varied("fused", v_block=32))
    check(op, problem([3, 16], 1, 2, 32, 64))


def test_a_step_that_does_not_fit_in_one_kernel_runs_by_another_schedule(monkeypatch):
    monkeypatch.setattr(choose_decode, "choice", lambda call, on=None: None)
    launch.forget()
    op = lambda *a, **o: recurrent_gated_delta_rule(*a, **o, target="triton" if "triton" in HERE else HERE[0])
    check(op, problem([2, 5], 1, 2, 32, 32))
    launch.forget()


# --- which build serves a step ----------------------------------------------------------------------------------------
POOL = Contract.parse("beta=sigmoid,g=raw,state=vk/bfloat16/pool/in_place")
ABOUT = Build("triton", 16, dtype="bfloat16", contract=POOL)
MANY = Extent(16, 32, 256, 256)


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that passes for an H200 with both toolchains, and no rows but those that a test gives."""
    passes_for(monkeypatch, H200)
    there = ["triton", "tilelang"]
    monkeypatch.setattr(choose_decode, "runs", lambda target, device: target in there)
    rows = []
    monkeypatch.setattr(tables, "rows", lambda devices, table: tuple(r for r in rows if r.table == table))
    return rows, there


def ask(x=MANY, target="auto", contract=POOL, K=128, V=128, dtype=torch.bfloat16):
    found = choose_decode.choice(a_call(x, dtype, "cuda", (K, V), contract, target=target, decode=True))
    return found and found.build


def row(target, ms, extent=MANY, model_ms=0.4, contract=POOL, chunk=16, source=tables.PACKAGE, **fields):
    about = Build(target, chunk, schedule=varied("fused", **fields), dtype="bfloat16", contract=contract)
    return Row("NVIDIA H200", about, extent, ms, model_ms, source, "sm_90 x 132", DECODE)


def test_without_rows_the_model_prefers_tilelang_for_few_tokens_and_triton_for_more(gpu):
    _, there = gpu
    assert ask().target == "tilelang" and ask(target="triton").target == "triton"
    assert ask(Extent(16, 32, 256, 5 * 256)) == ABOUT
    there.remove("tilelang")
    assert ask().target == "triton"
    there[:] = ["tilelang"]
    assert ask(Extent(16, 32, 256, 5 * 256)).target == "tilelang"


@pytest.mark.parametrize("target, warps", [("triton", 1), ("tilelang", 0)])
@pytest.mark.parametrize("sequences, tokens, K, columns", [(256, 256, 128, 16), (256, 1024, 128, 16), (1, 1, 128, 8),
                                                           (256, 256, 256, 8)])
def test_few_tokens_are_chunks_of_one_token_of_a_state_as_it_lies(gpu, target, warps, sequences, tokens, K, columns):
    x = Extent(16, 32, sequences, tokens)
    for contract, wider in (POOL, 1), (Contract(), 2):  # in the order kv longer pieces
        b = ask(x, target=target, K=K, contract=contract)
        fields = {"v_block": columns * wider, "state_layout": contract.state_layout, "warps": warps}
        assert (b.chunk, b.plan) == (1, varied("fused", **fields)) and choose.fits(b)
    assert ask(Extent(16, 32, sequences, tokens * 5), target=target, K=K).chunk == (16 if tokens * 5 > 4 * sequences else 1)


@pytest.mark.parametrize("state, sequences, tokens, groups", [
    ("bfloat16/pool/in_place", 256, 256, "late"), ("bfloat16/pool/in_place", 256, 512, "early"), ("bfloat16", 2, 2, "early"),
    ("pool/in_place", 256, 256, "early"), ("vk/bfloat16/pool/in_place", 256, 256, "early"),
    ("bfloat16/pool/in_place/slots", 256, 256, "early")])
def test_groups_of_one_token_are_late_for_many_states_of_16_bits_in_the_order_kv(gpu, state, sequences, tokens, groups):
    b = ask(Extent(16, 32, sequences, tokens), target="tilelang", contract=Contract.parse(f"state={state}"))
    assert b.chunk == 1 and b.plan.token_groups == groups and choose.fits(b)
    b = ask(Extent(16, 32, sequences, tokens), target="triton", contract=Contract.parse(f"state={state}"))
    assert b.plan.token_groups == "early", "Triton's kernels have none"


def test_the_faster_of_both_targets_rows_serves_a_step(gpu):
    rows, there = gpu
    rows += [row("triton", 0.4), row("tilelang", 0.2, chunk=32, v_block=64, state_layout="vk")]
    assert ask() == rows[1].about and ask(target="triton") == rows[0].about
    rows[1] = row("tilelang", 0.5, chunk=32)
    assert ask() == rows[0].about
    there.remove("triton")
    assert ask() == rows[1].about


def test_rows_serve_steps_whose_states_lie_alike_whatever_their_gates(gpu):
    rows, _ = gpu
    rows.append(row("tilelang", 0.2, v_block=32))
    found = ask(contract=Contract.parse("state=vk/float16,k=unit"))
    assert found.target == "tilelang" and found.contract == Contract.parse("state=vk/float16") and found.plan.v_block == 32
    for other in ("state=vk", "state=bfloat16/pool"):
        assert ask(contract=Contract.parse(other)).chunk == 1, other  # the model's
    rows.append(row("triton", 0.3, contract=Contract.parse("state=vk/float16")))
    assert ask(contract=Contract.parse("state=vk/float16")).target == "triton"  # of the same contract


def test_rows_of_prefill_are_none_of_decoding_nor_these_of_prefill(gpu):
    rows, _ = gpu
    rows += [row("tilelang", 0.1), Row("NVIDIA H200", Build("tilelang", contract=POOL), MANY, 0.1, table="tilelang")]
    assert ask().chunk == 16
    near = tables.nearest(H200.names, Build("tilelang", dtype="bfloat16", contract=POOL), MANY.shape_class, None)
    assert [r.table for r in near] == ["tilelang"]


@pytest.mark.parametrize("far, serves", [(Extent(16, 32, 128, 128), True), (Extent(16, 16, 256, 256), True),
                                         (Extent(16, 32, 256, 512), True), (Extent(16, 32, 64, 64), False),
                                         (Extent(16, 32, 256, 1024), False)])
def test_rows_serve_their_class_of_shape_and_the_next(gpu, far, serves):
    rows, _ = gpu
    rows.append(row("tilelang", 0.1))
    assert (ask(far).chunk == 16) == serves


def test_a_row_that_does_not_fit_is_passed_over(gpu):
    rows, _ = gpu
    rows += [row("tilelang", 0.1, v_block=48), row("triton", 0.2, v_block=32)]
    assert ask() == rows[1].about


@pytest.mark.parametrize("target, K, V, wanted", [
    ("triton", 128, 128, [(1, 32), (32, 32), (33, 32), (64, 32), (66, 64), (132, 0), (500, 0)]),
    ("tilelang", 128, 128, [(1, 32), (500, 32)]), ("tilelang", 64, 64, [(1, 32), (66, 32), (132, 0)]),
    ("tilelang", 256, 256, [(1, 16), (500, 16)]), ("pto", 128, 128, [(1, 0), (500, 0)])])
def test_columns_are_split_until_walks_fill_the_gpu_and_registers_hold_them(target, K, V, wanted):
    b = Build(target, 16, head_dim_k=K, head_dim_v=V)
    assert [(n, next(choose_decode.columns(b, n, 132))) for n, _ in wanted] == wanted
    assert next(choose_decode.columns(b, 1, 0)) == 0


def test_tilelang_on_a_gpu_holds_a_state_as_it_lies(gpu):
    x = Extent(16, 32, 256, 5 * 256)
    assert ask(x, target="tilelang").plan == varied("fused", v_block=32, state_layout="vk")
    assert ask(x, target="tilelang", contract=Contract()).plan == varied("fused", v_block=32)
    assert ask(x, target="triton").plan == varied("fused")


@pytest.mark.slow
def test_the_models_first_plan_that_fits_is_taken(gpu):
    for K, V in ((96, 96), (256, 256), (36, 100)):
        for target in ("triton", "tilelang"):
            assert choose.fits(ask(target=target, K=K, V=V)), (target, K, V)


def test_a_target_that_there_is_not_is_refused(gpu):
    with pytest.raises(ValueError, match="target: got 'cuda'; accepted: auto"):
        ask(target="cuda")


def test_a_choice_is_printed_once_for_a_kind_of_step(gpu, monkeypatch, capsys):
    rows, _ = gpu
    rows.append(row("tilelang", 0.2, v_block=32))
    monkeypatch.setenv("GDN_DEBUG", "1")
    ask()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gdn_codegen: tilelang {rows[0].about.name}: chosen by table: the package's table of NVIDIA H200")
