"""SGLang's layers, by a package that has the names, signatures and calls of the real one (stub_of_sglang.py)."""
import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import recurrence, rms_error
from stub_of_sglang import FILES

from gdn_codegen import integrations

sys.path.insert(0, str(Path(__file__).parents[1] / "family"))
import features

H, HV, K, V = 1, 2, 32, 48
LONG = partial(pytest.param, marks=pytest.mark.long)


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """The stub's modules by their last names, and the plug-in, which is not registered yet."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget = lambda: [sys.modules.pop(n) for n in [*sys.modules] if n.split(".")[0] == "sglang"]
    forget()
    integrations.reset()
    linear = "sglang.srt.layers.attention.linear"
    names = ("sglang.srt.utils", "sglang.srt.plugins.hook_registry", f"{linear}.gdn_backend", f"{linear}.kernels.gdn_triton",
             f"{linear}.kernels.kda_triton")
    plug_in = importlib.import_module("gdn_codegen.integrations.sglang")
    for op in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"):
        monkeypatch.setattr(plug_in, op, partial(getattr(plug_in, op), target="triton"))
    yield SimpleNamespace(plug_in=plug_in, **{n.rsplit(".", 1)[1]: importlib.import_module(n) for n in names})
    forget()
    integrations.reset()


class Problem:
    """Tokens of sequences as a layer has them after its convolution, with raw gates, and a pool of slots [HV, V, K] that lie
    apart. lower_bound: of Kimi Delta Attention's gates, whose gates are those of channels; None for Gated DeltaNet's."""

    def __init__(self, lengths, slots, channels=False, lower_bound=None, seed=0):
        gen = torch.Generator().manual_seed(seed)
        r = lambda *s: torch.randn(*s, generator=gen)
        self.lengths, self.slots, self.channels, self.lower_bound = lengths, slots, channels, lower_bound
        T = sum(lengths)
        self.rows = torch.cat([r(T, 2 * H * K), r(T, HV * V)], 1).bfloat16()
        self.rows[:, H * K:2 * H * K] = self.rows[:1, H * K:2 * H * K]  # equal keys
        ba = r(T, HV + HV * (K if channels else 1)).bfloat16()
        self.b, self.a = ba[:, :HV], ba[:, HV:]  # views of one projection, of rank 2
        self.layer = SimpleNamespace(
            A_log=r(HV) - 1, dt_bias=r(HV * K) if channels else r(HV), q_dim=H * K, k_dim=H * K, v_dim=HV * V, num_v_heads=HV,
            head_k_dim=K, head_v_dim=V)
        self.pool = torch.full((9, HV * V * K + 16), 7.0)[:, :-16].unflatten(1, (HV, V, K))
        for slot in slots:
            if slot >= 0:
                self.pool[slot] = r(HV, V, K)
        self.S = self.pool.clone()
        self.ends = torch.tensor([0, *lengths]).cumsum(0).int()
        self.batch = SimpleNamespace(extend_seq_lens_cpu=lengths)
        self.meta = SimpleNamespace(query_start_loc=self.ends, mamba_cache_indices=torch.tensor(slots, dtype=torch.int32),
                                    has_mamba_track_mask=False, replayssm=None, retrieve_parent_token=None)

    def parts(self):
        q, k, v = self.rows.split([H * K, H * K, HV * V], 1)
        return q.view(1, -1, H, K), k.view(1, -1, H, K), v.view(1, -1, HV, V)

    def gates(self, h):
        """The log decays of a value head, [T] or [T, K, 1], in float64."""
        A, bias = self.layer.A_log.double()[h].exp(), self.layer.dt_bias.double().view(HV, -1)[h]
        raw = self.a.double().view(-1, HV, K if self.channels else 1)[:, h] + bias
        g = -A * torch.nn.functional.softplus(raw) if self.lower_bound is None else self.lower_bound * torch.sigmoid(A * raw)
        return g[..., None] if self.channels else g[:, 0]

    def walk(self, n, tokens):
        """o [tokens, HV, V], and the state [HV, V, K] after each token of a sequence. tokens: pairs of a token and its parent; -1
        is the initial state."""
        q, k, v = (x[0].double() for x in self.parts())
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        first, outs, states = sum(self.lengths[:n]), [], []
        for t, parent in tokens:
            o, S = torch.empty(HV, V, dtype=torch.float64), torch.empty(HV, V, K, dtype=torch.float64)
            for h in range(HV):
                before = self.S[self.slots[n], h] if parent < 0 else states[parent][h]
                at, i = slice(first + t, first + t + 1), h * H // HV
                o[h], after = recurrence(q[at, i], k[at, i], v[at, h], self.gates(h)[at], self.b.double().sigmoid()[at, h],
                                         K ** -0.5, before.double().T)
                S[h] = after.T
            outs.append(o)
            states.append(S)
        return torch.stack(outs), states

    def check(self, o, written=(), bound=1e-2):
        """o and the pool beside the recurrence. written: other slots that the call wrote. Returns the states of tokens."""
        assert o.shape == (1, len(self.rows), HV, V)
        found, at = {}, 0
        for n, (length, slot) in enumerate(zip(self.lengths, self.slots, strict=True)):
            mine, at = o[0, at:at + length], at + length
            if slot < 0:
                assert (mine == 0).all()
            elif length:
                want, found[n] = self.walk(n, [(t, t - 1) for t in range(length)])
                assert rms_error(mine, want) < bound and rms_error(self.pool[slot], found[n][-1]) < bound
        rest = [s for s in range(9) if s not in {*self.slots, *written}]
        assert torch.equal(self.pool[rest], self.S[rest])
        return found


LENGTHS, SLOTS = [70, 0, 3, 130, 4], [4, 2, 0, 8, -1]


@pytest.mark.slow
def test_gdn_prefill_with_tracked_states_and_decoding_in_a_padded_batch(sglang):
    assert sglang.plug_in.enable() == sglang.plug_in.enable()
    x = Problem(LENGTHS, SLOTS)
    backend = sglang.gdn_backend.GDNAttnBackend(x.meta)
    assert type(backend.kernel).__name__ == "GeneratedTritonGDNKernel"
    assert isinstance(backend.kernel, sglang.gdn_triton.TritonGDNKernel)
    # as _init_track_ssm_indices: chunks before a sequence, rounded up; states at 64 of 70 and 128 of 130 tokens, and a final one
    vars(x.meta).update(
        has_mamba_track_mask=True, track_ssm_h_src=torch.tensor([1, 3 + 2, 2]), track_ssm_h_dst=torch.tensor([1, 3, 6]),
        track_ssm_final_src=torch.tensor([0]), track_ssm_final_dst=torch.tensor([5]))
    states = x.check(backend.forward_extend(x.layer, x.batch, x.pool, x.rows, x.a, x.b), written=(1, 3, 5, 6))
    assert rms_error(x.pool[1], states[0][63]) < 1e-2 and rms_error(x.pool[3], states[3][127]) < 1e-2
    assert torch.equal(x.pool[5], x.pool[0]) and torch.equal(x.pool[6], x.S[0])
    assert backend.h.dtype == x.pool.dtype
    # one token of each, two rows of padding
    for packed in (True, False):
        y = Problem([1] * 5, [4, 0, 8, -1, -1], seed=1)
        y.pool, y.S, y.layer = x.pool, x.pool.clone(), x.layer
        y.check(sglang.gdn_backend.GDNAttnBackend(y.meta).forward_decode(y.layer, y.pool, y.rows, y.a, y.b, packed))
    served = [f"sglang: TritonGDNKernel.{n}: served: 1" for n in ("extend", "packed_decode", "decode")]
    assert integrations.report() == "\n".join(served)


@pytest.mark.slow
def test_states_before_chunks_are_left_out_where_nothing_is_tracked(sglang):
    sglang.plug_in.enable()
    x = Problem([70, 3], [4, 0])
    backend = sglang.gdn_backend.GDNAttnBackend(x.meta)
    x.check(backend.forward_extend(x.layer, x.batch, x.pool, x.rows, x.a, x.b))
    assert backend.h is None
    q, k, v = x.parts()
    x = Problem([70, 3], [4, 0])  # a call by another caller returns them; inplace_update=False leaves the pool
    _, _, h = backend.kernel.extend(q, k, v, *sglang.gdn_backend.fused_gdn_gating(x.layer.A_log, x.a, x.b, x.layer.dt_bias),
                                    ssm_states=x.pool, cache_indices=x.meta.mamba_cache_indices, query_start_loc=x.ends,
                                    inplace_update=False)
    assert torch.equal(x.pool, x.S) and torch.equal(h[0, 0], x.S[4]) and torch.equal(h[0, 2], x.S[0])
    assert rms_error(h[0, 1], x.walk(0, [(t, t - 1) for t in range(64)])[1][-1]) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("lengths, known", [([70, 3], 70), (torch.tensor([70, 3]), 70), (None, None), ([73], None), ([], None)])
def test_the_op_learns_how_long_the_longest_prompt_is(lengths, known, sglang, monkeypatch):
    """Of GDN by the batch, of KDA by a keyword, where SGLang has one length for each sequence."""
    x, y = Problem([70, 3], [4, 0]), Problem([70, 3], [4, 0], True, -5.0)
    sglang.plug_in.enable()
    found = []
    for op in ("chunk_gated_delta_rule", "chunk_kda"):
        ours = getattr(sglang.plug_in, op)
        monkeypatch.setattr(sglang.plug_in, op, lambda *a, _op=ours, **k: found.append(k["max_seqlen"]) or _op(*a, **k))
    x.batch.extend_seq_lens_cpu = lengths
    backend = sglang.gdn_backend.GDNAttnBackend(x.meta)
    x.check(backend.forward_extend(x.layer, x.batch, x.pool, x.rows, x.a, x.b))
    q, k, v = y.parts()
    y.check(sglang.kda_triton.TritonKDAKernel().extend(
        q, k, v, y.a.view(1, -1, HV, K), y.b[None], ssm_states=y.pool, cache_indices=y.meta.mamba_cache_indices,
        query_start_loc=y.ends, A_log=y.layer.A_log, dt_bias=y.layer.dt_bias, lower_bound=-5.0, beta_is_raw=True,
        extend_seq_lens_cpu=lengths))
    assert found == [known, known] and "left to the host" not in integrations.report()
    x = Problem([70, 3], [4, 0])  # a call by another caller, after that of the layer
    backend.kernel.extend(*x.parts(), *sglang.gdn_backend.fused_gdn_gating(x.layer.A_log, x.a, x.b, x.layer.dt_bias),
                          ssm_states=x.pool, cache_indices=x.meta.mamba_cache_indices, query_start_loc=x.ends)
    assert found[2:] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("channels, tree", [(False, True), (True, False), LONG(False, False), LONG(True, True)])
def test_draft_tokens_in_a_tree_or_a_chain(channels, tree, sglang):
    """As in a CUDA graph for more requests: rows of indices are more than the batch, and the buffer is wider than the drafts."""
    sglang.plug_in.enable()
    parents = torch.tensor([[-1, 0, 0, 1], [0, 0, 1, 2], [0, 0, 0, 0]])
    x = Problem([4, 4, 4], [4, 0, -1], channels, -5.0 if channels else None)
    x.meta.mamba_cache_indices = torch.tensor([4, 0, -1, -1, -1], dtype=torch.int32)
    x.meta.retrieve_parent_token = parents if tree else None
    buffer, rows = torch.full((6, 5, HV, V, K), float("nan")), torch.tensor([2, 5, 0, 1, 3, 4], dtype=torch.int32)
    backend = sglang.gdn_backend.GDNAttnBackend(x.meta)
    if channels:
        x.layer.A_log = x.layer.A_log.view(1, 1, HV, 1)
        verify = sglang.kda_triton.TritonKDAKernel().target_verify
        backend.kernel = SimpleNamespace(target_verify=partial(verify, lower_bound=-5.0, cache_ring=False))
    o = backend.forward_verify(x.layer, x.pool, x.rows, x.a, x.b, buffer, rows, 4)
    x.layer.A_log = x.layer.A_log.flatten()
    assert torch.equal(x.pool, x.S)
    for n in range(2):
        above = [-1, *parents[n, 1:].tolist()] if tree else range(-1, 3)
        want, states = x.walk(n, list(zip(range(4), above, strict=True)))
        assert rms_error(o[0, 4 * n:4 * n + 4], want) < 1e-2 and rms_error(buffer[rows[n], :4], torch.stack(states)) < 1e-2
    assert buffer[[1, 3, 4]].isnan().all() and buffer[:, 4].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("lower_bound", [LONG(None), -5.0])
def test_kda_prefill_and_decoding(lower_bound, sglang):
    sglang.plug_in.enable()
    x = Problem(LENGTHS, SLOTS, True, lower_bound)
    kernel, (q, k, v) = sglang.kda_triton.TritonKDAKernel(), x.parts()
    layer = dict(A_log=x.layer.A_log.view(1, 1, HV, 1), dt_bias=x.layer.dt_bias, lower_bound=lower_bound)
    tracked = torch.full((5, HV, V, K), float("nan"))
    o, h = kernel.extend(
        q=q, k=k, v=v, g=x.a.view(1, -1, HV, K), beta=x.b[None], ssm_states=x.pool, cache_indices=x.meta.mamba_cache_indices,
        query_start_loc=x.ends, **layer, beta_is_raw=True, return_intermediate_states=True, extend_seq_lens_cpu=LENGTHS,
        extend_prefix_lens=x.ends, layer_id=3, track_ssm_h_src=x.ends, track_ssm_h_batch_src=x.ends, num_state_checkpoints=3,
        state_checkpoint_cu_starts=x.ends, state_checkpoint_every_n_tokens=64, state_checkpoint_indices=x.ends,
        is_spec_decode=False, track_state=tracked, track_chunk_idx=torch.tensor([1, -1, 0, 2, -1], dtype=torch.int32))
    states = x.check(o)
    for row, kept, want in ((1, 0, states[0][63]), (2, 2, x.S[0]), (4, None, states[3][63]), (5, 3, states[3][127])):
        assert rms_error(h[0, row], want) < 1e-2 and (kept is None or torch.equal(tracked[kept], h[0, row]))
    assert tracked[[1, 4]].isnan().all()
    y = Problem([1] * 4, [4, 0, 8, -1], True, lower_bound, seed=1)
    y.pool, y.S, y.layer = x.pool, x.pool.clone(), x.layer
    same = dict(**layer, ssm_states=y.pool, cache_indices=y.meta.mamba_cache_indices)
    y.check(kernel.packed_decode(y.rows, y.a.reshape(4, 1, -1), y.b[:, None], scale=K ** -0.5, num_v_heads=HV, head_v_dim=V,
                                 **same))
    y.S = y.pool.clone()
    q, k, v = y.parts()
    y.check(kernel.decode(q, k, v, y.a.view(1, 4, HV, K), y.b[None], query_start_loc=y.ends, **same))
    assert "left to the host" not in integrations.report()


@pytest.mark.slow
def test_no_value_is_read(sglang):
    """So that a CUDA graph can capture every call."""
    sglang.plug_in.enable()
    x, y, z = Problem(LENGTHS, SLOTS), Problem([4, 4], [4, 0]), Problem([70, 3], [4, 0], True)
    vars(x.meta).update(has_mamba_track_mask=True, track_ssm_h_src=torch.tensor([1]), track_ssm_h_dst=torch.tensor([1]),
                        track_ssm_final_src=torch.tensor([0]), track_ssm_final_dst=torch.tensor([5]))
    y.meta.retrieve_parent_token = torch.tensor([[-1, 0, 0, 1], [0, 0, 1, 2]])
    buffer, rows = torch.zeros(3, 5, HV, V, K), torch.tensor([2, 0, 1])
    prompts, drafts = map(sglang.gdn_backend.GDNAttnBackend, (x.meta, y.meta))
    steps, (q, k, v) = sglang.gdn_backend.GDNAttnBackend(Problem([1, 1], [4, -1]).meta), z.parts()
    gates = dict(A_log=z.layer.A_log, dt_bias=z.layer.dt_bias, beta_is_raw=True, lower_bound=-5.0)
    for _ in features.rounds_of_capture():
        prompts.forward_extend(x.layer, x.batch, x.pool, x.rows, x.a, x.b)
        drafts.forward_verify(y.layer, y.pool, y.rows, y.a, y.b, buffer, rows, 4)
        for packed in (True, False):
            steps.forward_decode(y.layer, y.pool, y.rows[:2], y.a[:2], y.b[:2], packed)
        sglang.kda_triton.TritonKDAKernel().extend(
            q, k, v, z.a.view(1, -1, HV, K), z.b[None], ssm_states=z.pool, cache_indices=z.meta.mamba_cache_indices,
            query_start_loc=z.ends, return_intermediate_states=True, track_state=torch.zeros(2, HV, V, K),
            track_chunk_idx=torch.tensor([1, -1]), **gates)
    assert "left to the host" not in integrations.report() and integrations.report().count(": served: ") == 5


def test_what_is_left_to_sglang(sglang):
    sglang.plug_in.enable()
    x = Problem([1, 1], [4, 0])
    backend = sglang.gdn_backend.GDNAttnBackend(x.meta)
    x.meta.replayssm = torch.empty(1)
    with pytest.raises(AssertionError, match="packed_decode of TritonGDNKernel was called"):
        backend.forward_decode(x.layer, x.pool, x.rows, x.a, x.b)
    with pytest.raises(AssertionError, match="decode of TritonGDNKernel was called"):
        backend.forward_decode(x.layer, x.pool.double(), x.rows, x.a, x.b, packed=False)
    x.meta.has_mamba_track_mask = True
    with pytest.raises(AssertionError, match="extend of TritonGDNKernel was called"):
        backend.forward_extend(x.layer, x.batch, x.pool.to(torch.float8_e4m3fn), x.rows, x.a, x.b)
    said = integrations.report()
    assert "packed_decode: left to the host (replayssm_d: got Tensor" in said
    assert "(initial_state: got torch.float64" in said and "(initial_state: got torch.float8_e4m3fn" in said


def test_where_nothing_is_replaced(sglang, monkeypatch):
    theirs = sglang.gdn_triton.TritonGDNKernel
    monkeypatch.setenv("GDN_CODEGEN_SGLANG", "0")
    assert sglang.plug_in.register() == []
    monkeypatch.delenv("GDN_CODEGEN_SGLANG")
    monkeypatch.setattr(sglang.utils, "is_cpu", lambda: True)
    assert sglang.plug_in.enable() == [] and not sglang.hook_registry.HookRegistry.hooks
    monkeypatch.setattr(sglang.utils, "is_npu", lambda: True)
    with pytest.raises(ImportError, match="ascend: got a version without"):  # which is not in this package
        sglang.plug_in.enable()
    assert sglang.gdn_triton.TritonGDNKernel is theirs
    monkeypatch.delattr(sglang.kda_triton, "TritonKDAKernel")
    with pytest.raises(ImportError, match=r"sglang: got a version without what is replaced \(.*TritonKDAKernel.*accepted: one"):
        sglang.plug_in.register()
