"""Ops of members as torch ops under torch.compile; what torch checks of them is in features.py."""
import pytest
import torch
from test_mamba import given

from gdn_codegen import chunk_delta_rule, chunk_lightning_attn, chunk_simple_gla, mamba_chunk_scan_combined
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import named

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
    op = torch.compile(made(9)[0], fullgraph=True, backend="aot_eager")
    for tokens in (9, 20):
        f, a, named = made(tokens)
        want, got = f(*a, **named, target="triton"), op(*a, **named, target="triton")
        assert len(want) == len(got) and all(w is None and c is None or torch.equal(w, c) for w, c in zip(want, got, strict=True))


@pytest.mark.slow
def test_fake_tensors_give_shapes():
    q, k, v, beta = qkv(5)
    with torch._subclasses.FakeTensorMode() as mode:
        o, final = chunk_delta_rule(*map(mode.from_tensor, (q, k, v, beta)), output_final_state=True, state_v_first=True)
    assert (o.shape, o.dtype, final.shape, final.dtype) == (v.shape, v.dtype, (1, 2, 32, 32), torch.float32)


def test_a_wrong_rank_is_said_by_the_callers_name():
    q, k, v, beta = qkv(5)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"beta: got rank 4; accepted: rank 3"):
        torch.compile(lambda q: chunk_delta_rule(q, k, v, beta[..., None]), fullgraph=True, backend="eager")(q)


def test_a_schedule_of_ones_own_needs_a_name():
    q, k, v, beta = qkv(5)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the Schedule staged under torch"):
        torch.compile(lambda q: chunk_delta_rule(q, k, v, beta, schedule=named("staged")), fullgraph=True, backend="eager")(q)


def test_lengths_may_be_symbols():
    """One graph for all lengths; the final state is in the caller's buffer."""
    graphs, mine = [], torch.empty(1, 2, 32, 32)

    def f(q, k, v, beta):
        return chunk_delta_rule(q, k, v, beta, final_state=mine, target="triton", chunk_size=16)[0] + 0
    op = torch.compile(f, fullgraph=True, dynamic=True, backend=lambda g, _: graphs.append(g) or g.forward)
    for tokens in (5, 9, 20):
        x = qkv(tokens)
        o = op(*x)
        want, state = chunk_delta_rule(*x, output_final_state=True, target="triton", chunk_size=16)
        assert torch.equal(o, want) and torch.equal(mine, state)
    assert [n.target for n in graphs[0].graph.nodes if "gdn_codegen" in str(n.target)] == [
        torch.ops.gdn_codegen.member_into.default] and len(graphs) == 1
