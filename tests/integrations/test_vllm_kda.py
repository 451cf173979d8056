"""The plug-in for vLLM and the ops for Kimi Delta Attention, with stubs (stub_of_vllm.py, stub_of_kimi.py)."""
import importlib
import sys
from types import SimpleNamespace

import pytest
import stub_of_kimi as kimi
import stub_of_vllm as stub
import torch
from reference import rms_error
from vllm_batches import (
    HV,
    KDA,
    NAN,
    OPS,
    K,
    OfKda,
    OfKimi,
    V,
    check,
    column,
    ints,
    near,
    served,
    stubbed,  # noqa: F401, the fixture vllm
)

from gdn_codegen import integrations
from gdn_codegen.integrations import vllm as plugin
from gdn_codegen.integrations.vllm import kda, sites


def test_kda_prompts(vllm):
    batch = OfKda(vllm(KDA), [21, 6])
    want = batch.states([None, 5])
    batch.run(num_prefills=2, num_decodes=0, has_initial_state=torch.tensor([False, True]),
              non_spec_query_start_loc=ints(0, 21, 27), non_spec_state_indices_tensor=column(3, 5).long())
    check(batch, want, [3, 5], most=1e-2)
    assert served("chunk_kda_with_fused_gate")


def test_kda_decodes_in_a_padded_graph_batch(vllm):
    batch = OfKda(vllm(KDA), [1, 1], rows=4)
    want, before = batch.states([3, 5]), batch.pool.clone()
    batch.run(num_prefills=0, num_decodes=2, non_spec_query_start_loc=ints(0, 1, 2, 2, 2),
              non_spec_state_indices_tensor=ints(3, 5, 0, 0))
    check(batch, want, [3, 5])
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(batch.pool[others].nan_to_num(-1), before[others].nan_to_num(-1)) and not batch.out[2:].any()
    assert served("fused_recurrent_kda")


@pytest.mark.parametrize("bound, beta", [({"safe_gate": False}, "beta"), ({"safe_gate": True, "lower_bound": -4.0}, "beta"),
                                         ({"lower_bound": -4.0}, "raw_beta"), ({}, "raw_beta")])
def test_kda_with_other_versions_gates(vllm, bound, beta):
    """`safe_gate`, without which `lower_bound` says nothing, and `raw_beta`, beside which it holds unless it is None."""
    vllm(KDA)
    if beta == "beta":
        def theirs(q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False,
                   use_qk_l2norm_in_kernel=False, cu_seqlens=None, safe_gate=False, lower_bound=-5.0, **kwargs): ...
    else:
        def theirs(q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False,
                   lower_bound=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs): ...
    batch = OfKda(sys.modules[KDA], [7])
    A, bias = batch.layer.A_log, batch.layer.dt_bias
    op = sites.served(kda.chunk_kda_with_fused_gate, theirs)
    q, k, v = (y.view(1, 7, HV, K) for y in (batch.q, batch.k, batch.v))
    o, final = op(q, k, v, batch.g, A_log=A, g_bias=bias, initial_state=batch.pool[1:2], output_final_state=True,
                  use_qk_l2norm_in_kernel=True, cu_seqlens=ints(0, 7), **{beta: batch.beta}, **bound)
    g = stub.gate(batch.g, A, bias)[0]
    if "lower_bound" in bound:
        g = -4 * (A.double().exp().view(HV, 1) * (batch.g[0].double() + bias.double().view(HV, K))).sigmoid()
    write = batch.beta[0] if beta == "beta" else batch.beta[0].double().sigmoid()
    want = stub.walk(q[0], k[0], v[0], g, write, K ** -0.5, batch.pool[1], True)
    near(o[0], [row for row, _ in want], 1e-2)
    near(final[0], want[-1][1], 1e-2)
    assert "left to the host" not in integrations.report()


@pytest.mark.parametrize("bound", [-5.0, None])
def test_kimi_prompts(vllm, bound):
    vllm()
    op, batch = importlib.import_module(kimi.KIMI).chunk_kda_with_fused_gate, OfKimi([21, 6], bound=bound)
    want = batch.states([None, 5])
    o, final = op(q=batch.q, k=batch.k, v=batch.v, raw_g=batch.g, raw_beta=batch.beta, A_log=batch.A_log, g_bias=batch.bias,
                  lower_bound=bound, initial_state=batch.pool[[3, 5]] * torch.tensor([0, 1]).view(2, 1, 1, 1),
                  output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=ints(0, 21, 27),
                  out=batch.out if bound is None else None)
    assert bound is not None or o is batch.out
    batch.pool[[3, 5]] = final
    batch.check(want, [3, 5], o)
    assert served("chunk_kda_with_fused_gate")


@pytest.mark.parametrize("bound, buffer", [(-5.0, True), (None, False)])
def test_kimi_decodes_in_a_padded_graph_batch(vllm, bound, buffer):
    vllm()
    op, batch = importlib.import_module(kimi.KIMI).fused_recurrent_kda_packed_decode, OfKimi([1, 1], rows=4, bound=bound)
    want, before = batch.states([3, 5]), batch.pool.clone()
    o, _ = op(mixed_qkv=batch.packed, raw_g=batch.g, raw_beta=batch.beta, A_log=batch.A_log, dt_bias=batch.bias,
              lower_bound=bound, initial_state=batch.pool, state_indices=ints(3, 5, 0, 0),
              **({"out": batch.out} if buffer else {}))
    batch.check(want, [3, 5], o)
    others = [0, 1, 2, 4, 6, 7, 8]
    assert o.shape == batch.out.shape and not o[0, 2:].any() and (not buffer or o is batch.out)
    assert torch.equal(batch.pool[others].nan_to_num(-1), before[others].nan_to_num(-1))
    assert served("fused_recurrent_kda_packed_decode")


@pytest.mark.parametrize("module", [kimi.KIMI, kimi.GLM])
def test_kda_s_draft_tokens(vllm, module):
    vllm()
    op, batch = importlib.import_module(module).fused_recurrent_kda, OfKimi([3, 2], rows=6)
    slots = [[1, 4, 2], [6, 7, 3]]
    want = batch.states([4, 6])
    named = dict(raw_g=batch.g, raw_beta=batch.beta, A_log=batch.A_log, dt_bias=batch.bias) if module == kimi.KIMI else \
        dict(g=batch.g, beta=batch.beta, a_log=batch.A_log, g_bias=batch.bias, compute_gate=True, sigmoid_beta=True,
             use_qk_l2norm_in_kernel=True)
    op(q=batch.q, k=batch.k, v=batch.v, **named, lower_bound=-5.0, initial_state=batch.pool, cu_seqlens=ints(0, 3, 5, 5),
       ssm_state_indices=ints(*slots, [0, 0, 0]), num_accepted_tokens=ints(2, 1, 1), out=batch.out)
    batch.check(want, slots, all_states=True)
    assert served("fused_recurrent_kda") and not batch.out[0, 5:].any()


class Window:
    """A workspace of vLLM's, of which each tensor is full of NaN, as a method of a layer asks for it."""

    def __init__(self, tokens, states):
        of_sequences = (4, HV, V, K), states
        self.specs = of_sequences, of_sequences, ((8,), torch.uint8), ((1, tokens + 9, HV, V), torch.bfloat16)
        self.made = [torch.full(shape, 1 if dtype == torch.uint8 else NAN, dtype=dtype) for shape, dtype in self.specs]

    def get_simultaneous(self, *specs):
        assert specs == self.specs
        return self.made


@pytest.mark.parametrize("offsets, buffer", [(None, True), (None, False), ((16, 0, 48), True)])
def test_glm_prompts_where_vllm_chose_flashkda(vllm, monkeypatch, offsets, buffer):
    """The layer's method: o in its buffer or in vLLM's workspace, final states there, and checkpoints by vLLM's exporter."""
    module, batch = vllm(kimi.LAYER), OfKimi([21, 6, 70], state=torch.bfloat16)
    space, slots = Window(97, torch.bfloat16), [4, 5, 7]
    monkeypatch.setattr(module, "current_workspace_manager", lambda: space)
    want, exporter = batch.states(slots), stub.MambaPrefillCheckpointExporter(3)
    layer = module.Glm5NextLinearAttention()
    layer.A_log, layer.dt_bias, layer.head_dim, layer.kda_lower_bound = batch.A_log.view(1, 1, HV, 1), batch.bias, K, -5.0
    layer._flashkda_buffer_specs, layer._checkpoint_exporter = space.specs, exporter
    windows, raw = torch.zeros(9, 3 * HV * K, 3), torch.randn(97, 3 * HV * K)
    stored = None if offsets is None else SimpleNamespace(checkpoint_offsets=ints(*offsets), state_indices=ints(1, 0, 2))
    o, last = layer._flashkda_prefill(
        q=batch.q, k=batch.k, v=batch.v, g=batch.g, beta=batch.beta, initial_state=batch.pool[slots],
        cu_seqlens=ints(0, 21, 27, 97), out=batch.out if buffer else None, checkpoint=stored, raw_qkv=raw, conv_state=windows,
        recurrent_state=batch.pool)
    final, kept, _, outs = space.made
    assert o.data_ptr() == (batch.out if buffer else outs).data_ptr() and last.data_ptr() == final.data_ptr() and len(last) == 3
    batch.pool[slots] = last
    batch.check(want, slots, o)
    assert outs[:, 0 if buffer else 97:].isnan().all() and final[3].isnan().all()
    assert kept[3].isnan().all() and kept[1].isnan().all() and (offsets is not None or kept.isnan().all())
    for n, slot in ((0, 1), (2, 2)) if offsets else ():
        near(batch.pool[slot], want[n][offsets[n] - 1][1], 1e-2)
        end = (0, 21, 27)[n] + offsets[n]
        assert torch.equal(windows[slot], raw[end - 3:end].T)
    assert served("Glm5NextLinearAttention._flashkda_prefill")


def test_another_method_of_glm_is_left_to_vllm(vllm, monkeypatch, capsys):
    """One that names what was not read, and one with other arguments."""
    monkeypatch.setenv("GDN_DEBUG", "1")
    module = vllm(kimi.LAYER, register=False)

    def named(self, q, k, v, g, beta, initial_state, cu_seqlens, out, checkpoint=None, raw_qkv=None, conv_state=None,
              recurrent_state=None):
        return q.new_feature

    def fewer(self, q, k, v): ...
    for other, said in ((named, "unknown: new_feature"), (fewer, "unknown: its arguments")):
        monkeypatch.setattr(module.Glm5NextLinearAttention, "_flashkda_prefill", other)
        kda.replace(module, False)
        assert module.Glm5NextLinearAttention._flashkda_prefill is other
        assert f"FlashKDA's prefill is not replaced ({said})" in capsys.readouterr().err
    monkeypatch.delattr(module.Glm5NextLinearAttention, "_flashkda_prefill")
    kda.replace(module, False)
    assert "no layer with FlashKDA's prefill" in capsys.readouterr().err


@pytest.mark.parametrize("offsets", [None, (16, 0, 48)])
def test_kimi_prompts_where_vllm_chose_flashkda(vllm, offsets):
    """With checkpoints in the middle of prompts, and without."""
    vllm()
    op, batch = importlib.import_module(plugin.FLASHKDA)._flashkda_prefill, OfKimi([21, 6, 70], state=torch.bfloat16)
    want = batch.states([4, 5, 7])
    final, kept = (torch.full((3, HV, V, K), x, dtype=torch.bfloat16) for x in (NAN, 7))
    more = dict(checkpoint_state=kept, checkpoint_offsets=ints(*offsets)) if offsets else {}
    o, last = op(q=batch.q, k=batch.k, v=batch.v, g=batch.g, beta=batch.beta, A_log=batch.A_log, dt_bias=batch.bias,
                 lower_bound=-5.0, initial_state=batch.pool[[4, 5, 7]], cu_seqlens=ints(0, 21, 27, 97), out=batch.out,
                 final_state=final, workspace=torch.empty(0), **more)
    assert o is batch.out and last is final
    batch.pool[[4, 5, 7]] = final
    batch.check(want, [4, 5, 7])
    for n, offset in enumerate(offsets or ()):
        assert (kept[n] == 7).all() if offset == 0 else rms_error(kept[n].double(), want[n][offset - 1][1]) < 1e-2
    assert served("_flashkda_prefill")


def test_bounds_beside_computed_gates_of_kda(vllm):
    """Which vLLM's functions ignore, and Bailing's layers pass."""
    module, batch = vllm(f"{OPS}.kda"), OfKimi([7])
    g, beta = -torch.rand(1, 7, HV, K), batch.beta.float().sigmoid()
    want = stub.walk(batch.q[0], batch.k[0], batch.v[0], g[0], beta[0], K ** -0.5, batch.pool[3], True)
    named = dict(q=batch.q, k=batch.k, v=batch.v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, safe_gate=True, lower_bound=-5.0,
                 cu_seqlens=ints(0, 7))
    o, final = module.chunk_kda(**named, initial_state=batch.pool[3:4].contiguous(), output_final_state=True)
    near(o[0], [row for row, _ in want])
    near(final[0], want[-1][1])
    o, _ = module.fused_recurrent_kda(**named, initial_state=batch.pool, ssm_state_indices=ints(3))
    near(o[0], [row for row, _ in want])
    near(batch.pool[3], want[-1][1])
    assert served("chunk_kda") and served("fused_recurrent_kda")


def test_what_our_ops_for_kda_refuse_is_left_to_the_host(vllm):
    vllm()
    op, batch = importlib.import_module(kimi.GLM).fused_recurrent_kda, OfKimi([1])
    assert op(q=batch.q, k=batch.k, v=batch.v, g=batch.g, beta=batch.beta, initial_state=batch.pool, ssm_state_indices=ints(3),
              compute_gate=True, a_log=batch.A_log, g_bias=batch.bias, lower_bound=None) == ("the host's", None)
    assert "left to the host (lower_bound: got None; accepted: a number beside compute_gate=True)" in integrations.report("vllm")


def test_decodes_of_kda_with_raw_gates(vllm):
    """`is_kda` of the sigmoid op."""
    op, batch = vllm().fused_sigmoid_gating_delta_rule_update, OfKda(vllm(KDA), [2, 1])
    want = [stub.walk(*(y.view(3, HV, K)[s] for y in (batch.q, batch.k, batch.v)),
                      stub.gate(batch.g, batch.layer.A_log, batch.layer.dt_bias)[0][s], batch.beta[0, s].double().sigmoid(),
                      K ** -0.5, batch.pool[n], True) for n, s in ((4, slice(0, 2)), (2, slice(2, 3)))]
    q, k, v = (y.view(1, 3, HV, K) for y in (batch.q, batch.k, batch.v))
    o, _ = op(batch.layer.A_log, batch.g.view(3, HV * K), batch.beta[0], batch.layer.dt_bias, q, k, v, cu_seqlens=ints(0, 2, 3),
              initial_state=batch.pool, ssm_state_indices=ints(4, 2, 0), use_qk_l2norm_in_kernel=True, is_kda=True)
    near(o[0], [row for tokens in want for row, _ in tokens])
    near(batch.pool[4], want[0][-1][1])
    near(batch.pool[2], want[1][-1][1])
    assert served("fused_sigmoid_gating_delta_rule_update")
