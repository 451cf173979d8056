"""The calls that plug-ins make for a model's layers are those of the table of models, by which `build --model` makes builds."""
import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import stub_of_kimi as kimi
import torch
from test_sglang import HV as HEADS
from test_sglang import K as DIM
from test_sglang import Problem, sglang  # noqa: F401, the fixture
from vllm_batches import (
    HV,
    NAN,
    OPS,
    Batch,
    K,
    OfKimi,
    V,
    column,
    ints,
    of_checkpoints,
    of_prompts,
    pool,
    stubbed,  # noqa: F401, the fixture vllm
)

from gdn_codegen import integrations
from gdn_codegen.integrations import vllm as plugin
from gdn_codegen.models import MODELS
from gdn_codegen.runtime.call import known_members, launch
from gdn_codegen.tools.served import Served, asked

pytestmark = pytest.mark.slow
FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.fixture
def made(monkeypatch):
    """What calls ask for, whatever their target and strides: request and contract."""
    found, chosen = set(), launch.chosen

    def seen(call, on=None):
        found.add((replace(call.request, target="auto"), replace(call.contract, strided=False)))
        return chosen(call, on)
    launch.forget()
    known_members.forget()
    monkeypatch.setattr(launch, "chosen", seen)
    yield found
    assert "left to the host" not in integrations.report()


def listed(model, engine, speculative=True, prefix_caching=True):
    m = MODELS[model]
    return {(asked(x, "auto", m.algorithm), x.contract) for x in Served((engine,), speculative, prefix_caching).kinds(m)}


def qwen_batches(module, state):
    """Prompts, with checkpoints too, decodes of both kinds, drafts, and drafts beside a prompt."""
    batch = lambda *args, **named: Batch(module, *args, state=state, **named)
    batch([37, 20]).run(**of_prompts([37, 20], column(3, 5), [False, True]))
    lengths, old = [1, 150, 20, 70], [True, False, True, False]
    batch(lengths, flashinfer=True).run(**of_checkpoints(lengths, column(4, 3, 5, 7), old, 1, [0, 128, 0, 64], [0, 9, 0, 11]))
    for packed in (True, False):
        decodes = batch([1, 1], rows=3)
        decodes.layer.enable_packed_recurrent_decode = packed
        decodes.run(num_decodes=2, num_decode_tokens=2, non_spec_state_indices_tensor=ints(5, 1, 0),
                    non_spec_query_start_loc=ints(0, 1, 2, 2))
    drafts = dict(num_spec_decodes=1, num_spec_decode_tokens=2, spec_state_indices_tensor=ints([6, 2]),
                  num_accepted_tokens=ints(1), spec_query_start_loc=ints(0, 2))
    batch([2]).run(spec_sequence_masks=torch.tensor([True]), **drafts)
    ends, new = ints(0, 13), torch.tensor([False])
    batch([2, 13]).run(
        num_prefills=1, num_prefill_tokens=13, spec_sequence_masks=torch.tensor([True, False]), spec_token_indx=torch.arange(2),
        non_spec_token_indx=torch.arange(2, 15), non_spec_query_start_loc=ends, non_spec_state_indices_tensor=column(3),
        has_initial_state=new, prefill_query_start_loc=ends, prefill_state_indices=column(3), prefill_has_initial_state=new,
        **drafts)


@pytest.mark.parametrize("model, state", [("qwen3-next", HALF), ("qwen3.5-9b", FLOAT)])
def test_vllm_s_calls_for_gated_deltanet(vllm, made, model, state):
    qwen_batches(vllm(), state)
    assert made == listed(model, "vllm")


def kimi_prompts(bound, module=kimi.KIMI):
    x = OfKimi([21, 6], bound=bound)
    given = dict(raw_beta=x.beta) if module == kimi.KIMI else dict(beta=x.beta.float().sigmoid(), safe_gate=True)
    importlib.import_module(module).chunk_kda_with_fused_gate(
        q=x.q, k=x.k, v=x.v, raw_g=x.g, A_log=x.A_log, g_bias=x.bias, lower_bound=bound, initial_state=x.pool[[3, 5]],
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=ints(0, 21, 27), **given)


def kimi_steps(bound):
    x = OfKimi([1, 1], rows=3, bound=bound)
    importlib.import_module(kimi.KIMI).fused_recurrent_kda_packed_decode(
        mixed_qkv=x.packed, raw_g=x.g, raw_beta=x.beta, A_log=x.A_log, dt_bias=x.bias, lower_bound=bound, initial_state=x.pool,
        state_indices=ints(3, 5, 0), out=x.out)
    x = OfKimi([3, 2], bound=bound)
    importlib.import_module(kimi.KIMI).fused_recurrent_kda(
        q=x.q, k=x.k, v=x.v, raw_g=x.g, raw_beta=x.beta, A_log=x.A_log, dt_bias=x.bias, lower_bound=bound, initial_state=x.pool,
        cu_seqlens=ints(0, 3, 5), ssm_state_indices=ints([1, 4, 2], [6, 7, 3]), num_accepted_tokens=ints(2, 1), out=x.out)


def glm_steps():
    for slots, accepted in ((ints(3, 5), None), (ints([1, 4], [6, 7]), ints(2, 1))):
        x = OfKimi([1, 1] if accepted is None else [2, 2])
        importlib.import_module(kimi.GLM).fused_recurrent_kda(
            q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, a_log=x.A_log.view(1, 1, HV, 1), g_bias=x.bias, lower_bound=-5.0,
            compute_gate=True, sigmoid_beta=True, use_qk_l2norm_in_kernel=True, initial_state=x.pool, ssm_state_indices=slots,
            cu_seqlens=ints(0, *x.lengths).cumsum(0, dtype=torch.int32), num_accepted_tokens=accepted, out=x.out)


def flashkda(offsets):
    x, final = OfKimi([21, 6, 70]), torch.empty(3, HV, V, K)
    more = {} if offsets is None else dict(checkpoint_state=final.clone(), checkpoint_offsets=ints(*offsets))
    importlib.import_module(plugin.FLASHKDA)._flashkda_prefill(
        q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, A_log=x.A_log, dt_bias=x.bias, lower_bound=-5.0, initial_state=x.pool[[4, 5, 7]],
        cu_seqlens=ints(0, 21, 27, 97), out=x.out, final_state=final, workspace=torch.empty(0), **more)


def test_vllm_s_calls_for_kda(vllm, made):
    vllm()
    kimi_prompts(None)
    kimi_steps(None)
    assert made == listed("kimi-linear", "vllm")
    made.clear()
    kimi_prompts(-5.0)
    kimi_steps(-5.0)
    for offsets in (None, (16, 0, 48)):
        flashkda(offsets)
    assert made == listed("kimi-k3", "vllm")
    made.clear()
    known_members.forget()
    kimi_prompts(-5.0, kimi.GLM)
    glm_steps()
    layer = vllm(kimi.LAYER)
    for offsets in (None, (16, 0, 48)):
        x, kept = OfKimi([21, 6, 70]), torch.empty(3, HV, V, K)
        space = SimpleNamespace(get_simultaneous=lambda kept=kept: (kept, kept.clone(), None, None))
        layer.current_workspace_manager = lambda space=space: space
        own = layer.Glm5NextLinearAttention()
        vars(own).update(A_log=x.A_log.view(1, 1, HV, 1), dt_bias=x.bias, head_dim=K, kda_lower_bound=-5.0,
                         _flashkda_buffer_specs=(), _checkpoint_exporter=SimpleNamespace(export=lambda *args, **named: None))
        stored = None if offsets is None else SimpleNamespace(checkpoint_offsets=ints(*offsets))
        own._flashkda_prefill(x.q, x.k, x.v, x.g, x.beta, x.pool[[4, 5, 7]], ints(0, 21, 27, 97), x.out, stored)
    assert made == listed("glm-5.3-flash", "vllm")


def test_vllm_s_calls_with_gates_that_were_computed(vllm, made):
    """Of Ling's KDA and Olmo's Gated DeltaNet."""
    op = vllm(f"{OPS}.kda")
    x = OfKimi([21, 6])
    q, k, v = (y.contiguous() for y in (x.q, x.k, x.v))
    g, beta = -torch.rand(1, 27, HV, K), torch.rand(1, 27, HV)
    op.chunk_kda(q=q, k=k, v=v, g=g, beta=beta, initial_state=x.pool[[3, 5]], output_final_state=True, safe_gate=True,
                 use_qk_l2norm_in_kernel=True, lower_bound=-5.0, cu_seqlens=ints(0, 21, 27))
    two = lambda *tensors: [y[:, :2].contiguous() for y in tensors]
    q2, k2, v2, g2, beta2 = two(q, k, v, g, beta)
    op.fused_recurrent_kda(q=q2, k=k2, v=v2, g=g2, beta=beta2, initial_state=x.pool, use_qk_l2norm_in_kernel=True, safe_gate=True,
                           lower_bound=-5.0, cu_seqlens=ints(0, 1, 2), ssm_state_indices=ints(3, 5))
    assert made == listed("ling-3.0-flash", "vllm")
    made.clear()
    states, g, g2 = pool(9, HALF), g[..., 0].contiguous(), g2[..., 0].contiguous()
    vllm(f"{OPS}.chunk").chunk_gated_delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=states[[3, 5]], output_final_state=True, cu_seqlens=ints(0, 21, 27),
        use_qk_l2norm_in_kernel=True)
    step = vllm(f"{OPS}.fused_recurrent").fused_recurrent_gated_delta_rule
    for slots, more in ((ints(3, 5), dict(cu_seqlens=ints(0, 1, 2))),
                        (ints([1, 4]), dict(cu_seqlens=ints(0, 2), num_accepted_tokens=ints(2)))):
        step(q=q2, k=k2, v=v2, g=g2, beta=beta2, initial_state=states, inplace_final_state=True, ssm_state_indices=slots,
             use_qk_l2norm_in_kernel=True, **more)
    assert made == listed("olmo-hybrid-7b", "vllm")


def sglang_batches(host, bound, channels):
    """Prompts, tracked or not, decodes of both kinds, and drafts in a row and in a tree."""
    host.plug_in.enable()
    kernel = (host.kda_triton.TritonKDAKernel if channels else host.gdn_triton.TritonGDNKernel)()

    def problem(lengths):
        x = Problem(lengths, [4, 0], channels, bound)
        bias = x.layer.dt_bias if channels else x.layer.dt_bias.bfloat16()
        own = dict(A_log=x.layer.A_log, dt_bias=bias, **(dict(lower_bound=bound) if channels else {}))
        return x, own, dict(ssm_states=x.pool, cache_indices=x.meta.mamba_cache_indices)

    x, own, states = problem([70, 3])
    gates = dict(g=x.a.view(1, -1, HEADS, DIM), beta=x.b[None], beta_is_raw=True, **own) if channels else dict(zip(
        ("g", "beta"), host.gdn_backend.fused_gdn_gating(x.layer.A_log, x.a, x.b, own["dt_bias"]), strict=True))
    tracked = dict(track_state=torch.full_like(x.pool[:2], NAN), track_chunk_idx=ints(1, -1))
    for more in ({}, tracked):
        reset = host.plug_in._read.set(bool(more))
        kernel.extend(*x.parts(), query_start_loc=x.ends, **gates, **states, **more)
        host.plug_in._read.reset(reset)
    x, own, states = problem([1, 1])
    kernel.packed_decode(x.rows, x.a, x.b, scale=DIM ** -0.5, num_v_heads=HEADS, head_v_dim=x.pool.shape[2], **own, **states)
    kernel.decode(*x.parts(), x.a, x.b, query_start_loc=x.ends, **own, **states)
    x, own, states = problem([3, 3])
    q, k, v = x.parts()
    for parents in (None, ints([-1, 0, 0], [-1, 0, 1])):
        kernel.target_verify(q=q, k=k, v=v, a=x.a, b=x.b, query_start_loc=x.ends, intermediate_state_indices=ints(0, 1),
                             intermediate_states_buffer=torch.zeros(2, 3, *x.pool.shape[1:]), cache_steps=3,
                             retrieve_parent_token=parents, **own, **states)


@pytest.mark.parametrize("bound, channels, models", [(None, False, ("qwen3-next", "qwen3.5-9b")), (None, True, ("kimi-linear",)),
                                                     (-5.0, True, ("kimi-k3", "glm-5.3-flash", "ling-3.0-flash"))])
def test_sglang_s_calls(sglang, made, bound, channels, models):  # noqa: F811
    sglang_batches(sglang, bound, channels)
    for model in models:
        assert made == listed(model, "sglang"), model


def test_what_a_server_does_decides():
    """Without draft tokens and a cache of prefixes; each flag alone; all engines; another dtype of states."""
    for model in MODELS:
        for engine in MODELS[model].engines:
            plain, both = listed(model, engine, False, False), listed(model, engine)
            drafts, prefixes = listed(model, engine, True, False), listed(model, engine, False, True)
            assert plain == drafts & prefixes and both == drafts | prefixes
            assert all(c.by_token or not (x.decode or c.pool) for x, c in drafts - plain)
            assert all(c.positions for _, c in prefixes - plain)
    m = MODELS["qwen3-next"]
    assert len(Served().kinds(m)) == 4 and len(Served().kinds(MODELS["qwen3.5-9b"])) == 3, "steps of both engines are the same"
    assert {x.contract.state_dtype for x in Served().kinds(m)} == {"bfloat16", "float32"}
    assert {x.contract.state_dtype for x in Served(state_dtype="float16").kinds(m)} == {"float16"}
    assert not Served(("sglang",)).kinds(MODELS["olmo-hybrid-7b"])
