"""sgl-kernel-npu and vLLM-Ascend, by packages that have the names, signatures and calls of the real ones."""
import importlib
import sys
from functools import partial
from types import SimpleNamespace

import packages
import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen import integrations
from gdn_codegen.runtime.targets import runs

H, HV, K, V = 1, 2, 32, 48
HERE = [pytest.param("triton", marks=pytest.mark.slow),
        *[pytest.param("pto", marks=[pytest.mark.slow, pytest.mark.long])] * runs("pto", "cpu")]
REFUSED = "raise AssertionError('the host was called')\n"
FLA = "sgl_kernel_npu/fla"
FILES = {
    f"{FLA}/chunk.py": "def chunk_gated_delta_rule_npu(q, k, v, g, beta, scale=None, initial_state=None, "
        "output_final_state=True, cu_seqlens=None, head_first=False, use_qk_l2norm_in_kernel=False):\n    " + REFUSED,
    f"{FLA}/fused_sigmoid_gating_recurrent.py": "def fused_sigmoid_gating_delta_rule_update_npu(A_log, a, dt_bias, "
        "softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale=None, "
        "use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False):\n    " + REFUSED,
    # of SGLang on an NPU: kernels/gdn_triton.py
    "sglang/gdn_triton.py": f'''
from {FLA.replace("/", ".")}.chunk import chunk_gated_delta_rule_npu
from {FLA.replace("/", ".")}.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update_npu

chunk_gated_delta_rule = chunk_gated_delta_rule_npu


def decode(q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, is_kda=False):
    return fused_sigmoid_gating_delta_rule_update_npu(
        A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, initial_state_source=ssm_states,
        initial_state_indices=cache_indices, cu_seqlens=query_start_loc, use_qk_l2norm_in_kernel=True, softplus_beta=1.0,
        softplus_threshold=20.0, is_kda=is_kda)


def extend(q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc):
    o, last, h = chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, initial_state=ssm_states[cache_indices],
                                        cu_seqlens=query_start_loc, head_first=False, use_qk_l2norm_in_kernel=True)
    ssm_states[cache_indices] = last.to(ssm_states.dtype, copy=False)
    return o, h
'''}
VLLM = {
    "vllm/distributed.py": "class Group:\n    world_size = 1\n\n\ndef get_pcp_group():\n    return Group\n",
    "vllm_ascend/ops/triton/fla/chunk.py": "def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, "
        "output_final_state=False, cu_seqlens=None, prebuilt_meta=None, head_first=False, use_qk_l2norm_in_kernel=False, "
        f"chunk_indices=None, chunk_offsets=None, core_attn_out=None):\n    {REFUSED}",
    "vllm_ascend/ops/gdn.py": f'''
from vllm_ascend.ops.triton.fla.chunk import chunk_gated_delta_rule


class AscendGatedDeltaNetAttention:
    @staticmethod
    def _chunk_gated_delta_rule_fused(q, k, v, g, beta, initial_state, cu_seqlens, scale):
        {REFUSED}
    def prefill(self, fused, q, k, v, g, beta, ssm_state, slots, ends):
        if fused:
            o, last = AscendGatedDeltaNetAttention._chunk_gated_delta_rule_fused(
                q=q, k=k, v=v, g=g, beta=beta, initial_state=ssm_state[slots], cu_seqlens=ends, scale=k.shape[-1] ** -0.5)
            ssm_state[slots] = last.to(ssm_state.dtype)
            return o
        o, last = chunk_gated_delta_rule(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=ssm_state[slots].transpose(-1, -2).contiguous(), output_final_state=True,
            cu_seqlens=ends, prebuilt_meta=object(), head_first=False, use_qk_l2norm_in_kernel=True)
        ssm_state[slots] = last.transpose(-1, -2).contiguous().to(ssm_state.dtype)
        return o
'''}
library = torch.library.Library("_C_ascend", "FRAGMENT")
library.define("npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
               "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? "
               "num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor")


@pytest.fixture
def ascend(tmp_path, monkeypatch):
    """A function that makes packages, and imports the plug-in and modules of them; all ops of ours are for a target."""
    def forget():
        for n in [n for n in sys.modules if n.split(".")[0] in ("sgl_kernel_npu", "sglang", "vllm", "vllm_ascend")]:
            del sys.modules[n]

    def make(files, target, *modules):
        packages.put(files, tmp_path, monkeypatch)
        found = [importlib.import_module(m) for m in modules]
        sys.modules.pop("gdn_codegen.integrations.ascend", None)
        plug_in = importlib.import_module("gdn_codegen.integrations.ascend")
        monkeypatch.setattr(plug_in, "ops", SimpleNamespace(**{n: partial(getattr(plug_in.ops, n), target=target) for n in (
            "chunk_gated_delta_rule", "recurrent_gated_delta_rule")}))
        monkeypatch.setattr(plug_in, "fused_recurrent_kda", partial(plug_in.fused_recurrent_kda, target=target))
        plugged.append(plug_in)
        return found
    plugged = []
    forget()
    integrations.reset()
    yield make
    for x in plugged:
        x.disable()
    sys.modules.pop("gdn_codegen.integrations.ascend", None)
    forget()
    integrations.reset()


def batched(x, *names):
    return [x[n][None] for n in names]


def state_after(x, n, tokens):
    """The state of sequence n after so many tokens [HV, K, V], in float64."""
    first = sum(x["lengths"][:n])
    cut = {i: x[i][first:first + tokens] for i in ("q", "k", "v", "g", "beta")}
    return expected({**x, **cut, "lengths": [tokens], "S": x["S"][n:n + 1]})[1][0]


def pool_of(x, slots, v_first=False):
    pool = torch.full((7, HV, *((V, K) if v_first else (K, V))), 3.0)
    for n, slot in enumerate(slots):
        if slot >= 0:
            pool[slot] = x["S"][n].mT if v_first else x["S"][n]
    return pool


@pytest.mark.parametrize("target", ["triton", *["pto"] * runs("pto", "cpu")])
@pytest.mark.slow
def test_sglang_s_prefill_has_three_results(target, ascend):
    sglang, = ascend(FILES, target, "sglang.gdn_triton")
    x = problem([70, 0, 3], H, HV, K, V, same_keys=True)
    ends, slots = torch.tensor([0, 70, 70, 73], dtype=torch.int32), torch.tensor([5, 1, 2])
    pool = pool_of(x, slots)
    o, h = sglang.extend(*batched(x, "q", "k", "v", "g", "beta"), ssm_states=pool, cache_indices=slots, query_start_loc=ends)
    want, final = expected(x)
    assert rms_error(o[0], want) < 5e-3 and rms_error(pool[slots], final) < 5e-3 and bool((pool[[0, 3, 4, 6]] == 3).all())
    assert torch.equal(h[0, [0, 2]], x["S"][[0, 2]]) and rms_error(h[0, 1], state_after(x, 0, 64)) < 5e-3
    # in the order of arguments there, without initial states; h is that of rows of a batch
    y = problem([66, 66], H, HV, K, V, initial=False)
    o, final, h = sys.modules["sgl_kernel_npu.fla.chunk"].chunk_gated_delta_rule_npu(
        *(y[n].unflatten(0, (2, 66)) for n in ("q", "k", "v", "g", "beta")), None, None, False, None, False, True)
    assert final is None and rms_error(o.flatten(0, 1), expected(y)[0]) < 5e-3 and bool((h[0, [0, 2]] == 0).all())
    y["S"] = torch.zeros(2, HV, K, V)
    assert max(rms_error(h[0, 2 * n + 1], state_after(y, n, 64)) for n in range(2)) < 5e-3
    assert integrations.report() == "ascend: chunk_gated_delta_rule_npu: served: 2"


@pytest.mark.parametrize("target", HERE)
def test_sglang_s_decoding(target, ascend):
    sglang, = ascend(FILES, target, "sglang.gdn_triton")
    x = problem([1, 1, 1], H, HV, K, V)
    slots, ends = torch.tensor([4, 0, 2, -1], dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    pool, (a, b) = pool_of(x, slots[:3]), torch.randn(2, 4, HV)
    A_log, dt_bias = torch.randn(2, HV)
    q, k, v = (torch.cat([x[n], torch.full_like(x[n][:1], float("nan"))])[None] for n in ("q", "k", "v"))
    o = sglang.decode(q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=pool, cache_indices=slots, query_start_loc=ends)
    x["g"], x["beta"] = (-A_log.exp() * torch.nn.functional.softplus(a + dt_bias))[:3], b[:3].sigmoid()
    want, final = expected(x)
    assert rms_error(o[0, :3], want) < 5e-3 and bool((o[0, 3] == 0).all()) and rms_error(pool[slots[:3]], final) < 5e-3
    assert bool((pool[[1, 3, 5, 6]] == 3).all())
    with pytest.raises(AssertionError, match="the host was called"):  # a is not [tokens, HV K]
        sglang.decode(q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=pool, cache_indices=slots, query_start_loc=ends,
                      is_kda=True)


@pytest.mark.parametrize("target", HERE)
def test_vllm_ascend_prefills_and_decodes(target, ascend):
    gdn, = ascend(VLLM, target, "vllm_ascend.ops.gdn")
    layer = gdn.AscendGatedDeltaNetAttention()
    for fused in (False, True):
        x = problem([37, 3], H, HV, K, V)
        slots, ends = torch.tensor([5, 2]), torch.tensor([0, 37, 40], dtype=torch.int32)
        pool = pool_of(x, slots, True)
        o = layer.prefill(fused, *batched(x, "q", "k", "v", "g", "beta"), pool, slots, ends)
        want, final = expected(x)
        assert rms_error(o[0], want) < 5e-3 and rms_error(pool[slots].mT, final) < 5e-3
    # a batch of a graph: two rows of padding, with the null block
    y = problem([1, 1], H, HV, K, V, seed=1)
    y["S"], before = pool[slots].mT.clone(), pool.clone()
    q, k, v, g, beta = (torch.cat([y[n], torch.full_like(y[n], float("nan"))]) for n in ("q", "k", "v", "g", "beta"))
    said = dict(query=q, key=k, value=v, g=g, beta=beta, state=pool, scale=K ** -0.5,
                actual_seq_lengths=torch.tensor([0, 1, 1, 0, 0], dtype=torch.int32),
                ssm_state_indices=torch.tensor([5, 2, 0, 0], dtype=torch.int32))
    o = torch.ops._C_ascend.npu_recurrent_gated_delta_rule(**said)
    want, final = expected(y)
    assert o.shape == v.shape and rms_error(o[:2], want) < 5e-3 and rms_error(pool[slots].mT, final) < 5e-3
    rest = [0, 1, 3, 4, 6]
    assert torch.equal(pool[rest], before[rest])
    with pytest.raises(NotImplementedError, match="npu_recurrent_gated_delta_rule"):  # the host's op, which has no kernel here
        torch.ops._C_ascend.npu_recurrent_gated_delta_rule(**said, gk=torch.ones(4, HV, K))
    sys.modules["vllm.distributed"].Group.world_size = 2
    with pytest.raises(AssertionError, match="the host was called"):
        layer.prefill(False, *batched(x, "q", "k", "v", "g", "beta"), pool, slots, ends)
    said = integrations.report().splitlines()
    assert [line.split(": ", 3)[1:3] for line in said if "served" in line] == [
        [n, "served"] for n in ("chunk_gated_delta_rule", "_chunk_gated_delta_rule_fused", "npu_recurrent_gated_delta_rule")]


@pytest.mark.parametrize("lengths", [[3, 3, 3, 0], [2, 3, 1, 0]], ids=["equal", "ragged"])
@pytest.mark.parametrize("target", ["triton", *["pto"] * runs("pto", "cpu")])
@pytest.mark.slow
def test_vllm_ascend_verifies_draft_tokens(target, lengths, ascend):
    """A slot for each token, of which one is the null block and one -1; a sequence without a slot, and one of padding."""
    ascend(VLLM, target, "vllm_ascend.ops.gdn")
    x, N = problem(lengths, H, HV, K, V), sum(lengths)
    slots = torch.tensor([9, 4, 7, 2, 11, 5, 0, 0, 0][:N], dtype=torch.int32)
    slots[sum(lengths[:2]):] = 0  # the third sequence has none
    if lengths[0] == 3:
        slots[1], slots[5] = 0, -1
    accepted, starts = torch.tensor([1, 2, 1, 1], dtype=torch.int32), torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    pool = torch.randn(13, HV, V, K, generator=torch.Generator().manual_seed(3))
    before, first = pool.clone(), [int(slots[starts[n] + accepted[n] - 1]) for n in range(2)]
    q, k, v, g, beta = (torch.cat([x[n], torch.full_like(x[n][:3], float("nan"))]) for n in ("q", "k", "v", "g", "beta"))
    o = torch.ops._C_ascend.npu_recurrent_gated_delta_rule(
        query=q, key=k, value=v, g=g, beta=beta, state=pool, scale=K ** -0.5, num_accepted_tokens=accepted,
        actual_seq_lengths=torch.tensor([0, *lengths], dtype=torch.int32),
        ssm_state_indices=torch.cat([slots, torch.zeros(3, dtype=torch.int32)]))
    x["S"], kept = torch.cat([before[first].mT, torch.zeros(2, HV, K, V)]), set()
    for n in range(2):
        at = int(starts[n])
        for t in range(lengths[n]):
            slot = int(slots[at + t])
            if slot > 0:
                kept.add(slot)
                assert rms_error(pool[slot].mT, state_after(x, n, t + 1)) < 5e-3
    served = sum(lengths[:2])
    assert rms_error(o[:served], expected(x)[0][:served]) < 5e-3 and not o[served:N].any()
    rest = sorted({*range(13)} - kept)
    assert kept and torch.equal(pool[rest], before[rest])
    # drafts without accepted ones start from the slot of the first token
    pool = before.clone()
    slots = torch.arange(1, N + 1, dtype=torch.int32)
    torch.ops._C_ascend.npu_recurrent_gated_delta_rule(
        query=x["q"], key=x["k"], value=x["v"], g=x["g"], beta=x["beta"], state=pool, scale=K ** -0.5, ssm_state_indices=slots,
        actual_seq_lengths=torch.tensor([0, *lengths], dtype=torch.int32))
    x["S"] = torch.cat([before[[int(slots[starts[n]]) for n in range(3)]].mT, torch.zeros(1, HV, K, V)])
    assert max(rms_error(pool[int(slots[starts[n] + lengths[n] - 1])].mT, state_after(x, n, lengths[n])) for n in range(3)) < 5e-3
    assert integrations.report() == "ascend: npu_recurrent_gated_delta_rule: served: 2"


def test_names_are_given_back_and_their_absence_is_an_error(ascend):
    sglang, = ascend(FILES, "triton", "sglang.gdn_triton")
    ours, plug_in = sglang.chunk_gated_delta_rule, sys.modules["gdn_codegen.integrations.ascend"]
    assert "sglang.gdn_triton.chunk_gated_delta_rule" in plug_in.enable()
    assert sys.modules["sgl_kernel_npu.fla.chunk"].chunk_gated_delta_rule_npu is ours
    plug_in.disable()
    with pytest.raises(AssertionError, match="the host was called"):
        sglang.chunk_gated_delta_rule(*[None] * 5)
    for name in [n for n in sys.modules if n.startswith("sgl_kernel_npu")]:
        del sys.modules[name]
    sys.path_importer_cache.clear()
    sys.path.pop(0)
    with pytest.raises(ImportError, match=r"ascend: got a version without sgl_kernel_npu\.fla\.chunk"):
        plug_in.enable()
