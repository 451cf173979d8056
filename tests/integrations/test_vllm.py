"""The plug-in for vLLM, with a stub of vLLM's package (stub_of_vllm.py), beside token recurrences in float64."""
import importlib
import inspect
import math
import subprocess
import sys
import warnings
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import stub_of_kimi as kimi
import stub_of_vllm as stub
import torch
from reference import rms_error

from gdn_codegen import channels, integrations, ops
from gdn_codegen.integrations import vllm as plugin
from gdn_codegen.integrations.vllm import kda, layers, sites
from gdn_codegen.runtime.call import launch

sys.path.insert(0, str(Path(__file__).parents[1] / "family"))
import features

H, HV, K, V = 2, 4, 32, 32
OPS = "vllm.third_party.flash_linear_attention.ops"
QWEN, KDA = (f"vllm.model_executor.layers.mamba.gdn.{n}_linear_attn" for n in ("qwen_gdn", "kda"))
NAN = float("nan")


def forget():
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, plugin._Finder)]
    importlib.invalidate_caches()
    sites.v_first.cache_clear()
    integrations.reset()


def on(target, module):
    """The ops of a module, on one target."""
    return SimpleNamespace(**{n: partial(x, target=target) for n, x in vars(module).items() if inspect.isfunction(x)})


@pytest.fixture(params=["triton", pytest.param("tilelang", marks=[pytest.mark.long, pytest.mark.slow])])
def vllm(request, tmp_path, monkeypatch):
    """A function that imports a module of the stub. The plug-in is registered unless the test says otherwise."""
    forget()
    for module in (sites, layers):
        monkeypatch.setattr(module, "ops", on(request.param, ops))
    for module in (sites, kda):
        monkeypatch.setattr(module, "channels", on(request.param, channels))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("GDN_CODEGEN_VLLM", raising=False)

    def module(name=QWEN, register=True, without=()):
        if not (tmp_path / "vllm").exists():
            stub.write(tmp_path, *without)
            kimi.write(tmp_path)
        if register:
            plugin.register()
        return importlib.import_module(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield module
    forget()


def pool(slots, dtype=torch.float32, heads=HV):
    """States in pages with other data between them. Slot 0 is the null block: nothing reads it."""
    page = torch.full((slots, 64 + heads * V * K), 5.0, dtype=dtype)
    states = page[:, 64:].view(slots, heads, V, K)
    states[1:] = torch.randn(slots - 1, heads, V, K)
    states[0] = NAN
    return states


class Batch:
    """A layer, its pool, and rows of tokens. lengths: tokens of each sequence, in order; the rows may be more."""

    def __init__(self, module, lengths, rows=None, dtype=torch.bfloat16, state=torch.float32, slots=12, **about):
        torch.manual_seed(7)
        self.lengths, n = lengths, rows or sum(lengths)
        self.pool = pool(slots, state)
        caches = torch.zeros(slots, 3, 2 * H * K + HV * V), self.pool
        self.layer = module.QwenGatedDeltaNetAttention(caches, (H, HV), dtype, **about)
        self.x, self.ba = torch.randn(n, 2 * H * K + HV * V).to(dtype), torch.randn(n, 2 * HV).to(dtype)
        self.b, self.a = self.ba.chunk(2, -1)  # as Qwen3.5's projection leaves them
        self.out = torch.full((n, HV, V), NAN, dtype=dtype)

    def states(self, starts):
        """(o, state after each token) of each sequence. starts: their slots, None for zeros."""
        found, at = [], 0
        q, k, v = (y.reshape(len(y), -1, n) for y, n in zip(self.x.split((H * K, H * K, HV * V), 1), (K, K, V), strict=True))
        g = stub.gate(self.a[None], self.layer.A_log, self.layer.dt_bias)[0]
        for n, start in zip(self.lengths, starts, strict=True):
            s, S = slice(at, at + n), torch.zeros(HV, V, K) if start is None else self.pool[start].clone()
            at += n
            found.append(stub.walk(q[s], k[s], v[s], g[s], self.b[s].double().sigmoid(), K ** -0.5, S, True))
        return found

    def run(self, older=False, **about):
        """older: without what 0.33.0 adds to the metadata."""
        counts = dict.fromkeys(("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes",
                                "num_spec_decode_tokens"), 0)
        metadata = stub.GDNAttentionMetadata(**{**counts, "num_actual_tokens": len(self.x), **about})
        if older:
            new = "checkpoint", "flashinfer_checkpoint_plan", "aiter_prefill_metadata"
            metadata = SimpleNamespace(**{n: y for n, y in vars(metadata).items() if n not in new})
        stub.CONTEXT.attn_metadata = {"layer": metadata}
        self.layer._forward_core(mixed_qkv=self.x, b=self.b, a=self.a, core_attn_out=self.out)


def order(monkeypatch, *last):
    """Let vLLM say other last dims of a state with K = 16 and V = 32."""
    shapes = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
    monkeypatch.setattr(shapes, "gated_delta_net_state_shape", lambda *args: ((3, 8), (4, *last)))
    sites.v_first.cache_clear()


def near(got, want, most=5e-3):
    assert rms_error(got.double(), torch.stack(list(want)) if isinstance(want, list) else want) < most


def check(batch, want, slots, all_states=False, most=5e-3):
    """Outputs of all sequences, and the states in their slots: the last of each, or one for each token."""
    near(batch.out[:sum(batch.lengths)], [o for tokens in want for o, _ in tokens], most)
    for own, tokens in zip(slots, want, strict=True):
        for slot, (_, S) in zip(own if all_states else [own], tokens if all_states else tokens[-1:], strict=False):
            near(batch.pool[slot], S, most)


def served(function):
    report = integrations.report("vllm")
    return f"vllm: {function}: served: " in report and "left to the host" not in report


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def column(*slots):
    """A column of a block table, as vLLM takes it."""
    table = torch.full((len(slots), 3), 9, dtype=torch.int32)
    table[:, 0] = ints(*slots)
    return table[:, 0]


def of_prompts(lengths, slots, old, decodes=0):
    """Metadata of a batch without drafts. The first `decodes` sequences have one token each."""
    ends = ints(0, *lengths).cumsum(0, dtype=torch.int32)
    d, here = decodes, torch.tensor(old)
    return dict(num_prefills=len(lengths) - d, num_prefill_tokens=sum(lengths) - d, num_decodes=d, num_decode_tokens=d,
                has_initial_state=here, non_spec_query_start_loc=ends, non_spec_state_indices_tensor=slots,
                prefill_query_start_loc=ends[d:] - d, prefill_state_indices=slots[d:], prefill_has_initial_state=here[d:])


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


def of_checkpoints(lengths, slots, old, decodes, offsets, at):
    """`of_prompts`, and checkpoints after so many tokens of each sequence, 0 for none, to slots."""
    about, stride = of_prompts(lengths, slots, old, decodes), math.gcd(*offsets)
    counts = [n // stride for n in lengths[decodes:]]
    first = [sum(counts[:n]) for n in range(len(counts) + 1)]
    rows = [0] * decodes + [first[n] + x // stride - 1 if x else 0 for n, x in enumerate(offsets[decodes:])]
    return dict(about, checkpoint=stub.MambaPrefillCheckpointMetadata(ints(*offsets), ints(*at)),
                flashinfer_checkpoint_plan=stub.GDNFlashInferCheckpointPlan(
                    stride, first[-1], torch.tensor(first), torch.tensor(rows)))


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


class OfKda:
    """A batch of a KDA layer, as `Batch`."""

    def __init__(self, module, lengths, rows=None):
        torch.manual_seed(8)
        n, self.lengths = rows or sum(lengths), lengths
        self.pool = pool(9)
        self.layer = module.KDAAttentionBase((torch.zeros(9, 3, 3 * HV * K), self.pool))
        self.q, self.k, self.v = (torch.randn(n, HV * K, dtype=torch.bfloat16) for _ in range(3))
        self.g, self.beta = torch.randn(1, n, HV, K).bfloat16(), torch.rand(1, n, HV)
        self.out = torch.full((n, HV, V), NAN, dtype=torch.bfloat16)

    def states(self, starts):
        found, at = [], 0
        q, k, v = (y.view(len(y), HV, K) for y in (self.q, self.k, self.v))
        g = stub.gate(self.g, self.layer.A_log, self.layer.dt_bias)[0]
        for n, start in zip(self.lengths, starts, strict=True):
            s, S = slice(at, at + n), torch.zeros(HV, V, K) if start is None else self.pool[start].clone()
            at += n
            found.append(stub.walk(q[s], k[s], v[s], g[s], self.beta[0, s], K ** -0.5, S, True))
        return found

    def run(self, **about):
        stub.CONTEXT.attn_metadata = {"layer": SimpleNamespace(num_actual_tokens=len(self.q), **about)}
        self.layer._forward(self.q, self.k, self.v, self.g, self.beta, self.out[None])


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


class OfKimi(OfKda):
    """Raw gates and beta, and packed rows, as the convolution of 0.33.0's layers gives them."""

    def __init__(self, lengths, rows=None, bound=-5.0, state=torch.float32, module=KDA):
        super().__init__(importlib.import_module(module), lengths, rows)
        self.bound, self.A_log, self.bias = bound, self.layer.A_log.flatten(), self.layer.dt_bias
        self.packed = torch.cat((self.q, self.k, self.v), 1)
        self.q, self.k, self.v = (y[None].unflatten(2, (HV, -1)) for y in self.packed.chunk(3, 1))
        self.beta = torch.randn(1, len(self.packed), 2 * HV).bfloat16()[..., HV:]
        self.pool = self.pool.to(state)
        self.out = torch.full((1, len(self.packed), HV, V), NAN, dtype=torch.bfloat16)

    def states(self, starts):
        found, at = [], 0
        x = self.g[0].double() + self.bias.double().view(HV, K)
        rate = self.A_log.double().exp()[:, None]
        g = -rate * torch.nn.functional.softplus(x) if self.bound is None else self.bound * (rate * x).sigmoid()
        for n, start in zip(self.lengths, starts, strict=True):
            s, S = slice(at, at + n), torch.zeros(HV, V, K) if start is None else self.pool[start].clone()
            at += n
            beta = self.beta[0, s].double().sigmoid()
            found.append(stub.walk(self.q[0, s], self.k[0, s], self.v[0, s], g[s], beta, K ** -0.5, S, True))
        return found

    def check(self, want, slots, o=None, all_states=False):
        rows = [row for tokens in want for row, _ in tokens]
        near((self.out if o is None else o)[0, :len(rows)], rows, 1e-2)
        for own, tokens in zip(slots, want, strict=True):
            for slot, (_, S) in zip(own if all_states else [own], tokens if all_states else tokens[-1:], strict=False):
                near(self.pool[slot], S, 1e-2)


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
