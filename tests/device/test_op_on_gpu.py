"""The package's op on a CUDA GPU, with what it chooses: torch's checks, graphs, streams. Run with: pytest -m device"""
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from guarded import TENSORS, every_way
from reference import expected, positional, problem, rms_error

from gdn_codegen import ops
from gdn_codegen.ops import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.call import launch, native_launcher
from gdn_codegen.runtime.call.request import Request
from gdn_codegen.runtime.targets import runs
from gdn_codegen.runtime.torch_library import gated_delta_rule
from gdn_codegen.targets import OWN

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in OWN if t != "pto" and runs(t, "cuda")]
NAMES = ("q", "k", "v", "g", "beta")
LENGTHS = (130, 64, 1, 300)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Settled calls do not go through Python because the native launcher is still being compiled."""
    native_launcher.ready(Path("nothing was compiled ahead"), wait=True)


def given(lengths=LENGTHS, seed=0, **options):
    """A problem and its tensors on the GPU: inputs, state, cu_seqlens."""
    x = problem(list(lengths), 2, 4, 128, 128, gate=-0.05, seed=seed, **options)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return x, [x[n][None].cuda() for n in NAMES], x["S"].cuda(), ends.cuda()


def run(target, a, S, ends):
    return chunk_gated_delta_rule(*a, initial_state=S, output_final_state=True, cu_seqlens=ends, target=target)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("target", HERE)
def test_opcheck(target, packed):
    _, a, S, ends = given((64, 64))
    if not packed:
        a, ends = [t.view(2, 64, *t.shape[2:]) for t in a], None
    asked = asdict(Request(output_final_state=True, target=target))
    arguments = positional(gated_delta_rule, a, initial_state=S, cu_seqlens=ends, scale=128 ** -0.5, **asked)
    torch.library.opcheck(gated_delta_rule, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("target", HERE)
def test_compiled_whole_and_equal(target, backend):
    def model(a, S, ends):
        o, final = run(target, [a[0] * 1, *a[1:]], S, ends)
        return o * 1, final * 1

    for seed in (0, 1):
        x, *there = given(seed=seed)
        want, got = model(*there), torch.compile(model, fullgraph=True, backend=backend)(*there)
        assert all(torch.equal(w, c) for w, c in zip(want, got, strict=True))
        o, S = expected(x)
        assert rms_error(got[0][0].cpu(), o) < 5e-3 and rms_error(got[1].cpu(), S) < 5e-3


@pytest.mark.parametrize("tokens", [495, 9000])  # of the latter a sequence in parts
@pytest.mark.parametrize("target", HERE)
def test_a_graph_holds_a_packed_call(target, tokens):
    """Captured after one call, and replayed on other values and other lengths."""
    lengths = (*LENGTHS[:3], tokens - 195)
    _, a, S, ends = given(lengths)
    run(target, a, S, ends)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(target, a, S, ends)
    for shift in (1, 77):
        for t in a:
            t.copy_(t.roll(shift, 1))
        ends[1:-1] -= shift // 7
        want = run(target, a, S, ends)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, want, strict=True)) and want[0].isfinite().all()


@pytest.mark.parametrize("target", HERE)
def test_the_same_bits_on_any_stream_and_in_any_place(target):
    """Inputs stay as they are, and a sequence gives what it gives in another place of its pack."""
    _, a, S, ends = given((300, 300, 300))
    kept = [t.clone() for t in (*a, S, ends)]
    want = run(target, a, S, ends)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            got = run(target, a, S, ends)
        torch.cuda.synchronize()
        assert all(torch.equal(w, x) for w, x in zip(want, got, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((*a, S, ends), kept, strict=True))
    order = torch.tensor([2, 0, 1], device="cuda")
    turned = [t.view(1, 3, 300, *t.shape[2:])[:, order].reshape(t.shape) for t in a]
    o, final = run(target, turned, S[order], ends)
    assert torch.equal(o.view(3, 300, *o.shape[2:]), want[0].view(3, 300, *o.shape[2:])[order])
    assert torch.equal(final, want[1][order])


@pytest.mark.parametrize("packed, poison", [(False, True), (True, False)])  # workspaces as they come, or full of NaN
@pytest.mark.parametrize("tokens", [495, 9000])
@pytest.mark.parametrize("target", HERE)
def test_a_settled_call_is_one_compiled_function(target, packed, poison, tokens, monkeypatch):
    """It gives the bits that the way through Python gives, for other values too."""
    lengths = (*LENGTHS[:3], tokens - 195) if packed else (tokens,)
    problems = [given(lengths, seed) for seed in (0, 1)]
    launch.forget()
    want = []
    for _, a, S, ends in problems:
        want.append(run(target, a, S, ends if packed else None))
        (one,) = launch._kept.values()
        launch.forget()
    if target == "triton" and (torch.version.hip or one.module._launcher.descriptors):
        pytest.skip("these kernels start from Python")
    monkeypatch.setattr(one.module.HOST, "poison", poison)
    for _ in range(2):
        run(target, *problems[0][1:3], problems[0][3] if packed else None)
    monkeypatch.setattr(launch, "eager", lambda *a: pytest.fail("settled again"))
    monkeypatch.setattr(ops, "eager", launch.eager)
    for _ in range(3):
        for (_, a, S, ends), w in zip(problems, want, strict=True):
            got = run(target, a, S, ends if packed else None)
            assert all(torch.equal(x, y) for x, y in zip(got, w, strict=True)) and w[0].isfinite().all()


@pytest.mark.parametrize("target", HERE)
def test_a_sequence_alone_has_the_bits_that_it_has_among_many(target):
    """With batch_invariant=True. On Hopper a call with few walks has blocks of columns (`Lowering.columns`)."""
    _, a, S, ends = given((300, 64, 1, 517) * 12)
    said = dict(output_final_state=True, batch_invariant=True, target=target)
    want = chunk_gated_delta_rule(*a, initial_state=S, cu_seqlens=ends, **said)
    for n in (0, 1, 2, 3, 47):
        first, end = ends[n:n + 2].tolist()
        o, final = chunk_gated_delta_rule(*(t[:, first:end] for t in a), initial_state=S[n:n + 1], **said)
        assert torch.equal(o, want[0][:, first:end]) and torch.equal(final[0], want[1][n])


@pytest.mark.parametrize("target", HERE)
def test_states_at_ends_of_chunks(target):
    """Kernels write them to slots as they pass (`aligned_positions`); without the promise a second call does. Both are near
    float64, and final states are the same bits, for the same chunk."""
    lengths, own = (300, 64, 1, 517), torch.tensor([3, 0, 1, 2], dtype=torch.int32, device="cuda")
    x, a, S, ends = given(lengths)
    at, to = [[64, 256], [64, 0], [0, 0], [512, 128]], [[5, 6], [7, -1], [-1, -1], [8, 9]]
    positions, slots = (torch.tensor(y, device="cuda") for y in (at, to))
    pools = [torch.full((11, *S.shape[1:]), float("nan"), device="cuda") for _ in range(2)]
    for pool, aligned in zip(pools, (True, False), strict=True):
        pool[own] = S
        chunk_gated_delta_rule(*a, initial_state=pool, state_indices=own, cu_seqlens=ends, checkpoint_positions=positions,
                               checkpoint_slots=slots, aligned_positions=aligned, chunk_size=64, target=target)
        for n, first in enumerate(ends[:-1].tolist()):
            for p, slot in zip(at[n], to[n], strict=True):
                if slot >= 0:
                    part = {i: x[i][first:first + p] for i in NAMES}
                    want = expected({**x, **part, "lengths": [p], "S": x["S"][n:n + 1]})[1]
                    assert rms_error(pool[slot].cpu(), want[0]) < 5e-3, (aligned, n, p)
        assert pool[[4, 10]].isnan().all()
    assert torch.equal(pools[0][own], pools[1][own])


def step(sequences, packed=False, seed=0):
    """A decoding step on the GPU: a token for each sequence, raw gates, and a pool of states."""
    g = torch.Generator("cuda").manual_seed(seed)
    rand = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, generator=g, device="cuda").to(dtype)
    rows = (1, sequences) if packed else (sequences, 1)
    x = dict(q=rand(*rows, 4, 128), k=rand(*rows, 4, 128), v=rand(*rows, 8, 128), g=rand(*rows, 8), beta=rand(*rows, 8),
             A_log=rand(8, dtype=torch.float32), dt_bias=rand(8, dtype=torch.float32),
             initial_state=rand(sequences + 3, 8, 128, 128),
             state_indices=torch.randperm(sequences + 3, generator=g, device="cuda")[:sequences].int())
    return dict(x, cu_seqlens=torch.arange(sequences + 1, dtype=torch.int32, device="cuda")) if packed else x


def decode(target, x):
    return recurrent_gated_delta_rule(**x, gate="raw", beta_form="sigmoid", use_qk_l2norm_in_kernel=True, state_v_first=True,
                                      output_final_state=True, target=target)


@pytest.mark.skipif(bool(torch.version.hip), reason="these kernels start from Python")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sequences", [1, 64])
@pytest.mark.parametrize("target", HERE)
def test_a_settled_decoding_step_is_one_compiled_function(target, sequences, packed, monkeypatch):
    """On any stream, in a graph and in another thread it gives the bits that the way through Python gives."""
    launch.forget()
    want = [(decode(target, x)[0], x["initial_state"]) for x in (step(sequences, packed, n) for n in range(2))]
    launch.forget()
    for _ in range(2):
        decode(target, step(sequences, packed))
    monkeypatch.setattr(ops, "eager", lambda *a: pytest.fail("the way through Python"))

    def same(n):
        x = step(sequences, packed, n)
        o, state = decode(target, x)
        torch.cuda.current_stream().synchronize()
        return torch.equal(o, want[n][0]) and torch.equal(state, want[n][1]) and state is x["initial_state"]

    assert all(same(n) for n in (0, 1, 0))
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        with torch.cuda.stream(stream):
            assert same(1)
    graph, x, again = torch.cuda.CUDAGraph(), step(sequences, packed, 1), step(sequences, packed, 1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        o, _ = decode(target, x)
    assert torch.equal(x["initial_state"], again["initial_state"])  # nothing ran yet
    graph.replay()
    assert torch.equal(o, want[1][0]) and torch.equal(x["initial_state"], want[1][1])
    monkeypatch.undo()  # a thread without a context of CUDA may go through Python
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(same, 1).result() and pool.submit(same, 0).result()


@pytest.mark.skipif(bool(torch.version.hip), reason="these kernels start from Python")
@pytest.mark.parametrize("target", HERE)
def test_a_settled_decoding_step_takes_little_time_of_the_host(target):
    """As a number of calls of `add_`, because hosts differ by a factor of two. Through Python it is ten."""
    x, y = step(1), torch.zeros(4, device="cuda")
    with torch.inference_mode():
        for _ in range(4):
            decode(target, x)
        us = []
        for f in (lambda: decode(target, x), lambda: y.add_(1)):
            best = float("inf")
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    f()
                best = min(best, time.perf_counter() - start)
            us.append(best * 1e4)
    print(f"{target}: {us[0]:.1f} us, add_ {us[1]:.1f} us")
    assert us[0] < 4 * us[1]


@pytest.mark.parametrize("target", HERE)
def test_nan_stays_in_its_sequence(target):
    _, a, S, ends = given((130, 64, 70, 9000))
    want = run(target, a, S, ends)
    for t in a[:3]:
        t[:, 130:194] = float("nan")
    o, final = run(target, a, S, ends)
    assert torch.equal(o[:, :130], want[0][:, :130]) and torch.equal(o[:, 194:], want[0][:, 194:])
    assert torch.equal(final[[0, 2, 3]], want[1][[0, 2, 3]]) and o[:, 130:194].isnan().all()


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("target", HERE)
def test_nothing_beside_a_tensor_is_touched(target, name):
    """In every way that it can lie in memory; settled calls too."""
    every_way(name, "cuda", sizes=(2, 4, 128, 128), lengths=(70, 0, 5), target=target)


@pytest.mark.parametrize("target", HERE)
def test_nothing_beside_a_pool_is_touched(target):
    every_way("initial_state", "cuda", sizes=(2, 4, 128, 128), lengths=(70, 0, 5), target=target, pool=True)
    every_way("initial_state", "cuda", sizes=(2, 4, 128, 128), lengths=(70, 0, 5), target=target, pool=True, in_place=True)
