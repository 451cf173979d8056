"""The custom ops: what torch checks of them, and torch.compile."""
import shutil
from dataclasses import asdict, astuple

import pytest
import torch
from reference import expected, positional, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.call.request import Request
from gdn_codegen.runtime.targets import runs
from gdn_codegen.runtime.torch_library import gated_delta_rule
from gdn_codegen.schedule import named

pytestmark = pytest.mark.skipif(not runs("triton", "cpu"), reason="needs triton")
NAMES = ("q", "k", "v", "g", "beta")
MODEL = dict(target="triton", chunk_size=16)


def given(lengths=(9, 4), heads=(1, 2), batched=False, **options):
    """A problem, its tensors, and cu_seqlens or None."""
    x = problem(list(lengths), *heads, 32, 32, **options)
    n = len(lengths) if batched else 1
    a = [x[m].reshape(n, -1, *x[m].shape[1:]) for m in NAMES]
    return x, a, None if batched else torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def words(output_final_state=True, chunk_size=16, **options):
    """An op's options after its tensors."""
    return 0.2, *astuple(Request(output_final_state, target="triton", chunk_size=chunk_size, **options))


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), dict(output_final_state=False), dict(decode=True, chunk_size=None)])
@pytest.mark.parametrize("batched", [False, True])
def test_opcheck(options, batched):
    x, a, cu = given((6, 6), batched=batched)
    asked = asdict(Request(target="triton", **{"output_final_state": True, "chunk_size": 16, **options}))
    arguments = positional(gated_delta_rule, a, initial_state=x["S"], cu_seqlens=cu, scale=0.2, **asked)
    torch.library.opcheck(gated_delta_rule, arguments)


def model(q, k, v, g, beta, S, cu):
    o, final = chunk_gated_delta_rule(q * 1, k, v, g, beta, None, S, True, cu_seqlens=cu, **MODEL)
    return o.float() + 1, final * 2


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_and_equal(backend, batched):
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed, lengths in enumerate(((7, 7), (20, 20))):  # another length is another graph at most
        x, a, cu = given(lengths, batched=batched, seed=seed)
        want, got = model(*a, x["S"], cu), compiled(*a, x["S"], cu)
        assert all(torch.equal(w, c) for w, c in zip(want, got, strict=True))
        o, S = expected(x)
        assert rms_error(got[0].reshape(o.shape) - 1, o) < 5e-3 and rms_error(got[1] / 2, S) < 5e-3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled_by_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    op = lambda *b: chunk_gated_delta_rule(*b, output_final_state=True, **MODEL)
    a = given()[1]
    assert all(torch.equal(w, c) for w, c in zip(op(*a), torch.compile(op, fullgraph=True)(*a), strict=True))


@pytest.mark.slow
def test_lengths_may_be_symbols():
    graphs = []
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=lambda g, _: graphs.append(g) or g.forward)
    for lengths in ((7, 9), (20, 3), (5, 30)):
        x, a, cu = given(lengths)
        assert all(torch.equal(w, c) for w, c in zip(model(*a, x["S"], cu), compiled(*a, x["S"], cu), strict=True))
    assert len(graphs) == 1
    assert [n.target for n in graphs[0].graph.nodes if "gdn_codegen" in str(n.target)] == [
        torch.ops.gdn_codegen.gated_delta_rule.default]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta, S, cu):
            return chunk_gated_delta_rule(q, k, v, g, beta, None, S, True, cu_seqlens=cu, **MODEL)
    x, a, cu = given()
    program = torch.export.export(Layer(), (*a, x["S"], cu), strict=strict)
    assert all(torch.equal(w, c) for w, c in zip(Layer()(*a, x["S"], cu), program.module()(*a, x["S"], cu), strict=True))


def test_a_decoding_step_compiled():
    step = lambda *a: recurrent_gated_delta_rule(*a[:5], None, a[5], True, target="triton")
    x, a, _ = given((3, 3), batched=True)
    for w, c in zip(step(*a, x["S"]), torch.compile(step, fullgraph=True, backend="aot_eager")(*a, x["S"]), strict=True):
        assert torch.equal(w, c)


def test_nothing_is_read_and_shapes_come_from_shapes():
    """On fake tensors, which hold no values: N, T and heads are all it takes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    x, a, cu = given((9, 4))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (*a, x["S"], cu)]
        o, S = gated_delta_rule(*fake[:5], None, None, fake[5], *[None] * 4, fake[6], *words())
    assert (o.shape, o.dtype, S.shape, S.dtype) == (a[2].shape, torch.float16, (2, 2, 32, 32), torch.float32)


def test_callers_functions_take_fake_tensors_too():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    x, a, cu = given((9, 4))
    model(*a, x["S"], cu)  # what real tensors of these kinds settled is not for fake ones
    with FakeTensorMode() as mode:
        o, S = model(*[mode.from_tensor(t) for t in (*a, x["S"], cu)])
    assert isinstance(o, FakeTensor) and isinstance(S, FakeTensor) and o.shape == a[2].shape and S.shape == (2, 2, 32, 32)


def test_whoever_traces_plain_tensors_sees_the_op():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    x, a, cu = given((9, 4))
    want = model(*a, x["S"], cu)
    graph = make_fx(model)(*a, x["S"], cu)
    assert any(n.target is torch.ops.gdn_codegen.gated_delta_rule.default for n in graph.graph.nodes)
    assert all(torch.equal(t, y) for t, y in zip(graph(*a, x["S"], cu), want, strict=True))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(*a, x["S"], cu)[0].shape == a[2].shape
    assert all(torch.equal(t, y) for t, y in zip(model(*a, x["S"], cu), want, strict=True))


def test_a_schedule_in_a_graph_has_a_name():
    a = given()[1]
    op = lambda s: lambda *b: chunk_gated_delta_rule(*b, schedule=s, **MODEL)[0]
    run = lambda s: torch.compile(op(s), fullgraph=True, backend="eager")(*a)
    assert rms_error(run("replay")[0], run(None)[0]) < 5e-3
    with pytest.raises(Exception, match=r"the Schedule replay under torch\.compile"):
        run(named("replay"))
