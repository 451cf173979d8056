"""Pairs of builds on a Hopper GPU: one with short warm-ups, and one for the calls that it leaves. Run with: pytest -m device"""
from dataclasses import replace

import pytest
import torch
from reference import rms_error
from test_walks_of_members_on_gpu import Walks

from gdn_codegen import chunk_kda
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.load import module
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

pytestmark = [pytest.mark.device, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not runs("tilelang", "cuda"),
    reason="needs a Hopper GPU and TileLang")]
#: Log decays of a token, by head in turn: the largest is half of the number. Of the last a short warm-up has all its chunks.
GATES = {"fast": (-4.0, -1.0), "a slow head": (-2.0, -2.0, -2.0, -0.001), "none": (0.0,), "just fast enough": (-0.0706, -3.0)}
LENGTHS = {"one": (2500,), "several": (1600, 33, 0, 900), "one part": (40,)}


def gates(x, what):
    """Log decays like those of a case."""
    each = torch.tensor(GATES[what], device="cuda")
    each = each[torch.arange(x.shape[1], device="cuda") % len(each)][:, None]
    random = torch.rand(x.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return each * (0.5 + 0.5 * random) if what != "just fast enough" else each.expand(x.shape).contiguous()


def pair(page, accept, halves, dtype="bfloat16", K=128, V=128, **fields):
    about = Build("tilelang", 64, algorithm=page, dtype=dtype, head_dim_k=K, head_dim_v=V, arch="sm_90a",
                  contract=Contract.parse(accept))
    residuals = {"residuals": "@update"} if page != "gla" else {"residuals": "@state,@pair"}
    first = replace(about, chunk=16, schedule=varied("walk_in_turn", "sm_90a", partition="short", **residuals))
    second = varied("operand_walk", "sm_90a", if_declined=True, **({"v_block": 64} if halves else {}), **residuals, **fields)
    return replace(about, schedule=second, earlier=first)


def served(b, x, **more):
    """What the pair gives, and whether the first build declined the call."""
    m, memory = module(b), []
    run = type(m.HOST).run
    m.HOST.run = lambda *args: memory.append(run(m.HOST, *args)) or memory[-1]
    given = {n: y[None] if y.ndim > 1 else y for n, y in x.x.items()} | {"cu_seqlens": x.ends, "output_final_state": True}
    got = getattr(m, b.function)(**{**given, "initial_state": x.S.clone(), **more})
    return got, int(memory[-1][m.TABLES.tensors.index(m.TABLES.declined)])


@pytest.mark.parametrize("page, halves, dtype, K, V, fields", [
    ("kimi_delta_attention", True, "bfloat16", 128, 128, {}), ("kimi_delta_attention", False, "bfloat16", 128, 128, {}),
    ("kimi_delta_attention", True, "bfloat16", 128, 128, {"partition": "decay"}),
    ("kimi_delta_attention", True, "bfloat16", 128, 128, {"partition": "pipelined", "part_chunks": 4, "agents": "early_outputs"}),
    ("kimi_delta_attention", False, "bfloat16", 64, 64, {}), ("gated_delta_rule_2", True, "bfloat16", 128, 128, {}),
    ("gla", True, "bfloat16", 128, 128, {})])
def test_pairs(page, halves, dtype, K, V, fields, monkeypatch):
    """Packs and single sequences, shared key heads, gates that decide either way. All memory is NaN before."""
    b = pair(page, "g=floored", halves, dtype, K, V, **fields)
    m = module(b)
    for host in (m.HOST, m.HOST.earlier):
        monkeypatch.setattr(host, "poison", True)
        monkeypatch.setattr(host, "plans", {})
    for lengths in LENGTHS.values():
        for what in GATES:
            x = Walks(page, (lengths, 2, 4, {}), dtype, K, V)
            x.x["g"] = gates(x.x["g"], what)
            _, declined = served(b, x)
            if page != "gated_delta_rule_2" or what != "just fast enough":  # erasing may make its state grow
                assert declined == (what in ("a slow head", "none") and max(lengths) > 40), (lengths, what)
            x.near(lambda b=b, x=x: served(b, x)[0])


def test_a_pool_in_place():
    """Final states over initial ones, which all parts have to read before."""
    b = pair("kimi_delta_attention", "g=floored,state=pool/in_place", True)
    for what in GATES:
        x = Walks("kimi_delta_attention", ((1600, 33, 0, 900), 2, 4, {}), "bfloat16", 128, 128)
        x.x["g"] = gates(x.x["g"], what)
        slots, pool = torch.tensor([3, 0, 5, 2], dtype=torch.int32).cuda(), torch.empty((7, *x.S.shape[1:]), device="cuda")
        m = module(b)

        def run(m=m, x=x, pool=pool, slots=slots):
            pool.fill_(7.0)
            pool[slots.long()] = x.S
            given = {n: y[None] if y.ndim > 1 else y for n, y in x.x.items()} | {"cu_seqlens": x.ends}
            o = getattr(m, b.function)(**given, initial_state=pool, state_indices=slots)[0]
            return o, pool[slots.long()].clone()
        x.near(run)
        assert (pool[[1, 4, 6]] == 7).all()


def test_what_a_layer_passes():
    """Raw gates, a sigmoid and norms in the kernels; g and beta in 16 bits."""
    b = pair("kimi_delta_attention", "g=safe/bfloat16,beta=sigmoid/bfloat16,q=l2norm,k=l2norm", True)
    for bias, fast in ((1.0, True), (-9.0, False)):
        x = Walks("kimi_delta_attention", ((2100, 300), 2, 2, {}), "bfloat16", 128, 128)
        raw = (torch.randn(x.x["g"].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda") + bias).bfloat16()
        beta = torch.log(x.x["beta"] / (1 - x.x["beta"])).bfloat16()
        rows = {n: (3 * x.x[n]).bfloat16() for n in ("q", "k")}
        x.x |= {"g": -5 * torch.sigmoid(raw.float()), "beta": torch.sigmoid(beta.float())}
        x.x |= {n: y.float() / y.float().norm(dim=-1, keepdim=True) for n, y in rows.items()}
        more = {n: y[None] for n, y in {**rows, "g": raw, "beta": beta}.items()}
        assert served(b, x, **more)[1] == (not fast)
        x.near(lambda b=b, x=x, more=more: served(b, x, **more)[0])


def test_calls_that_dispatch_pairs(monkeypatch, capfd):
    """The op, after its self-check; and a CUDA graph whose inputs change, so that the other build computes the call."""
    monkeypatch.setenv("GDN_DEBUG", "1")
    every = {False: 0, True: 0}  # so few tokens that the recurrence takes a minute
    monkeypatch.setattr("gdn_codegen.targets.tilelang.PAIRED_ALL", every)
    choose.kept_choice.cache_clear()
    T, H = 2048, 4
    x = Walks("kimi_delta_attention", ((T,), H, H, {}), "bfloat16", 128, 128)
    given = {n: y[None].clone() for n, y in x.x.items()}

    def call():
        return chunk_kda(**given, initial_state=x.S, output_final_state=True, safe_gate=True, target="tilelang")
    call()
    assert "_short_" in capfd.readouterr().err
    results = {}
    for what in GATES:
        x.x["g"] = gates(x.x["g"], what)
        given["g"].copy_(x.x["g"][None])
        x.near(call)
        results[what] = [y.clone() for y in call()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for what in (*GATES, *reversed(GATES)):
        given["g"].copy_(gates(x.x["g"], what)[None])
        graph.replay()
        assert all(map(torch.equal, got, results[what])), what
    assert rms_error(results["fast"][0], results["none"][0]) > 0.1
