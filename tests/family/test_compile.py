"""Ops of members as torch ops: what torch checks of them, and torch.compile."""
import pytest
import torch
from test_mamba import given

from gdn_codegen import chunk_delta_rule, chunk_lightning_attn, chunk_simple_gla, mamba_chunk_scan_combined
from gdn_codegen.runtime.member_library import TAKEN, member
from gdn_codegen.runtime.targets import runs

pytestmark = pytest.mark.skipif(not runs("triton", "cpu"), reason="needs triton")


def qkv(tokens, rows=1):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, tokens, h, 32, generator=gen).half() / 8 for h in (1, 1, 2))
    return q, k, v, torch.rand(rows, tokens, 2, generator=gen)


def delta(tokens):
    q, k, v, beta = qkv(tokens)
    return chunk_delta_rule, (q, k, v, beta), dict(output_final_state=True, cu_seqlens=torch.tensor([0, 3, tokens]))


def gla(tokens):
    q, k, v, beta = qkv(tokens, 2)
    return chunk_simple_gla, tuple(x.transpose(1, 2).contiguous() for x in (q, k, v, -beta)), dict(layout="bhtd")


def lightning(tokens):
    return chunk_lightning_attn, qkv(tokens)[:3], dict(layer_idx=1, num_layers=4, output_final_state=True,
                                                      initial_state=torch.randn(1, 2, 32, 32))


def mamba(tokens):
    x = given(tokens, rows=2)
    return mamba_chunk_scan_combined, (), dict(x, dt_softplus=True, return_final_states=True)


@pytest.mark.slow
@pytest.mark.parametrize("made", [delta, gla, lightning, mamba])
def test_compiled_whole_and_equal(made):
    torch._dynamo.reset()
    op = torch.compile(made(9)[0], fullgraph=True, backend="aot_eager")
    for tokens in (9, 20):
        f, a, named = made(tokens)
        want, got = f(*a, **named, target="triton"), op(*a, **named, target="triton")
        assert len(want) == len(got) and all(w is None and c is None or torch.equal(w, c) for w, c in zip(want, got, strict=True))


@pytest.mark.slow
def test_opcheck():
    q, k, v, _ = qkv(7)
    said = {n: default for n, (_, default) in TAKEN.items()} | dict(output_final_state=True, target="triton",
                                                                    initial_state=torch.randn(1, 2, 32, 32))
    torch.library.opcheck(member, ("lightning_attention", [q, k, v, torch.zeros(2)], ["q", "k", "v", "g"], None, "", [], False,
                                   *said.values()))
    a, state = given(7, rows=2), torch.randn(2, 4, 64, 32)
    said |= dict(initial_state=state, state_v_first=True, output_final_state=False)
    torch.library.opcheck(member, ("mamba2", [a[n] for n in ("C", "B", "x", "dt", "A")] + [None, a["dt_bias"]],
                                   ["q", "k", "v", "dt", "A", "D", "dt_bias"], None, "dt=softplus", ["v", "x"], False,
                                   *said.values()))


@pytest.mark.slow
def test_fake_tensors_give_shapes():
    q, k, v, beta = qkv(5)
    with torch._subclasses.FakeTensorMode() as mode:
        o, final = chunk_delta_rule(*map(mode.from_tensor, (q, k, v, beta)), output_final_state=True, state_v_first=True)
    assert (o.shape, o.dtype, final.shape, final.dtype) == (v.shape, v.dtype, (1, 2, 32, 32), torch.float32)


def test_other_arguments_break_the_graph():
    q, k, v, beta = qkv(5)
    def f(q):
        return chunk_delta_rule(q * 1, k, v, beta, out=torch.empty_like(v), target="triton")[0] + 1
    torch._dynamo.reset()
    assert torch.equal(torch.compile(f, backend="eager")(q), f(q))


def test_a_wrong_rank_is_said_by_the_callers_name():
    q, k, v, beta = qkv(5)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"beta: got rank 4; accepted: rank 3"):
        torch.compile(lambda q: chunk_delta_rule(q, k, v, beta[..., None]), fullgraph=True, backend="eager")(q)
