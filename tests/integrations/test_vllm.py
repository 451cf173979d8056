"""The plug-in for vLLM, with a stub of vLLM's package (stub_of_vllm.py), beside token recurrences in float64."""
import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import stub_of_kimi as kimi
import stub_of_vllm as stub
import torch
from vllm_batches import (
    HV,
    KDA,
    NAN,
    OPS,
    QWEN,
    Batch,
    H,
    K,
    OfKda,
    OfKimi,
    V,
    check,
    column,
    ints,
    near,
    of_checkpoints,
    of_prompts,
    order,
    pool,
    served,
    stubbed,  # noqa: F401, the fixture vllm
)

from gdn_codegen import integrations
from gdn_codegen.integrations import vllm as plugin
from gdn_codegen.integrations.vllm import kda, layers, sites
from gdn_codegen.runtime.call import launch

sys.path.insert(0, str(Path(__file__).parents[1] / "family"))
import features


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_prompts_new_and_in_parts(vllm, state):
    batch = Batch(vllm(), [37, 0, 20, 5], state=state)
    batch.pool[[3, 7]] = NAN  # what other layers left in a block
    want = batch.states([None, None, 5, None])
    batch.run(**of_prompts([37, 0, 20, 5], column(3, 4, 5, 7), [False, True, True, False]))
    check(batch, want, [3, 4, 5, 7])
    assert served("prefill")
    # the next part of the first prompt, from the state that its first part left; metadata as at 00545a8a
    rest = Batch(sys.modules[QWEN], [9])
    rest.layer.load_state_dict(batch.layer.state_dict())
    rest.pool[3] = batch.pool[3].float()
    want = rest.states([3])
    rest.run(older=True, **of_prompts([9], column(3), [True]))
    check(rest, want, [3])


def test_prompts_with_equal_keys_and_decodes_in_one_batch(vllm):
    lengths = [1, 1, 21, 6]
    batch = Batch(vllm(), lengths)
    batch.x[:, H * K:2 * H * K] = batch.x[:1, H * K:2 * H * K]
    batch.pool[2] = NAN
    want = batch.states([4, 6, 1, None])
    batch.run(**of_prompts(lengths, column(4, 6, 1, 2), [True, True, True, False], decodes=2))
    check(batch, want, [4, 6, 1, 2])
    assert served("prefill") and served("fused_sigmoid_gating_delta_rule_update")


def test_the_op_learns_how_long_the_longest_prompt_is(vllm, monkeypatch):
    """By the table on the host that vLLM has for the convolution: in the layer's prefill, and where an op gets tensors of the
    batch's metadata. Elsewhere, and where there is no such table, it does not."""
    lengths, found = [1, 9, 21], []
    batch, kda_batch = Batch(vllm(), lengths), OfKda(vllm(KDA), lengths)

    def seen(module, name):
        ours = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: found.append(k["max_seqlen"]) or ours(*a, **k))
    seen(layers.ops, "chunk_gated_delta_rule")
    seen(kda.channels, "chunk_kda")
    about, op = of_prompts(lengths, column(4, 6, 1), [True] * 3, decodes=1), importlib.import_module(f"{OPS}.chunk")
    batch.run(**about)
    want = kda_batch.states([4, 6, 1])
    kda_batch.run(**about)
    check(kda_batch, want, [4, 6, 1], most=1e-2)
    assert found == [24, 24]
    seen(sites.ops, "chunk_gated_delta_rule")
    x = torch.zeros(1, 31, HV, K)
    named = dict(q=x, k=x, v=x, g=-torch.rand(1, 31, HV), beta=torch.rand(1, 31, HV), initial_state=torch.zeros(3, HV, V, K),
                 output_final_state=True)
    about["prefill_query_start_loc"] = about["non_spec_query_start_loc"]  # as with drafts, where decodes are prompts
    stub.CONTEXT.attn_metadata = {"other": SimpleNamespace(), "layer": SimpleNamespace(**about)}
    for ends in (about["prefill_query_start_loc"], ints(0, 1, 10, 31)):
        op.chunk_gated_delta_rule(**named, cu_seqlens=ends)
    for changed in (dict(nums_dict=None), dict(nums_dict={8: {"nums": torch.ones(3, device="meta")}}),
                    dict(nums_dict={8: {}}), dict(nums_dict={})):
        stub.CONTEXT.attn_metadata = {"layer": SimpleNamespace(**about | changed)}
        op.chunk_gated_delta_rule(**named, cu_seqlens=about["prefill_query_start_loc"])
    stub.CONTEXT.attn_metadata = None
    op.chunk_gated_delta_rule(**named, cu_seqlens=about["prefill_query_start_loc"])
    assert found[2:] == [24, *[None] * 6] and "left to the host" not in integrations.report()


@pytest.mark.parametrize("whose", ["ours", "the host's"])
def test_checkpoints_of_prompts(vllm, whose, monkeypatch):
    """States after 128 and 64 tokens, and the convolution's windows there; by vLLM's functions where our op refuses."""
    lengths, slots, offsets, at = [1, 150, 20, 70], column(4, 3, 5, 7), [0, 128, 0, 64], [0, 9, 0, 11]
    batch = Batch(vllm(), lengths, flashinfer=True)
    if whose != "ours":
        refuse = lambda *args, **kwargs: (_ for _ in ()).throw(ValueError("q: got this; accepted: that"))
        monkeypatch.setattr(layers, "ops", SimpleNamespace(chunk_gated_delta_rule=refuse))
    batch.pool[[9, 11]] = NAN
    want, before = batch.states([4, None, 5, None]), batch.pool.clone()
    batch.run(**of_checkpoints(lengths, slots, [True, False, True, False], 1, offsets, at))
    check(batch, want, [4, 3, 5, 7])
    ends, windows = [0, 1, 151, 171, 241], batch.layer.kv_cache[0]
    for n, slot in ((1, 9), (3, 11)):
        near(batch.pool[slot], want[n][offsets[n] - 1][1])
        assert torch.equal(windows[slot], batch.x[ends[n] + offsets[n] - 3:ends[n] + offsets[n]].float())
    others = [1, 2, 6, 8, 10]
    assert torch.equal(batch.pool[others], before[others]) and not windows[[0, *others]].any()
    assert served("prefill") if whose == "ours" else "prefill: left to the host (q: got this" in integrations.report("vllm")


@pytest.mark.parametrize("packed", [True, False])
def test_decodes_in_a_padded_graph_batch(vllm, packed):
    batch = Batch(vllm(), [1, 1, 1], rows=6)
    batch.layer.enable_packed_recurrent_decode = packed
    for step in range(2):
        want, before = batch.states([5, 1, 8]), batch.pool.clone()
        batch.out.fill_(NAN)
        batch.run(num_decodes=3, num_decode_tokens=3, non_spec_state_indices_tensor=ints(5, 1, 8, 0, -1 if packed else 0, 0, 0),
                  non_spec_query_start_loc=ints(0, 1, 2, 3, 3, 3, 3))
        check(batch, want, [5, 1, 8])
        assert not batch.out[3:].any(), "rows of the null block are zero"
        others = [n for n in range(12) if n not in (5, 1, 8)]
        assert torch.equal(batch.pool[others].nan_to_num(-1), before[others].nan_to_num(-1)), step
    assert served("fused_recurrent_gated_delta_rule_packed_decode" if packed else "fused_sigmoid_gating_delta_rule_update")


def test_draft_tokens_in_a_padded_graph_batch(vllm):
    batch = Batch(vllm(), [3, 2], rows=7)
    slots = [[1, 4, 2], [6, 9, 3]]
    want, before = batch.states([4, 6]), batch.pool.clone()
    batch.run(num_spec_decodes=2, num_spec_decode_tokens=5, spec_sequence_masks=torch.tensor([True, True, False]),
              spec_state_indices_tensor=ints(*slots, [0, 0, 0], [0, 0, 0]), spec_query_start_loc=ints(0, 3, 5, 5, 5),
              num_accepted_tokens=ints(2, 1, 1, 1))
    check(batch, want, slots, all_states=True)
    others = [0, 3, 5, 7, 8, 10, 11]
    assert torch.equal(batch.pool[others].nan_to_num(-1), before[others].nan_to_num(-1))
    assert served("fused_sigmoid_gating_delta_rule_update") and not batch.out[5:].any()


@pytest.mark.parametrize("flashinfer", [True, False])
def test_draft_tokens_beside_prompts(vllm, flashinfer):
    lengths = [2, 13]
    batch = Batch(vllm(), lengths, flashinfer=flashinfer)
    want = batch.states([6, None])
    ends = ints(0, 13)
    batch.run(num_spec_decodes=1, num_spec_decode_tokens=2, num_prefills=1, num_prefill_tokens=13,
              spec_sequence_masks=torch.tensor([True, False]), spec_state_indices_tensor=ints([6, 2]),
              spec_query_start_loc=ints(0, 2), num_accepted_tokens=ints(1), spec_token_indx=torch.arange(2),
              non_spec_token_indx=torch.arange(2, 15), non_spec_query_start_loc=ends, non_spec_state_indices_tensor=column(3),
              has_initial_state=torch.tensor([False]), prefill_query_start_loc=ends, prefill_state_indices=column(3),
              prefill_has_initial_state=torch.tensor([False]))
    check(batch, want, [2, 3])
    assert served("ChunkGatedDeltaRule.forward_cuda" if flashinfer else "chunk_gated_delta_rule")


def test_an_older_version_s_decodes(vllm, monkeypatch):
    """`fused_recurrent_gated_delta_rule` with computed gates, and states [K, V]."""
    vllm()
    order(monkeypatch, 16, 32)
    op = importlib.import_module(f"{OPS}.fused_recurrent").fused_recurrent_gated_delta_rule
    q, k, v = (torch.randn(1, 3, HV, n).bfloat16() for n in (K, K, V))
    g, beta, held = -torch.rand(1, 3, HV), torch.rand(1, 3, HV), pool(6)
    want = [stub.walk(q[0, s], k[0, s], v[0, s], g[0, s], beta[0, s], K ** -0.5, held[n].mT, True)
            for n, s in ((4, slice(0, 2)), (2, slice(2, 3)))]
    o, _ = op(q, k, v, g, beta, None, held, True, ints(0, 2, 3), ints([1, 4, 0], [2, 0, 0], [0, 0, 0]), ints(2, 1, 1), True)
    near(o[0], [row for tokens in want for row, _ in tokens])
    for slot, S in ((1, want[0][0][1]), (4, want[0][1][1]), (2, want[1][0][1])):
        near(held[slot].mT, S)
    assert served("fused_recurrent_gated_delta_rule")
    op(q, k, v, g, beta, initial_state=held, inplace_final_state=True, cu_seqlens=ints(0, 2, 3), ssm_state_indices=ints(4, 2))
    with pytest.raises(AssertionError):  # the stub's
        op(q, k, v, g, beta, initial_state=held, inplace_final_state=False, cu_seqlens=ints(0, 3), ssm_state_indices=ints(4))
    assert "left to the host (inplace_final_state: got False; accepted: True: vLLM" in integrations.report()


def test_no_value_is_read(vllm):
    """So that a CUDA graph can capture every call."""
    vllm()
    prompts, decodes, drafts = (Batch(sys.modules[QWEN], lengths) for lengths in ([1, 9, 4], [1, 1, 1], [2, 2]))
    kda = OfKda(vllm(KDA), [1, 1])
    of_drafts = dict(num_spec_decodes=2, num_spec_decode_tokens=4, spec_sequence_masks=torch.tensor([True, True]),
                     spec_state_indices_tensor=ints([1, 4], [6, 9]), spec_query_start_loc=ints(0, 2, 4),
                     num_accepted_tokens=ints(2, 1))
    of_decodes = dict(num_decodes=3, num_decode_tokens=3, non_spec_state_indices_tensor=ints(5, 1, 0, 0))
    of_mixed = of_prompts([1, 9, 4], column(5, 3, 2), [True, True, False], decodes=1)
    late = Batch(sys.modules[QWEN], [1, 70], flashinfer=True)
    late.layer._checkpoint_exporter = SimpleNamespace(export=lambda *args, **named: None)
    of_late = of_checkpoints([1, 70], column(5, 3), [True, False], 1, [0, 64], [0, 9])
    raw, of_kimi = OfKimi([1, 1]), importlib.import_module(kimi.KIMI)
    gates, final = dict(A_log=raw.A_log, dt_bias=raw.bias, lower_bound=-5.0), raw.pool[:1].clone()
    flash, more = importlib.import_module(plugin.FLASHKDA)._flashkda_prefill, OfKimi([20])
    for _ in features.rounds_of_capture():
        late.run(**of_late)
        of_kimi.fused_recurrent_kda_packed_decode(mixed_qkv=raw.packed, raw_g=raw.g, raw_beta=raw.beta, **gates,
                                                  initial_state=raw.pool, state_indices=ints(3, 0))
        flash(q=more.q, k=more.k, v=more.v, g=more.g, beta=more.beta, **gates, initial_state=more.pool[1:2], out=more.out,
              cu_seqlens=ints(0, 20), final_state=final, workspace=None, checkpoint_state=final.clone(),
              checkpoint_offsets=ints(16))
        prompts.run(**of_mixed)
        decodes.run(**of_decodes)
        drafts.run(**of_drafts)
        kda.run(num_prefills=0, num_decodes=2, non_spec_query_start_loc=ints(0, 1, 2), non_spec_state_indices_tensor=ints(3, 0))
    assert all(map(served, ("prefill", "fused_recurrent_kda", "fused_recurrent_gated_delta_rule_packed_decode",
                            "fused_recurrent_kda_packed_decode", "_flashkda_prefill")))


@pytest.mark.parametrize("exports", [False, True])
def test_the_profile_run_builds_what_prompts_take(vllm, exports, monkeypatch):
    """exports: also with a checkpoint, where the layer has some."""
    batch, built = Batch(vllm(), [70], flashinfer=exports), []
    batch.layer.kv_cache, caches = None, batch.layer.kv_cache
    monkeypatch.setattr(batch.layer, "get_state_dtype", lambda: (torch.bfloat16, torch.float32))
    own = launch.module
    monkeypatch.setattr(launch, "module", lambda b: built.append(b) or own(b))
    launch.forget()
    stub.CONTEXT.attn_metadata = None
    for _ in range(2):
        batch.layer._forward_core(batch.x, batch.b, batch.a, batch.out)
    assert batch.layer.warmed_up and batch.out.isnan().all() and len(built) == (4 if exports else 2), "64 and 70 tokens"
    batch.layer.kv_cache, before = caches, set(built)
    batch.run(**of_prompts([70], column(3), [True]))
    if exports:
        batch.run(**of_checkpoints([70], column(3), [True], 0, [64], [5]))
    assert served("prefill") and set(built) == before


def test_what_our_op_refuses_is_left_to_the_host(vllm, monkeypatch):
    module = vllm()

    def refuse(*args, **kwargs):
        raise ValueError("q: got this; accepted: that")
    monkeypatch.setattr(layers, "ops", SimpleNamespace(chunk_gated_delta_rule=refuse))
    monkeypatch.setattr(sites, "ops", SimpleNamespace(chunk_gated_delta_rule=refuse, recurrent_gated_delta_rule=refuse))
    batch = Batch(module, [1, 1, 21, 5])
    batch.pool[3] = NAN
    want = batch.states([6, 7, None, 4])
    batch.run(**of_prompts([1, 1, 21, 5], column(6, 7, 3, 4), [True, True, False, True], decodes=2))
    check(batch, want, [6, 7, 3, 4])
    batch = Batch(module, [1, 1], rows=3)
    want = batch.states([6, 3])
    batch.run(num_decodes=2, num_decode_tokens=2, non_spec_state_indices_tensor=ints(6, 3, 0))
    check(batch, want, [6, 3])
    assert integrations.report("vllm").count("left to the host (q: got this; accepted: that): 1") == 4


def test_a_layer_that_names_more_keeps_its_method(vllm, monkeypatch, capfd):
    monkeypatch.setenv("GDN_DEBUG", "1")
    monkeypatch.setattr(layers, "KNOWN", layers.KNOWN - {"num_spec_decodes"})
    batch = Batch(vllm(), [9])
    want = batch.states([None])
    batch.run(**of_prompts([9], column(3), [False]))
    check(batch, want, [3])
    assert served("chunk_gated_delta_rule") and "prefill" not in integrations.report()
    assert "is not replaced as a whole, its op is (unknown: num_spec_decodes)" in capfd.readouterr().err


def test_the_order_of_states_is_asked_of_vllm(vllm, monkeypatch):
    vllm()
    assert sites.v_first() is True
    order(monkeypatch, 16, 32)
    assert sites.v_first() is False
    order(monkeypatch, 5, 7)
    with pytest.raises(ValueError, match=r"initial_state: got an unknown order, \(5, 7\)"):
        sites.v_first()


def of_old(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, head_first=False,
           use_qk_l2norm_in_kernel=False, return_intermediate_states=False):
    """`chunk_gated_delta_rule` of vLLM 044990c1."""
    return "the host's", None, None


def test_three_results_where_vllm_has_three_and_other_arguments(vllm):
    vllm()
    op = sites.served(sites.chunk_gated_delta_rule, of_old)
    q, k, v = (torch.randn(1, 5, 2, 32).bfloat16() for _ in range(3))
    g, beta, S = -torch.rand(1, 5, 2), torch.rand(1, 5, 2), torch.randn(1, 2, V, K).bfloat16()
    o, final, more = op(q, k, v, g, beta, None, S, True, torch.tensor([0, 5]), False, True)
    want = stub.walk(q[0], k[0], v[0], g[0], beta[0], K ** -0.5, S[0], True)
    near(o[0], [row for row, _ in want])
    near(final[0], want[-1][1])
    assert more is None and final.dtype == torch.bfloat16
    assert op(q, k, v, g, beta, return_intermediate_states=True)[0] == "the host's"
    assert "left to the host (return_intermediate_states: got True; accepted: False)" in integrations.report()
    assert sites.served(sites.chunk_gated_delta_rule, lambda q, k, v: None) is None, "no gates"
    assert sites.served(sites.chunk_gated_delta_rule, op) is op, "once"


def test_core_attn_out_gets_o(vllm):
    """In v's shape as in newer layers, or with more rows as before; what comes after o stays."""
    op = vllm().fla_chunk_gated_delta_rule
    q, k, v = (torch.randn(1, 5, HV, 32).bfloat16() for _ in range(3))
    g, beta, S = -torch.rand(1, 5, HV), torch.rand(1, 5, HV), torch.randn(1, HV, V, K)
    want = [row for row, _ in stub.walk(q[0], k[0], v[0], g[0], beta[0], K ** -0.5, S[0], True)]
    for rows, at in (8, 2), (9, 0):
        held = torch.full((rows, HV, V), 7.0, dtype=v.dtype)
        buffer = held[at:at + 5][None] if at else held
        o, _ = op(q=q, k=k, v=v, g=g, beta=beta, initial_state=S, output_final_state=True, cu_seqlens=ints(0, 5),
                  use_qk_l2norm_in_kernel=True, core_attn_out=buffer)
        assert o.data_ptr() == buffer.data_ptr()
        near(held[at:at + 5], want)
        assert (held[:at] == 7).all() and (held[at + 5:] == 7).all()
    assert served("chunk_gated_delta_rule")


def test_modules_that_were_imported_before(vllm):
    module = vllm(register=False)
    theirs = module.fused_sigmoid_gating_delta_rule_update
    method = module.QwenGatedDeltaNetAttention._forward_core
    plugin.register()
    ours = module.fused_sigmoid_gating_delta_rule_update
    assert ours is not theirs and ours.__wrapped__.__name__ == theirs.__name__
    assert sys.modules[OPS].fused_sigmoid_gating_delta_rule_update is ours
    assert module.QwenGatedDeltaNetAttention._forward_core is not method
    before = module.QwenGatedDeltaNetAttention._forward_core
    plugin.register()
    assert module.fused_sigmoid_gating_delta_rule_update is ours, "twice is once"
    assert module.QwenGatedDeltaNetAttention._forward_core is before
    assert sum(isinstance(f, plugin._Finder) for f in sys.meta_path) == 1


def test_the_switch(vllm, monkeypatch, capfd):
    monkeypatch.setenv("GDN_CODEGEN_VLLM", "0")
    monkeypatch.setenv("GDN_DEBUG", "1")
    module = vllm()
    assert not hasattr(module.fused_sigmoid_gating_delta_rule_update, "by_gdn_codegen")
    assert "gdn_codegen: vllm: nothing is replaced: GDN_CODEGEN_VLLM=0" in capfd.readouterr().err


def test_a_failure_of_the_plug_in_leaves_vllm_as_it_is(vllm, monkeypatch):
    def fail(*args):
        raise KeyError("a name")
    monkeypatch.setattr(layers, "replace", fail)
    with pytest.warns(RuntimeWarning, match=f"serves nothing of {QWEN}: KeyError"):
        module = vllm()
    assert not hasattr(module.QwenGatedDeltaNetAttention._forward_core, "by_gdn_codegen")


@pytest.mark.parametrize("there", [False, True])
def test_without_vllm_s_names_nothing_is_imported(tmp_path, there):
    if there:  # another package of this name, or a version that has its ops elsewhere
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
    code = ("import sys\nfrom gdn_codegen.integrations.vllm import register\nbefore = list(sys.meta_path)\nregister()\n"
            "assert sys.meta_path == before and not {'torch', 'gdn_codegen.ops', 'vllm'} & sys.modules.keys()")
    about = {"PYTHONPATH": f"{tmp_path}:{Path(plugin.__file__).parents[3]}", "GDN_DEBUG": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=about)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == "gdn_codegen: vllm: nothing is replaced: there is no module of vLLM's ops or of Qwen's layer\n"


def test_the_entry_point():
    text = (Path(plugin.__file__).parents[3] / "pyproject.toml").read_text()
    _, _, rest = text.partition('[project.entry-points."vllm.general_plugins"]\n')
    name, value = rest.split("\n")[0].split(" = ")
    assert EntryPoint(name, value.strip('"'), "vllm.general_plugins").load() is plugin.register
