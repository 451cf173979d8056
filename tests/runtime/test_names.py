"""Keywords of other libraries: docs/contract.md has each, and the ops do what it says."""
import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import expected, problem, rms_error
from torch._subclasses.fake_tensor import FakeTensorMode

import gdn_codegen
from gdn_codegen import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.call import foreign_keywords as names
from gdn_codegen.runtime.call.arguments import Options, Tensors
from gdn_codegen.runtime.call.known_keywords import spelled
from gdn_codegen.runtime.call.normalise import request_of
from gdn_codegen.runtime.call.request import Inputs, call_for
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"
HERE = dict(target=next(t for t in OWN if runs(t, "cpu")), chunk_size=16)
Q = torch.zeros(1, 20, 1, 32, dtype=torch.float16)
GIVEN = dict(q=Q, k=Q, v=Q, g=torch.zeros(1, 20, 1), beta=torch.zeros(1, 20, 1))
UNKNOWN = "keyword that this op does not know"
#: What the ops of each library take beside q, k and v, from their sources at the versions that the page names.
SIGNATURES = {
    "FLA": (
        "g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context chunk_size "
        "use_gate_in_kernel A_log dt_bias head_first transpose_state_layout gk gv g_gamma"),
    "FlashQLA": (
        "g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens head_first state_v_first "
        "auto_cp enable_fwd_cp_cache output_h"),
    "FlashInfer": (
        "g beta scale initial_state output_final_state cu_seqlens use_qk_l2norm_in_kernel output output_state "
        "state_checkpoints checkpoint_cu_starts checkpoint_every_n_tokens use_cp state_indices _cp_chunk_len state "
        "A_log a dt_bias b use_qk_l2norm initial_state_indices output_state_indices intermediate_states_buffer "
        "ssm_state_indices disable_state_update accepted_steps recovery_steps disable_output tile_v softplus_beta "
        "softplus_threshold initial_state_source"),
    "AITER": (
        "o g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens use_chunk_hip "
        "use_chunk_flydsl use_prepare_flydsl state_dtype use_exp2 num_decodes num_decode_tokens seq_lens_cpu "
        "prefill_metadata initial_state_indices inplace_final_state snapshot_dtype A_log a dt_bias softplus_beta "
        "softplus_threshold b initial_state_source threshold num_accepted_tokens is_kda core_attn_out"),
    "vLLM": (
        "g beta scale initial_state output_final_state cu_seqlens head_first use_qk_l2norm_in_kernel "
        "return_intermediate_states chunk_indices chunk_offsets core_attn_out inplace_final_state ssm_state_indices "
        "num_accepted_tokens retrieve_parent_token A_log a b dt_bias threshold is_kda ddtree_parent_ids "
        "has_initial_state softplus_beta softplus_threshold initial_state_source initial_state_indices"),
    "vLLM-Ascend": (
        "g beta scale initial_state output_final_state cu_seqlens prebuilt_meta head_first use_qk_l2norm_in_kernel "
        "chunk_indices chunk_offsets core_attn_out"),
    "SGLang": (
        "g beta scale initial_state initial_state_indices cu_seqlens head_first use_qk_l2norm_in_kernel inplace_update "
        "A_log a dt_bias softplus_beta softplus_threshold b initial_state_source is_kda lower_bound "
        "disable_state_update disable_output_calculation intermediate_states_buffer intermediate_state_indices "
        "cache_steps retrieve_parent_token rand_seed use_rs_rounding philox_rounds out accepted_steps cache_ring "
        "replayssm_rawv replayssm_rawk replayssm_g replayssm_beta output_final_state"),
    "sgl-kernel-npu": (
        "g beta scale initial_state output_final_state cu_seqlens head_first use_qk_l2norm_in_kernel A_log a dt_bias "
        "softplus_beta softplus_threshold b initial_state_source initial_state_indices is_kda"),
    "TensorRT-LLM": (
        "g beta scale initial_state initial_state_indices inplace_indexed_state_update output_final_state cu_seqlens "
        "head_first use_qk_l2norm_in_kernel output"),
    "transformers": (
        "g beta initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens use_cache position_ids seq_idx "
        "num_items_in_batch output_hidden_states output_attentions output_router_logits cu_seq_lens_q cu_seq_lens_k "
        "max_length_q max_length_k"),
}


def table():
    """Keyword -> whose, what happens to it here."""
    found = {}
    part = PAGE.read_text(encoding="ascii").split("## Names of other libraries")[1].split("### ")[0]
    for row in re.findall(r"^\| (`.*) \|$", part, re.MULTILINE):
        cells = row.split(" | ")
        for name in re.findall(r"`(\w+)`", cells[0]):
            assert name not in found, f"{name} twice"
            found[name] = cells[1], cells[2]
    return found


TABLE = table()


def own():
    t = Tensors(**GIVEN, **dict.fromkeys(Tensors._fields[5:15]))
    x = Options(False, False, False, None, "log", "given", False, False, None, None, "auto", None)
    return {**t._asdict(), **x._asdict()}


#: Keywords of our own that are translated like those of others (tests/runtime/test_positions.py, and below).
OURS = {"checkpoint_states", "max_seqlen"}


def test_the_page_has_every_keyword_and_no_other():
    assert set(TABLE) == {*names.ALIASES, *names.MEANT, *names.ONLY, *names.IGNORED} - OURS


@pytest.mark.parametrize("library", SIGNATURES)
def test_each_argument_of_others_is_ours_or_on_the_page(library):
    ours = {n for f in (chunk_gated_delta_rule, recurrent_gated_delta_rule) for n in inspect.signature(f).parameters}
    for name in SIGNATURES[library].split():
        assert name in ours or (name in TABLE and library in TABLE[name][0].split(", ")), name


def test_a_library_on_the_page_has_the_argument():
    for name, (whose, _) in TABLE.items():
        assert whose == "Triton's launches" or all(name in SIGNATURES[w].split() for w in whose.split(", ")), name


@pytest.mark.parametrize("name", TABLE)
def test_what_the_page_says_of_a_keyword_is_done(name):
    here, before = TABLE[name][1], own()
    if here.startswith("is "):
        ours, x = re.match(r"is `(\w+)`", here).group(1), torch.zeros(1)
        assert names.renamed(own(), {name: x}) == {**before, ours: x}
    elif here.startswith("ignored"):
        assert names.renamed(own(), {name: torch.zeros(1)}) == before
    elif here.startswith("only "):
        for x in re.match(r"only (\w+(?: or \w+)?)", here).group(1).split(" or "):
            assert names.renamed(own(), {name: ast.literal_eval(x)}) == before
        for x in (torch.zeros(1), True, 0.5):
            with pytest.raises(ValueError, match=rf"^{name}: got "):
                names.renamed(own(), {name: x})
    else:
        assert here.startswith("means ") and name in names.MEANT


STEPS = {"intermediate_states_buffer": torch.zeros(2, 5, 1, 32, 32)}
MEANT = {
    "use_gate_in_kernel": [({"gate": "raw", "A_log": Q}, {"A_log": Q}, True), ({}, {"A_log": Q, "dt_bias": Q}, False)],
    "use_beta_sigmoid_in_kernel": [({"beta_form": "sigmoid"}, {}, True), ({}, {}, False)],
    "state": [({"initial_state": Q, "inplace_final_state": True}, {}, Q), ({}, {}, None)],
    "disable_state_update": [({"inplace_final_state": False, "state_indices": Q}, {"state_indices": Q}, True), ({}, {}, False)],
    "core_attn_out": [({"out": Q}, {}, Q), ({}, {}, None)],
    "output_state_indices": [({"state_indices": Q}, {"state_indices": Q}, Q), ({}, {}, None)],
    "checkpoint_every_n_tokens": [({"checkpoint_chunks": 2}, {}, 128), ({}, {}, 0),
                                  ({"checkpoint_chunks": 3, "chunk_size": 32}, {"chunk_size": 32}, 96)],
    "cache_steps": [({}, {}, None), ({}, {}, 0), (STEPS, STEPS, 5)],
    "cu_seqlens_cpu": [({"cu_seqlens": torch.tensor([0, 20]), "longest": 20}, {"cu_seqlens": torch.tensor([0, 20])},
                        torch.tensor([0, 20])),
                       ({}, {}, None)],
    "max_length_q": [({"cu_seqlens": torch.tensor([0, 20]), "longest": 20}, {"cu_seqlens": torch.tensor([0, 20])}, 20),
                     ({}, {}, 20), ({}, {}, None)],
    "seq_idx": [({"cu_seqlens": Q}, {"cu_seqlens": Q}, Q), ({}, {}, None)],
}


@pytest.mark.parametrize("name", MEANT)
def test_what_is_more_than_a_name(name):
    for want, said, x in MEANT[name]:
        got, want = names.renamed({**own(), **said}, {name: x}), {**own(), **want}
        assert all(torch.equal(got[n], y) if isinstance(y, torch.Tensor) else got[n] is y or got[n] == y for n, y in want.items())


@pytest.mark.parametrize("keyword", names.LENGTHS)
def test_keywords_say_how_long_the_longest_sequence_is(keyword):
    """In each call, also in those whose keywords were seen before, and nowhere else. Results have the same bits on a CPU."""
    x = {n: y.repeat(1, 3, *[1] * (y.ndim - 2))[:, :40] for n, y in GIVEN.items()}
    seen = []
    for ends in ([0, 30, 40], [0, 30, 40], [0, 20, 40], [0, 2, 40], [0, 40, 40]):
        cu = torch.tensor(ends)
        more = {keyword: cu.clone() if keyword == "cu_seqlens_cpu" else int(cu.diff().max())}
        t, options = Tensors(*map(x.get, Tensors._fields))._replace(cu_seqlens=cu), Options(*[None] * len(Options._fields))
        said, found = spelled(tuple(t), tuple(options._replace(longest=0)), more)
        seen.append(Options(*found).longest)
        assert len(said) == len(Tensors._fields) and said[0] is x["q"]
        got = chunk_gated_delta_rule(**x, cu_seqlens=cu, **more)
        assert torch.equal(got[0], chunk_gated_delta_rule(**x, cu_seqlens=cu)[0])
    assert seen == [30, 30, 20, 40, 40]
    for n, rounded in ((0, 0), (1, 1), (15, 15), (17, 18), (4097, 4608)):  # four binary digits
        cu = torch.tensor([0, n])
        assert names.longest(keyword, cu.clone() if keyword == "cu_seqlens_cpu" else n, cu) == rounded


@pytest.mark.parametrize("others", [
    {"max_seqlen": 24, "cu_seqlens_cpu": (0, 20, 24)}, {"cu_seqlens_cpu": (0, 20, 24), "max_seqlen": 24},
    {"max_seqlen": np.int64(20)}, {"max_length_q": 20, "max_seqlen": 100}])
def test_of_several_keywords_about_lengths_that_counts_which_says_least(others):
    others = {n: torch.tensor(y) if isinstance(y, tuple) else y for n, y in others.items()}
    assert names.renamed({**own(), "cu_seqlens": torch.tensor([0, 20, 24])}, others)["longest"] == 20


def test_a_bound_of_the_longest_sequence_is_no_more_than_all_tokens():
    """Models pass their longest context."""
    t = Tensors(**GIVEN, **dict.fromkeys(Tensors._fields[5:15]))._replace(cu_seqlens=torch.tensor([0, 9, 20]))
    x = Options(**{n: own()[n] for n in Options._fields} | {"longest": 4096})
    about = Inputs(t[:5], (), (), torch.float16, (32, 32), (1, 1), (1, 20))
    assert call_for(about, t, request_of(t, x)).extent.longest == 20
    assert call_for(about, t, request_of(t, x._replace(batch_invariant=True))).extent.longest == 0


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, gdn_codegen.chunk_delta_rule, gdn_codegen.chunk_gated_delta_product])
def test_lengths_beside_another_name_of_cu_seqlens(op):
    """In a call that comes again, too. A product of several steps for each token counts tokens by either name."""
    cu, steps = torch.tensor([0, 13, 20]), {}
    x = {n: y for n, y in GIVEN.items() if op is not gdn_codegen.chunk_delta_rule or n != "g"}
    if op is gdn_codegen.chunk_gated_delta_product:
        x, steps = {n: y if n in ("q", "g") else y.repeat_interleave(2, 1) for n, y in x.items()}, {"num_householder": 2}
    x = {n: torch.randn(y.shape).to(y.dtype) if n != "g" else y for n, y in x.items()}
    want = op(**x, **steps, cu_seqlens=cu, use_qk_l2norm_in_kernel=True)[0]
    for more in ({}, {"max_seqlen": 13}, {"max_length_q": 14}, {"cu_seqlens_cpu": cu.clone()}):
        for _ in range(2):
            assert torch.equal(op(**x, **steps, cu_seq_lens_q=cu, use_qk_l2norm_in_kernel=True, **more)[0], want)
    for name in ("max_seqlen", "max_length_q"):
        with pytest.raises(ValueError, match=f"^{name}: got 12; accepted: at least 13"):
            op(**x, **steps, cu_seq_lens_q=cu, use_qk_l2norm_in_kernel=True, **{name: 12})


def test_other_names_mean_the_same_to_a_product():
    """It counts steps, so it has to know which arguments count tokens."""
    op, x = gdn_codegen.chunk_gated_delta_product, {n: torch.randn(y.shape).to(y.dtype) for n, y in GIVEN.items() if n in "qkv"}
    x = {n: y if n == "q" else y.repeat_interleave(2, 1) for n, y in x.items()} | {"g": GIVEN["g"], "beta": torch.rand(1, 40, 1)}
    out, want = torch.empty(1, 20, 1, 32, dtype=torch.float16), op(**x, num_householder=2, use_qk_l2norm=True)[0]
    assert op(**x, num_householder=2, use_qk_l2norm=True, output=out)[0] is out and torch.equal(out, want)
    with pytest.raises(ValueError, match=r"^state_indices: got rank 2; accepted: rank 1"):
        op(**x, num_householder=2, initial_state=torch.zeros(4, 1, 32, 32), ssm_state_indices=torch.zeros(1, 20).int())
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got both"):
        op(**x, num_householder=2, cu_seqlens=torch.tensor([0, 20]), cu_seq_lens_q=torch.tensor([0, 20]))


def test_a_fake_tensor_outside_its_mode_is_not_read():
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(y) for n, y in GIVEN.items()}, mode.from_tensor(torch.tensor([0, 13, 20]))
    for more in ({"max_seqlen": 13}, {"cu_seqlens_cpu": fake[1]}):
        assert chunk_gated_delta_rule(**fake[0], cu_seqlens=fake[1], **more)[0].shape == GIVEN["v"].shape


def test_what_is_wrong_with_cu_seqlens_is_said_of_it():
    for cu in ([0, 20], torch.tensor([0, 20]).to_sparse()):
        with pytest.raises(ValueError, match=r"^cu_seqlens: got"):
            chunk_gated_delta_rule(**GIVEN, cu_seqlens=cu, max_seqlen=20)


def test_a_bound_that_is_computed_does_not_stop_an_export():
    class Layer(torch.nn.Module):
        def forward(self, cu):
            return chunk_gated_delta_rule(**GIVEN, cu_seqlens=cu, max_seqlen=cu.diff().max().item())[0]
    cu = torch.tensor([0, 13, 20])
    assert torch.equal(torch.export.export(Layer(), (cu,)).module()(cu), Layer()(cu))


def test_a_length_in_a_tensor_is_not_read():
    """transformers has one on the device."""
    for cu in (torch.tensor([0, 20]), None):
        before = {**own(), "cu_seqlens": cu}
        assert names.renamed(dict(before), {"max_length_q": torch.empty((), device="meta")}) == before


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_what_follows_from_another_argument_is_no_keyword(op):
    with pytest.raises(ValueError, match=rf"^longest: got a {UNKNOWN}"):
        op(**{n: x[:, :9] for n, x in GIVEN.items()}, longest=9)


def test_each_that_means_something_is_tried():
    assert set(MEANT) == set(names.MEANT) - OURS


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule,
                                gdn_codegen.chunk_gated_delta_rule_npu])
def test_every_op_refuses_what_nobody_knows_and_what_is_misspelt(op):
    given = {n: x[:, :9] for n, x in GIVEN.items()}
    for name, meant in (("inital_state", "initial_state"), ("chunk", "chunk_size"), ("ssm_state_indicies", "ssm_state_indices"),
                        ("scael", "scale")):
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"^{name}: got a {UNKNOWN}; .*; did you mean {meant}\?$"):
                op(**given, **{name: None})
    with pytest.raises(ValueError, match=rf"^colour: got a {UNKNOWN}; accepted: those of docs/contract\.md$"):
        op(**given, colour=None)


@pytest.fixture
def pool():
    """A problem of three sequences in slots of a pool, what is passed, and what is expected."""
    x = problem([9, 4, 12], 1, 2, 32, 32, seed=5)
    slots, states = torch.tensor([4, 1, 2]), torch.randn(6, 2, 32, 32, generator=torch.Generator().manual_seed(1))
    states[slots] = x["S"]
    given = {n: x[n][None] for n in ("q", "k", "v", "g", "beta")}
    return dict(given, scale=x["scale"], cu_seqlens=torch.tensor([0, 9, 13, 25])), slots, states, expected(x)


@pytest.mark.parametrize("words", [
    dict(initial_state="S", state_indices="slots"), dict(initial_state="S", ssm_state_indices="slots"),
    dict(initial_state_source="S", initial_state_indices="slots", is_kda=False, lower_bound=None, disable_state_update=False),
    dict(initial_state="S", state_indices="slots", output_state="S", output_final_state=True, output_state_indices="slots"),
    dict(initial_state="S", initial_state_indices="slots", inplace_final_state=True, output_final_state=True)],
    ids=["ours", "vLLM", "SGLang", "FlashInfer", "AITER"])
def test_a_pool_is_written_in_place_unless_said(words, pool):
    given, slots, states, (o, final) = pool
    said = lambda: {n: dict(S=states, slots=slots).get(x, x) if isinstance(x, str) else x for n, x in words.items()}
    before = states.clone()
    got, returned = chunk_gated_delta_rule(**given, **HERE, **said())
    assert returned is states and rms_error(got[0], o) < 5e-3 and rms_error(states[slots], final) < 5e-3
    rest = [0, 3, 5]
    assert torch.equal(states[rest], before[rest])


@pytest.mark.parametrize("leave", [dict(inplace_final_state=False), dict(disable_state_update=True), dict(inplace_update=False)])
def test_a_pool_is_left_alone_where_that_is_said(leave, pool):
    given, slots, states, (o, final) = pool
    before = states.clone()
    given.update(HERE, initial_state=states, state_indices=slots, **leave)
    for _ in range(3):
        got, returned = chunk_gated_delta_rule(**given)
        assert returned is None and torch.equal(states, before) and rms_error(got[0], o) < 5e-3
    dense = chunk_gated_delta_rule(**given, output_final_state=True)[1]
    assert torch.equal(states, before) and rms_error(dense, final) < 5e-3


@pytest.mark.parametrize("name, buffer", [("output", None), ("o", None), ("core_attn_out", None), ("core_attn_out", (25, 2, 32)),
                                          ("core_attn_out", (40, 2, 32)), ("core_attn_out", (2000,))])
def test_o_is_written_where_others_say(name, buffer, pool):
    given, _, _, _ = pool
    whole = torch.full(buffer or given["v"].shape, float("nan"), dtype=torch.float16)
    want = chunk_gated_delta_rule(**given, **HERE)[0]
    got = chunk_gated_delta_rule(**given, **HERE, **{name: whole})[0]
    n = want.numel()
    assert got.data_ptr() == whole.data_ptr() and torch.equal(whole.flatten()[:n], want.flatten())
    assert bool(whole.flatten()[n:].isnan().all())


def test_a_checkpoint_every_so_many_tokens(pool):
    given, *_ = pool
    given.pop("cu_seqlens")
    *_, want = chunk_gated_delta_rule(**given, **HERE, checkpoint_chunks=1)
    *_, got = chunk_gated_delta_rule(**given, **HERE, checkpoint_every_n_tokens=16)
    assert torch.equal(got, want) and len(got) == 1
    with pytest.raises(ValueError, match="checkpoint_every_n_tokens: got 16; accepted: no value, because only chunk_gated"):
        recurrent_gated_delta_rule(**given, target=HERE["target"], checkpoint_every_n_tokens=16)


def test_gates_that_are_not_for_this_call_are_left_out(pool):
    """FLA's layers pass A_log and dt_bias always, and say by a flag what they are for."""
    given, *_ = pool
    raw = dict(A_log=torch.rand(2), dt_bias=torch.rand(2))
    want = chunk_gated_delta_rule(**given, **HERE)[0]
    assert torch.equal(chunk_gated_delta_rule(**given, **HERE, **raw, use_gate_in_kernel=False)[0], want)
    assert torch.equal(fused_recurrent_gated_delta_rule(**given, **HERE, **raw)[0], want)
    with pytest.raises(ValueError, match="A_log: got a value with gate='log'"):
        chunk_gated_delta_rule(**given, **HERE, **raw)
    with_gate = chunk_gated_delta_rule(**given, **HERE, **raw, gate="raw")[0]
    assert not torch.equal(with_gate, want)
    for said in (dict(use_gate_in_kernel=True), dict(gate="raw")):
        assert torch.equal(fused_recurrent_gated_delta_rule(**given, **HERE, **raw, **said)[0], with_gate)


def test_keywords_are_translated_anew_where_they_are_not_the_same():
    """What was accepted before does not stand for a value that only equals it, other options, or other tensors."""
    t, x = Tensors(*[Q] * 5, *[None] * (len(Tensors._fields) - 5)), Options(
        False, False, False, None, "log", "given", False, False, None, None, "auto", None)
    gates = t._replace(A_log=Q, dt_bias=Q)
    for _ in range(2):
        assert spelled(gates, x, dict(use_gate_in_kernel=True)) == (gates, x._replace(gate="raw"))
        assert spelled(t, x, dict(transpose_state_layout=True, num_warps=4)) == (t, x._replace(state_v_first=True))
        with pytest.raises(ValueError, match="use_gate_in_kernel: got 1"):
            spelled(gates, x, dict(use_gate_in_kernel=1))
        with pytest.raises(ValueError, match="use_gate_in_kernel: got True with gate='linear'"):
            spelled(gates, x._replace(gate="linear"), dict(use_gate_in_kernel=True))
        without = spelled(gates, x, dict(use_gate_in_kernel=False))
        assert without == (gates._replace(A_log=None, dt_bias=None), x)
        assert Tensors(*spelled(t, x, dict(output=Q))[0]).out is Q
        with pytest.raises(ValueError, match="seq_idx"):
            spelled(t, x, dict(seq_idx=1))
        with pytest.raises(ValueError, match="checkpoint_every_n_tokens"):
            spelled(t, x, dict(checkpoint_every_n_tokens=64), -1)
        assert Options(*spelled(t, x, dict(checkpoint_every_n_tokens=64), 16)[1]).checkpoint_chunks == 4
