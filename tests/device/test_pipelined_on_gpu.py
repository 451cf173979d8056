"""Parts that follow one another on a Hopper GPU, with kernels of two parts side by side. Run with: pytest -m device"""
from dataclasses import replace

import pytest
import torch
from test_walks_of_members_on_gpu import Walks

from gdn_codegen import chunk_kda
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, strictly_lower, unit_lower_inverse
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.load import module
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

pytestmark = [pytest.mark.device, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not runs("tilelang", "cuda"),
    reason="needs a Hopper GPU and TileLang")]
EARLY = {"v_block": 64, "agents": "early_outputs"}
RESIDUALS = {"kimi_delta_attention": "@update", "gated_delta_rule_2": "@update", "rwkv7": "@right_side,@solution"}
#: Sequences, heads of k, value heads.
CALLS = [((2500,), 2, 4), ((700, 33, 0, 1, 900, 64), 1, 3)]


def run(b, x, span=0):
    """What the module of `b` gives, with parts of `span` chunks, its own where 0. All other memory is NaN before."""
    m = module(b)
    m.HOST.poison, m.HOST.part_chunks, m.HOST.plans = True, span, {}
    given = {n: y[None] if y.ndim > 1 else y for n, y in x.x.items()} | {"cu_seqlens": x.ends, "output_final_state": True}
    return [y.clone() for y in getattr(m, b.function)(**given, initial_state=x.S.clone())]


@pytest.mark.parametrize("page, dtype, K, V", [
    *((page, "bfloat16", 128, 128) for page in ("kimi_delta_attention", "gated_delta_rule_2", "gla", "delta_rule")),
    ("rwkv7", "bfloat16", 64, 64), ("kimi_delta_attention", "float16", 64, 128), ("kimi_delta_attention", "bfloat16", 128, 64)])
def test_results_have_the_bits_of_whole_walks(page, dtype, K, V):
    """Parts of one to all chunks, ragged tails, empty sequences, shared heads. Each call of each length of parts, again and again
    beside others, so that kernels meet in different order."""
    fields = {**EARLY, **({"residuals": RESIDUALS[page]} if page in RESIDUALS else {})}
    whole = Build("tilelang", 64, algorithm=page, dtype=dtype, head_dim_k=K, head_dim_v=V, arch="sm_90a",
                  schedule=varied("operand_walk", "sm_90a", **fields))
    parts = replace(whole, schedule=varied("operand_walk", "sm_90a", partition="pipelined", **fields))
    for what in CALLS:
        x = Walks(page, (*what, {}), dtype, K, V)
        want = run(whole, x)
        x.near(lambda x=x: run(parts, x, 3))
        for span in (1, 2, 3, 7, 16, 40, 0):
            for _ in range(5):
                assert all(map(torch.equal, run(parts, x, span), want)), (what, span)


@pytest.mark.parametrize("page, chunk, schedule, fields", [
    ("kimi_delta_attention", 16, "operand_walk", {"stages": 3}), ("kimi_delta_attention", 32, "operand_walk", {"v_block": 64}),
    ("kimi_delta_attention", 64, "operand_walk", {}), ("gated_delta_rule", 64, "walk", {"value_heads": 2}),
    ("gated_delta_rule", 64, "walk", {"value_heads": 4}), ("gated_delta_rule", 64, "fused_walk", {})])
def test_other_schedules(page, chunk, schedule, fields):
    whole = Build("tilelang", chunk, algorithm=page, dtype="bfloat16", arch="sm_90a",
                  schedule=varied(schedule, "sm_90a", **fields))
    parts = replace(whole, schedule=varied(schedule, "sm_90a", partition="pipelined", **fields))
    x = Walks(page, ((700, 33, 0, 1, 900, 64), 1, 4, {}), "bfloat16", 128, 128)
    want = run(whole, x)
    for span in (1, 2, 5, 0):
        assert all(map(torch.equal, run(parts, x, span), want)), span


@algorithm(r="C K", w="C K", x="C V", f="HV C K", t="C", A=carried("K V"), B=carried("K V"))
def two_memories(r, w, x, f, t, A, B):
    """Two states: a delta rule with a gate for each channel, and a sum that halves with each chunk."""
    F = cumsum(f)
    T = unit_lower_inverse(strictly_lower(t[:, None] * decayed_product(w, w, F)))
    U = T @ (t[:, None] * (x - (exp(F) * w) @ A))
    y = (exp(F) * r) @ A + decayed_product(r, w, F) @ U + r @ B
    A = exp(last(F))[:, None] * A + (exp(last(F)[None, :] - F) * w).T @ U
    B = 0.5 * B + w.T @ x
    return y, A, B


def test_two_states_of_a_page_of_ones_own():
    """Names of its own, gates for each channel, and both states handed on: the bits of whole walks."""
    gen = torch.Generator("cuda").manual_seed(0)

    def drawn(*dims):
        return torch.randn(1, 1500, 4, *dims, generator=gen, device="cuda")
    r, w = (torch.nn.functional.normalize(drawn(128), dim=-1).bfloat16() for _ in range(2))
    given = {"r": r, "w": w, "x": drawn(128).bfloat16(), "f": -0.1 * torch.sigmoid(drawn(128)), "t": torch.sigmoid(drawn())}
    results = []
    for span, fields in ((0, {}), (1, {"partition": "pipelined"}), (5, {"partition": "pipelined"})):
        b = Build("tilelang", 64, algorithm=two_memories, dtype="bfloat16", arch="sm_90a",
                  schedule=varied("operand_walk", "sm_90a", v_block=64, **fields))
        m = module(b)
        m.HOST.poison, m.HOST.part_chunks, m.HOST.plans = True, span, {}
        states = {name: torch.ones(2, 4, *dims, device="cuda") for name, dims in m.HOST.tables.initial}
        assert len(states) == 2
        results.append(getattr(m, b.function)(**given, **states, output_final_state=True,
                                              cu_seqlens=torch.tensor([0, 400, 1500], device="cuda")))
    assert all(y.isfinite().all() for y in results[0])
    assert all(torch.equal(y, w) for got in results[1:] for y, w in zip(got, results[0], strict=True))


@pytest.mark.parametrize("words", ["state=pool/in_place", "state=pool", "state=vk/bfloat16/pool/in_place"])
def test_pools_with_sequences_that_are_left_out(words):
    """Slots that no sequence has stay as they are, and so do those of a sequence with slot -1, whose rows of o are zero."""
    x = Walks("kimi_delta_attention", ((300, 500, 0, 130), 2, 4, {}), "bfloat16", 128, 128)
    results = []
    for fields in ({}, {"partition": "pipelined"}):
        b = Build("tilelang", 64, algorithm="kimi_delta_attention", dtype="bfloat16", arch="sm_90a",
                  contract=Contract.parse(words), schedule=varied("operand_walk", "sm_90a", **EARLY, **fields))
        m = module(b)
        m.HOST.poison, m.HOST.part_chunks, m.HOST.plans = True, 2 if fields else 0, {}
        slots = torch.tensor([3, -1, 5, 2], dtype=torch.int32, device="cuda")
        pool = torch.full((7, *x.S.shape[1:]), 7.0, device="cuda", dtype=torch.bfloat16 if "bfloat16" in words else torch.float32)
        pool[[3, 5, 2]] = x.S[[0, 2, 3]].to(pool.dtype)
        given = {n: y[None] if y.ndim > 1 else y for n, y in x.x.items()} | {"cu_seqlens": x.ends, "state_indices": slots}
        final = {} if "in_place" in words else {"final_state": torch.full_like(pool, 7.0)}
        o = getattr(m, b.function)(**given, initial_state=pool, **final)[0]
        results.append((o, final.get("final_state", pool)))
    (o, states), (got, kept) = results
    assert torch.equal(o, got) and torch.equal(states, kept) and (got[0, 300:800] == 0).all() and (kept[[0, 1, 4, 6]] == 7).all()


def test_calls_that_follow_one_another():
    """Without a wait of the host between them, with inputs that change in between, on two streams, and in a CUDA graph."""
    b = Build("tilelang", 64, algorithm="kimi_delta_attention", dtype="bfloat16", arch="sm_90a",
              contract=Contract.parse("g=floored"), schedule=varied("operand_walk", "sm_90a", partition="pipelined", **EARLY))
    whole = replace(b, schedule=varied("operand_walk", "sm_90a", **EARLY))
    cases = [Walks("kimi_delta_attention", ((2100,), 8, 8, {}), "bfloat16", 128, 128) for _ in range(3)]
    for n, x in enumerate(cases):
        x.x["v"] = x.x["v"].roll(n + 1, 0)
    wants = [run(whole, x) for x in cases]
    m = module(b)
    m.HOST.poison, m.HOST.part_chunks, m.HOST.plans = False, 4, {}
    given = {n: y[None].clone() for n, y in cases[0].x.items()}

    def call(given):
        return getattr(m, b.function)(**given, initial_state=cases[0].S, output_final_state=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    owned = [{n: y.clone() for n, y in given.items()} for _ in streams]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for n, x in enumerate(cases):
            for stream, mine in zip(streams, owned, strict=True):
                with torch.cuda.stream(stream):
                    mine["v"].copy_(x.x["v"][None])
                    got.append((n, call(mine)))
                    mine["v"].fill_(float("nan"))  # the next kernel of the stream, which no kernel of the call may overlap
    torch.cuda.synchronize()
    assert all(torch.equal(y, w) for n, results in got for y, w in zip(results, wants[n], strict=True))
    with torch.cuda.stream(streams[0]):
        call(given)
    streams[0].synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(given)
    for n in (0, 1, 2, 1, 0):
        given["v"].copy_(cases[n].x["v"][None])
        graph.replay()
        assert all(map(torch.equal, results, wants[n])), n


def test_a_graph_around_calls():
    """The first kernel of a call comes after a copy, a fill, and the join of two streams; a build that is not in parts follows at
    once in the same memory; lengths change between replays."""
    plan = varied("operand_walk", "sm_90a", **EARLY)
    whole = Build("tilelang", 64, algorithm="kimi_delta_attention", dtype="bfloat16", arch="sm_90a", schedule=plan)
    parts = replace(whole, schedule=varied("operand_walk", "sm_90a", partition="pipelined", part_chunks=3, **EARLY))
    x = Walks("kimi_delta_attention", ((1100, 500), 8, 8, {}), "bfloat16", 128, 128)
    ends = (0, 1100, 1600), (0, 64, 1600), (0, 1600, 1600), (0, 0, 1)
    lengths = [torch.tensor(y, dtype=torch.int32, device="cuda") for y in ends]
    given = {n: y[None].clone() for n, y in x.x.items()} | {"cu_seqlens": lengths[0].clone(), "initial_state": x.S.clone()}
    source, m, other = given["v"].clone(), module(parts), module(whole)
    for y in (m, other):
        y.HOST.poison, y.HOST.plans = False, {}

    def call(y, **more):
        return getattr(y, parts.function)(**{**given, **more}, output_final_state=True)
    wants = [[z.clone() for z in call(other, v=2 * source, cu_seqlens=y)] for y in lengths]
    side, main = torch.cuda.Stream(), torch.cuda.Stream()

    def both():
        given["v"].fill_(float("nan"))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.add(source, source, out=given["v"])
        torch.cuda.current_stream().wait_stream(side)
        first = call(m)
        second = call(other)
        given["v"].fill_(float("nan"))
        given["v"].copy_(2 * source)
        return first, second, call(m)
    with torch.cuda.stream(main):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    for n in (0, 1, 2, 3, 2, 1, 0):
        given["cu_seqlens"].copy_(lengths[n])
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for got in results for y, w in zip(got, wants[n], strict=True)), n


def test_the_op_takes_them(monkeypatch, capfd):
    """After its self-check, which has parts of one and two chunks."""
    monkeypatch.setenv("GDN_DEBUG", "1")
    choose.kept_choice.cache_clear()
    x = Walks("kimi_delta_attention", ((2048,), 12, 12, {}), "bfloat16", 128, 128)
    given = {n: y[None] for n, y in x.x.items()}

    def call():
        return chunk_kda(**given, initial_state=x.S, output_final_state=True, target="tilelang")
    call()
    assert "_pipelined" in capfd.readouterr().err
    x.near(call)
