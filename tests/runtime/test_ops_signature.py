"""The package's ops as callers of FLA, vLLM, SGLang, transformers and sgl-kernel-npu call them."""
import inspect
from types import SimpleNamespace

import pytest
import torch
from reference import call, check, expected, problem, rms_error

import gdn_codegen
from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.call import normalise as arguments
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import named
from gdn_codegen.targets import OWN

TARGET = next(t for t in OWN if runs(t, "cpu"))
#: In order, as their sources have them: the issue's (FLA before 0.5), FLA 0.5.1's, sgl-kernel-npu f425bdf1's.
CHUNK = ("q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens head_first")
RECURRENT = ("q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias "
             "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens")
NPU = "q k v g beta scale initial_state output_final_state cu_seqlens head_first use_qk_l2norm_in_kernel"


@pytest.fixture
def tensors():
    x = problem([24], 1, 2, 32, 32)
    return x, [x[n][None] for n in ("q", "k", "v", "g", "beta")]


@pytest.fixture
def said(monkeypatch):
    """What a call comes to, recorded rather than run: tensors, Request and scale."""
    seen = []

    def serves(about, t, call):
        plan = SimpleNamespace(call=lambda given, numbers, *rest: seen.append((t, call.request, numbers[0])))
        tables = SimpleNamespace(scalars={"scale": None})
        return SimpleNamespace(HOST=SimpleNamespace(prepare=lambda *a: plan, tables=tables, numbers_of=lambda numbers: numbers,
                                                    results=lambda memory, wanted: (t.v, t.initial_state)))

    class Nothing(dict):
        def get(self, *a):
            return None

    monkeypatch.setattr(launch, "serves", serves)
    monkeypatch.setattr(launch, "_kept", Nothing())
    return seen


@pytest.mark.parametrize("name, order", [("chunk_gated_delta_rule", CHUNK), ("recurrent_gated_delta_rule", CHUNK),
                                         ("fused_recurrent_gated_delta_rule", RECURRENT), ("chunk_gated_delta_rule_npu", NPU)])
def test_order_of_positional_arguments(name, order):
    parameters = inspect.signature(getattr(gdn_codegen, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == order.split()
    assert [p.kind for p in parameters][-1] is inspect.Parameter.VAR_KEYWORD


def test_positional_calls(tensors):
    x, a = tensors
    want, S = expected(x)
    for cu in (None, torch.tensor([0, 24])):
        o, final = chunk_gated_delta_rule(*a, x["scale"], x["S"], True, False, cu, target=TARGET, chunk_size=16)
        assert rms_error(o[0], want) < 5e-3 and rms_error(final, S) < 5e-3
    assert chunk_gated_delta_rule(*a, target=TARGET, chunk_size=16)[1] is None


@pytest.mark.parametrize("layout, options", [("bhtd", dict(layout="bhtd")), ("bhtd", dict(layout="bnsd")),
                                             ("bhtd", dict(head_first=True)), ("bhtd", dict(layout="bnsd", head_first=True)),
                                             ("bthd", dict(layout="bsnd")), ("bthd", {})])
def test_layouts_by_all_their_names(layout, options):
    op = lambda *a, **o: chunk_gated_delta_rule(*a, **o, **options, target=TARGET, chunk_size=16)
    check(op, problem([9, 15], 1, 2, 32, 32), layout=layout)


HEADS = torch.zeros(2)
STATE = torch.zeros(1, 2, 32, 32)
POOL = torch.zeros(5, 2, 32, 32, dtype=torch.bfloat16)
SLOTS = torch.tensor([3])
SAME = {
    "raw gate": (dict(gate="raw", A_log=HEADS, dt_bias=HEADS), dict(use_gate_in_kernel=True, A_log=HEADS, dt_bias=HEADS)),
    "sigmoid": (dict(beta_form="sigmoid"), dict(use_beta_sigmoid_in_kernel=True)),
    "twice the sigmoid": (dict(beta_form="twice_sigmoid"), dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)),
    "V first": (dict(state_v_first=True), dict(transpose_state_layout=True)),
    "in place": (dict(initial_state=STATE, inplace_final_state=True), dict(initial_state=STATE, inplace_update=True)),
    "pool, vLLM": (dict(initial_state=POOL, state_indices=SLOTS), dict(initial_state=POOL, ssm_state_indices=SLOTS,
                                                                      inplace_final_state=True)),
    "pool, SGLang": (dict(initial_state=POOL, state_indices=SLOTS), dict(initial_state=POOL, initial_state_indices=SLOTS)),
    "gate not in kernel": ({}, dict(use_gate_in_kernel=False)),
    "nothing asked for": ({}, dict(cp_context=None, num_accepted_tokens=None, return_intermediate_states=False,
                                   cu_seqlens_cpu=None)),
}


@pytest.mark.parametrize("case", SAME)
def test_other_libraries_words_mean_ours(case, tensors, said):
    for options in SAME[case]:
        chunk_gated_delta_rule(*tensors[1], **options)
    (t, asked, scale), (t2, asked2, scale2) = said
    assert asked == asked2 and scale == scale2 and all(a is b for a, b in zip(t, t2, strict=True))
    assert SAME[case][0] == {} or asked != arguments.settled(
        arguments.Tensors(*tensors[1], *[None] * 10), arguments.Options(
            False, False, False, None, "log", "given", False, False, None, None, "auto", None))


def test_states_of_pools_are_in_place_and_in_the_pools_dtype(tensors, said):
    chunk_gated_delta_rule(*tensors[1], initial_state=POOL, state_indices=SLOTS)
    chunk_gated_delta_rule(*tensors[1], initial_state=POOL, state_indices=SLOTS, inplace_final_state=False)
    chunk_gated_delta_rule(*tensors[1], initial_state=POOL, state_indices=SLOTS, final_state=torch.zeros_like(POOL))
    chunk_gated_delta_rule(*tensors[1], output_final_state=True, state_dtype=torch.float16)
    assert [(w.in_place, w.state_dtype) for _, w, _ in said] == [(True, "bfloat16"), (False, "bfloat16"), (False, "bfloat16"),
                                                                (False, "float16")]
    with pytest.raises(ValueError, match=r"final_state: got torch\.float32; accepted: torch\.bfloat16, that of the pool"):
        chunk_gated_delta_rule(*tensors[1], initial_state=POOL, state_indices=SLOTS, final_state=STATE)


def test_a_refused_call_changes_no_later_one(tensors, said):
    """What is kept for calls that say the same is kept for good ones."""
    for _ in range(2):
        with pytest.raises(ValueError, match="gate: got 'tanh'"):
            chunk_gated_delta_rule(*tensors[1], gate="tanh")
        with pytest.raises(ValueError, match="chunk_size: got"):
            chunk_gated_delta_rule(*tensors[1], chunk_size=[64])
        chunk_gated_delta_rule(*tensors[1])
    assert len(said) == 2


def test_tables_of_chunks_may_come_and_must_agree(tensors, said):
    cu = torch.tensor([0, 20, 20, 24])
    indices = torch.tensor([[0, 0], [0, 1], [2, 0]])
    chunk_gated_delta_rule(*tensors[1], cu_seqlens=cu, chunk_indices=indices, chunk_offsets=torch.tensor([0, 2, 2, 3]))
    chunk_gated_delta_rule(*tensors[1], cu_seqlens=cu, chunk_size=16, chunk_indices=indices)
    with pytest.raises(ValueError, match=r"chunk_indices: got .*of 32 tokens"):
        chunk_gated_delta_rule(*tensors[1], cu_seqlens=cu, chunk_size=32, chunk_indices=indices)
    with pytest.raises(ValueError, match=r"chunk_offsets: got \[0, 2, 2, 4\]"):
        chunk_gated_delta_rule(*tensors[1], cu_seqlens=cu, chunk_offsets=torch.tensor([0, 2, 2, 4]))
    assert len(said) == 2


def test_npu_alias_gives_three_results(tensors):
    x, a = tensors
    want, S = expected(x)
    o, final, h = gdn_codegen.chunk_gated_delta_rule_npu(*a, x["scale"], x["S"], True, None, False, False, target=TARGET,
                                                         chunk_size=16)
    assert rms_error(o[0], want) < 5e-3 and rms_error(final, S) < 5e-3 and h is None
    assert gdn_codegen.chunk_gated_delta_rule_npu(*a, target=TARGET, chunk_size=16)[1] is not None


def test_fla_recurrent_without_gates_forgets_nothing():
    x = problem([7], 1, 2, 32, 32, gate=0.0, beta=1.0)
    want, S = expected(x)
    q, k, v = (x[n][None] for n in "qkv")
    o, final = gdn_codegen.fused_recurrent_gated_delta_rule(q, k, v, None, scale=x["scale"], initial_state=x["S"],
                                                            output_final_state=True, target=TARGET)
    assert rms_error(o[0], want) < 5e-3 and rms_error(final, S) < 5e-3


@pytest.mark.parametrize("lengths", [[40], [30, 2], [3, 2]])
def test_fla_recurrent_takes_any_number_of_tokens(lengths):
    op = lambda *a, **o: gdn_codegen.fused_recurrent_gated_delta_rule(*a[:4], beta=a[4], **o, target=TARGET)
    check(op, problem(lengths, 1, 2, 32, 32))


@pytest.mark.parametrize("layout, heads, tokens, step", [("bhtd", 8, 100, False), ("bhtd", 40, 9, True), ("bthd", 8, 100, False),
                                                         (None, 40, 9, True)])
def test_fla_recurrent_counts_tokens_by_their_layout(layout, heads, tokens, step, monkeypatch):
    told = []
    monkeypatch.setattr(gdn_codegen.ops, "_call", lambda *a, decode, **more: told.append(decode))
    q = torch.zeros((1, heads, tokens, 32) if layout == "bhtd" else (1, tokens, heads, 32))
    gdn_codegen.fused_recurrent_gated_delta_rule(q, q, q, q[..., 0], beta=q[..., 0], layout=layout)
    assert told == [step]


def test_a_schedule_of_ones_own(tensors):
    op = lambda *a, **o: chunk_gated_delta_rule(*a, **o, target=TARGET, chunk_size=16, schedule=named("replay"))
    assert rms_error(call(op, tensors[0])[0], expected(tensors[0])[0]) < 5e-3
