"""What tests of the plug-in for vLLM share: the stub as a module, batches of Qwen's layer, and token recurrences beside them."""
import importlib
import inspect
import math
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import stub_of_kimi as kimi
import stub_of_vllm as stub
import torch
from reference import rms_error

from gdn_codegen import channels, integrations, ops
from gdn_codegen.integrations import vllm as plugin
from gdn_codegen.integrations.vllm import kda, layers, sites

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


@pytest.fixture(name="vllm", params=["triton", pytest.param("tilelang", marks=[pytest.mark.long, pytest.mark.slow])])
def stubbed(request, tmp_path, monkeypatch):
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


class OnHost(torch.Tensor):
    """A table that vLLM has on the host: its values may be read, also where tests let no value be read."""

    __torch_function__, tolist = torch._C._disabled_torch_function_impl, torch.Tensor.tolist


def of_prompts(lengths, slots, old, decodes=0):
    """Metadata of a batch without drafts. The first `decodes` sequences have one token each."""
    ends = ints(0, *lengths).cumsum(0, dtype=torch.int32)
    d, here = decodes, torch.tensor(old)
    blocks = (-(-ints(*lengths) // 8)).as_subclass(OnHost)
    return dict(nums_dict={8: {"nums": blocks}},
                num_prefills=len(lengths) - d, num_prefill_tokens=sum(lengths) - d, num_decodes=d, num_decode_tokens=d,
                has_initial_state=here, non_spec_query_start_loc=ends, non_spec_state_indices_tensor=slots,
                prefill_query_start_loc=ends[d:] - d, prefill_state_indices=slots[d:], prefill_has_initial_state=here[d:])


def of_checkpoints(lengths, slots, old, decodes, offsets, at):
    """`of_prompts`, and checkpoints after so many tokens of each sequence, 0 for none, to slots."""
    about, stride = of_prompts(lengths, slots, old, decodes), math.gcd(*offsets)
    counts = [n // stride for n in lengths[decodes:]]
    first = [sum(counts[:n]) for n in range(len(counts) + 1)]
    rows = [0] * decodes + [first[n] + x // stride - 1 if x else 0 for n, x in enumerate(offsets[decodes:])]
    return dict(about, checkpoint=stub.MambaPrefillCheckpointMetadata(ints(*offsets), ints(*at)),
                flashinfer_checkpoint_plan=stub.GDNFlashInferCheckpointPlan(
                    stride, first[-1], torch.tensor(first), torch.tensor(rows)))


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
