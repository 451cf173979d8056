"""States in callers' memory in generated modules: Triton in its interpreter, TileLang by its C backend, PTO in its simulator."""
import re
from dataclasses import replace

import pytest
import torch
from reference import TOLERANCE, expected, in_parts, module, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.pto_sim import PtoSimError
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import ScheduleError, named
from gdn_codegen.schedule.contract import Contract

LENGTHS = [33, 1, 0, 17, 47]
#: A slot a sequence; the fourth is left out.
AT, TO = [4, 0, 6, -1, 2], [1, 5, 0, -1, 3]
K, V = 32, 16


def build(target, text, schedule="replay", how=None, dtype="float16", **options):
    if not runs(target, "cpu"):
        pytest.skip(f"{target} does not run here")
    plan = replace(named(schedule), partition=how, **({"prefetch": "no"} if target == "pto" else {}))
    contract = Contract.parse(f"state={text}")
    return Build(target, 16, schedule=plan, dtype=dtype, head_dim_k=K, head_dim_v=V, contract=contract, **options)


def inputs(lengths=LENGTHS, dtype=torch.float16, seed=0, **options):
    return problem(lengths, 1, 2, K, V, dtype, seed=seed, **options)


def memory(b, x, slots=7, pad=16, seed=3):
    """Slots of noise, a gap between them, and the initial states of `x` where AT says; as the build wants them."""
    vk, dtype = b.contract.state_layout == "vk", getattr(torch, b.contract.state_dtype)
    gen = torch.Generator().manual_seed(seed)
    tile = (V, K) if vk else (K, V)
    each = 2 * K * V
    whole = torch.randn(slots * (each + pad), generator=gen).to(dtype)
    pool = whole.as_strided((slots, 2, *tile), (each + pad, K * V, tile[1], 1))
    S = x["S"].transpose(-1, -2) if vk else x["S"]
    for n, s in enumerate(AT[:len(S)]):
        if s >= 0:
            pool[s] = S[n].to(dtype)
    return pool, whole


def run(fn, x, rest=0, **options):
    """rest: rows of NaN past the last sequence's end."""
    ends = torch.tensor([sum(x["lengths"][:n]) for n in range(len(x["lengths"]) + 1)], dtype=torch.int32)
    args = [torch.cat([x[n], x[n].new_full((rest, *x[n].shape[1:]), float("nan"))])[None] for n in ("q", "k", "v", "g", "beta")]
    return fn(*args, scale=x["scale"], cu_seqlens=ends, **options)


def states_of(b, x):
    """The initial states as the build's memory rounds them, and how they lie."""
    S = x["S"].to(getattr(torch, b.contract.state_dtype))
    return {**x, "S": S.float()}, (S.transpose(-1, -2).contiguous() if b.contract.state_layout == "vk" else S)


def as_kv(b, s):
    return s.transpose(-1, -2) if b.contract.state_layout == "vk" else s


def tolerance(b):
    return max(TOLERANCE[b.dtype], {"float32": 0, "float16": 1e-3, "bfloat16": 4e-3}[b.contract.state_dtype])


FORMS = [("triton", t, s) for t, s in (("vk", "walk"), ("vk/bfloat16", "fused"))]
FORMS += [("pto", "vk/float16", "fused")]  # TileLang's: below, in a pool


@pytest.mark.slow
@pytest.mark.parametrize("target, text, schedule", FORMS)
def test_order_and_dtype(target, text, schedule):
    b = build(target, text, schedule)
    fn = function(b)
    rounded, given = states_of(b, inputs())
    want_o, want_S = expected(rounded)
    o, S = run(fn, rounded, initial_state=given, output_final_state=True)
    assert S.dtype == given.dtype and S.shape == given.shape
    assert rms_error(o[0], want_o) < tolerance(b) and rms_error(as_kv(b, S), want_S) < tolerance(b)
    # into a caller's strided memory, to the bit; nothing where no final state is asked for
    wide = torch.full((len(LENGTHS), 3, *given.shape[2:]), 9.0, dtype=given.dtype)
    o2, S2 = run(fn, rounded, initial_state=given, final_state=wide[:, 1:])
    assert S2.data_ptr() == wide[:, 1:].data_ptr() and torch.equal(S2, S) and torch.equal(o2, o) and (wide[:, 0] == 9).all()
    o3, none = run(fn, rounded, initial_state=given)
    assert none is None and torch.equal(o3, o)
    o4, none = run(fn, {**rounded, "S": None})
    assert rms_error(o4[0], expected({**rounded, "S": None})[0]) < tolerance(b)


ALL = "vk/bfloat16/pool/in_place/checkpoints"
POOLS = [("triton", "pool", "replay", None), ("triton", ALL, "fused", None),
         ("triton", "vk/float16/pool/in_place", "replay", "decay"),
         ("tilelang", ALL, "fused", None), ("tilelang", "pool", "fused", None), ("pto", ALL, "fused", None)]


def pool_is_right(b, fn, monkeypatch):
    """Whether a pool's slots and rows of o are what the recurrence says, and all else is as it was, to the bit."""
    x = inputs()
    x["g"][:, 0] = -1.0
    x = {**x, "S": x["S"].to(getattr(torch, b.contract.state_dtype)).float()}
    want_o, want_S = expected(x)
    ok = True
    for dtype, lent in ((torch.int32, False), (torch.int64, True)):
        pool, whole = memory(b, x)
        before = whole.clone()
        o = torch.full((1, sum(LENGTHS) + 20, 2, V), 5.0, dtype=x["v"].dtype)
        options = {"rest": 20, **({"out": o} if lent else {})}
        new = fn.__globals__["_new"]
        monkeypatch.setitem(fn.__globals__, "_new", lambda like, o=o, new=new: o if like.shape == o.shape else new(like))
        monkeypatch.setattr(fn.__globals__["HOST"], "poison", False)
        at = torch.tensor(AT, dtype=dtype)
        if b.contract.in_place:
            S = run(fn, x, initial_state=pool, state_indices=at, **options)[1]
            ok &= S is pool
            final, now, then = pool, whole, before
        else:
            final, now = memory(b, inputs(seed=9), 8, 32, seed=5)
            then = now.clone()
            S = run(fn, x, initial_state=pool, state_indices=at, final_state=final, **options)[1]
            ok &= S is final and torch.equal(whole, before)
        monkeypatch.undo()
        start = 0
        expect = then.clone().as_strided(final.shape, final.stride())
        for n, length in enumerate(LENGTHS):
            rows = o[0, start:start + length]
            if AT[n] < 0:
                ok &= bool((rows == (5.0 if lent else 0.0)).all())
            else:
                ok &= rms_error(rows, want_o[start:start + length]) < tolerance(b)
                ok &= rms_error(as_kv(b, final[AT[n]]), want_S[n]) < tolerance(b)
                expect[AT[n]] = final[AT[n]]
            start += length
        ok &= bool((o[0, start:] == (5.0 if lent else 0.0)).all())
        ok &= torch.equal(now, expect.as_strided((len(now),), (1,)))
    return ok


@pytest.mark.slow
@pytest.mark.parametrize("target, text, schedule, how", POOLS)
def test_pools(target, text, schedule, how, monkeypatch):
    b = build(target, text, schedule, how)
    fn = in_parts(function(b), 1)
    assert pool_is_right(b, fn, monkeypatch)
    if not b.contract.in_place:  # without memory of a caller, a tensor a sequence
        x = inputs()
        pool, _ = memory(b, x)
        final, _ = memory(b, x, seed=5)
        S = run(fn, x, initial_state=pool, state_indices=torch.tensor(AT), output_final_state=True)[1]
        run(fn, x, initial_state=pool, state_indices=torch.tensor(AT), final_state=final)
        assert S.shape[0] == len(LENGTHS)
        assert all(torch.equal(S[n], final[s]) for n, s in enumerate(AT) if s >= 0)
        assert run(fn, x, initial_state=pool, state_indices=torch.tensor(AT))[1] is None


@pytest.mark.slow
@pytest.mark.parametrize("target, schedule, how", [("triton", "replay", "decay")])
def test_in_place_is_separate_to_the_bit(target, schedule, how):
    x = inputs()
    x["g"][:, 0] = -0.5
    apart, fn = (in_parts(function(build(target, text, schedule, how)), 1) for text in ("float16", "float16/in_place"))
    S = x["S"].half()
    o, want = run(apart, x, initial_state=S, output_final_state=True)
    here = torch.full((len(LENGTHS), 3, K, V), 2.0, dtype=torch.float16)
    for mine in (S.clone(), here[:, 1:]):
        mine.copy_(S)
        o2, same = run(fn, x, initial_state=mine)
        assert same is mine and torch.equal(mine, want) and torch.equal(o, o2)
    assert (here[:, 0] == 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("target, text, schedule, how", [
    ("triton", "vk/bfloat16/checkpoints", "replay", "decay"), ("triton", ALL, "fused", None), ("tilelang", ALL, "fused", None),
    ("pto", ALL, "fused", None)])
def test_checkpoints_are_final_states_of_prefixes(target, text, schedule, how):
    b = build(target, text, schedule, how)
    fn = in_parts(function(b), 1)
    x, given = states_of(b, inputs([1, 31, 32, 33, 66]))
    x["g"][:, 0] = -1.0
    for every in (1, 3) if target == "tilelang" else (2,):
        step = 16 * every
        rows = sum(x["lengths"]) // step
        mine = torch.full((rows, 2, *given.shape[2:]), 3.0, dtype=given.dtype)
        pool = {"state_indices": torch.arange(5)} if b.contract.pool else {}
        asked = {"initial_state": given.clone(), "checkpoint_chunks": every, **pool}
        got = run(fn, x, **asked, state_checkpoints=mine)[2]
        assert got is mine
        start, seen = 0, set()
        for n, length in enumerate(x["lengths"]):
            for i in range(length // step):
                cut = slice(start, start + (i + 1) * step)
                part = {**{k: x[k][cut] for k in ("q", "k", "v", "g", "beta")}, "lengths": [(i + 1) * step], "S": x["S"][n:n + 1]}
                want = expected({**part, "scale": x["scale"]})[1][0]
                assert rms_error(as_kv(b, got[start // step + i]), want) < tolerance(b)
                seen.add(start // step + i)
            start += length
        assert all((got[r] == 3).all() for r in range(rows) if r not in seen)
        if target != "pto":
            fresh = run(fn, x, **asked | {"initial_state": given.clone()})[2]
            assert torch.equal(fresh[sorted(seen)], mine[sorted(seen)])


def test_equal_rows_and_no_checkpoint():
    fn = function(build("triton", "checkpoints"))
    x = inputs([40, 40])
    rows = [x[n].reshape(2, 40, *x[n].shape[1:]) for n in ("q", "k", "v", "g", "beta")]
    _, _, c = fn(*rows, initial_state=x["S"], output_final_state=True, checkpoint_chunks=1)
    assert c.shape[0] == 5 and not c[[0, 1, 2, 3]].isnan().any() and c[4].isnan().all()
    assert fn(*rows, checkpoint_chunks=6)[2].shape[0] == 0


def test_what_servers_call():
    """The package's op in vLLM's words: a pool of bfloat16 [V, K] tiles, in place; the same as a module's."""
    b = build("triton", "vk/bfloat16/pool/in_place", "fused")
    x = inputs()
    (pool, whole), at = memory(b, x), torch.tensor(AT, dtype=torch.int32)
    ends = torch.tensor([0, 33, 34, 34, 51, 98])
    args = [x[n][None] for n in ("q", "k", "v", "g", "beta")]
    o, S = chunk_gated_delta_rule(*args, scale=x["scale"], initial_state=pool, output_final_state=True, cu_seqlens=ends,
                                  ssm_state_indices=at, inplace_final_state=True, transpose_state_layout=True, target="triton",
                                  chunk_size=16, schedule="fused")
    mine, other = memory(b, x)
    want = run(function(b), x, initial_state=mine, state_indices=at)
    kept = [n for n in range(sum(LENGTHS)) if not 34 <= n < 51]
    assert S is pool and torch.equal(whole, other) and torch.equal(o[0, kept], want[0][0, kept])


BAD = {
    "no pool": (dict(initial_state=None), "initial_state: got NoneType"),
    "pool dtype": (dict(initial_state=torch.zeros(7, 2, K, V)), "initial_state: got torch.float32; accepted: torch.bfloat16"),
    "pool shape": (dict(initial_state=torch.zeros(7, 2, V, K).bfloat16()), r"initial_state: got \(7, 2, 16, 32\)"),
    "pool strides": (dict(initial_state=torch.zeros(7, K, 2, V).bfloat16().transpose(1, 2)), "initial_state: got strides"),
    "pool address": (dict(initial_state=torch.zeros(14 * K * V + 1).bfloat16()[1:].view(7, 2, K, V)), "initial_state: .*aligned"),
    "no slots": (dict(state_indices=None), "state_indices: got NoneType"),
    "slots dtype": (dict(state_indices=torch.zeros(5)), "state_indices: got torch.float32"),
    "slots shape": (dict(state_indices=torch.zeros(4, dtype=torch.int32)), r"state_indices: got shape \(4,\)"),
    "slots device": (dict(state_indices=torch.zeros(5, dtype=torch.int32, device="meta")), "state_indices: got device meta"),
    "slot past the pool": (dict(state_indices=torch.tensor([0, 1, 2, 3, 7])), "state_indices: .*0 to 6, or -1"),
    "slot below -1": (dict(state_indices=torch.tensor([0, 1, 2, 3, -2])), "state_indices: .*0 to 6, or -1"),
    "slot twice": (dict(state_indices=torch.tensor([3, -1, 1, -1, 3]), final_state=torch.zeros(7, 2, K, V).bfloat16()),
                   "state_indices: got slot 3 for sequences 0 and 4; accepted: a different slot"),
    "final dtype": (dict(final_state=torch.zeros(7, 2, K, V)), "final_state: got torch.float32"),
    "final shape": (dict(final_state=torch.zeros(7, 2, V, K).bfloat16()), "final_state: got"),
    "slot past the other pool": (dict(final_state=torch.zeros(3, 2, K, V).bfloat16()), "state_indices: .*0 to 2, or -1"),
    "final is initial": ("same", "final_state: got the memory of an initial state"),
    "chunks": (dict(checkpoint_chunks=0), "checkpoint_chunks: got 0"),
    "chunks type": (dict(checkpoint_chunks=1.5), "checkpoint_chunks: got 1.5"),
    "checkpoints": (dict(state_checkpoints=torch.zeros(4, 2, K, V).bfloat16()), r"state_checkpoints: got .*shape \(3, 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, monkeypatch):
    fn = function(build("triton", "bfloat16/pool/checkpoints"))
    host = fn.__globals__["HOST"]
    change, text = BAD[case]
    pool = torch.zeros(7, 2, K, V).bfloat16()
    good = dict(initial_state=pool, state_indices=torch.arange(5), checkpoint_chunks=2)
    monkeypatch.setattr(host, "launcher", lambda *_: lambda *_: None)
    monkeypatch.setattr(host, "plans", {})
    run(fn, inputs(), **good)
    monkeypatch.setattr(host, "launcher", lambda *_: lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(host, "plans", {})
    with pytest.raises(ValueError, match=text):
        run(fn, inputs(), **{**good, **(dict(final_state=pool) if change == "same" else change)})


def test_sequences_share_a_slot_that_is_read_but_none_that_is_written():
    x = inputs()
    (pool, whole), shared = memory(build("triton", "pool"), x), torch.tensor([4, 4, -1, -1, 4])
    before = whole.clone()
    fn = function(build("triton", "pool"))
    same = run(fn, x, initial_state=pool, state_indices=shared, output_final_state=True)
    for s in (1, 3):
        pool[s] = pool[4]
    apart = run(fn, x, initial_state=pool, state_indices=torch.tensor([4, 1, -1, -1, 3]), output_final_state=True)
    rows = [*range(34), *range(51, 98)]
    assert torch.equal(same[0][0, rows], apart[0][0, rows]) and torch.equal(same[1][[0, 1, 4]], apart[1][[0, 1, 4]])
    whole.copy_(before)
    fn = function(build("triton", "pool/in_place"))
    with pytest.raises(ValueError, match="state_indices: got slot 4 for sequences 0 and 1; accepted: a different slot"):
        run(fn, x, initial_state=pool, state_indices=shared)
    assert torch.equal(whole, before)


def test_bad_states_of_other_contracts():
    with pytest.raises(ValueError, match="initial_state: got NoneType"):
        run(function(build("triton", "in_place")), {**inputs(), "S": None})
    with pytest.raises(ValueError, match=r"initial_state: got torch\.float32; accepted: torch\.float16"):
        run(function(build("triton", "float16")), inputs(), initial_state=torch.zeros(5, 2, K, V))
    with pytest.raises(ScheduleError, match=r"head_dim_k: got 16; accepted with states .* of bfloat16 .*: more than 16"):
        render(Build("pto", 16, head_dim_k=16, head_dim_v=32, contract=Contract.parse("state=vk/bfloat16")))


@pytest.mark.slow
def test_pto_with_an_odd_interleaved_head_in_one_launch():
    """Three value heads: the last instance of a chunk's kernels repeats the last head; the pool is written once all the same."""
    b = build("pto", "pool/in_place", "prepared", heads=(1, 3))
    b = replace(b, schedule=replace(b.plan, launch="single"))
    x = problem([40, 17], 1, 3, K, V, torch.float16)
    pool = torch.randn(4, 3, K, V)
    pool[2], pool[0] = x["S"]
    before = pool.clone()
    run(function(b), x, initial_state=pool, state_indices=torch.tensor([2, 0]))
    want = expected(x)[1]
    assert rms_error(pool[[2, 0]], want) < 5e-3 and torch.equal(pool[[1, 3]], before[[1, 3]])


@pytest.mark.slow
def test_hopper_takes_what_servers_pass():
    """Warp groups: what vLLM and SGLang pass, and parts of it."""
    servers = f"beta=sigmoid,g=raw,k=l2norm,q=l2norm,state={ALL}"
    for how, text, kernels in ((None, servers, 1), ("decay", "state=float16/in_place", 0)):
        plan = replace(named("walk", "sm_90a"), partition=how)
        b = Build("tilelang", schedule=plan, arch="sm_90a", contract=Contract.parse(text))
        source = render(b)
        assert source.count("if state_indices_n >= 0") == 2 * kernels
        lines = source[source.index("_kernel("):source.index("# --- host: ")].splitlines()
        # 120, and a few more where a long name stands before the only place to break a line
        assert all(len(x) <= 130 for x in lines if not x.lstrip().startswith("#"))


# --- negative controls: the module's text edited, the same comparison must fail ---------------------------------------
MUTATIONS = {
    "triton": {"no indices": (r"state_indices_n \* initial_state_stride", "n * initial_state_stride"),
               "no skip": (r"(?<=    )if (state_indices_n) < 0:\n +return", r"\1 = tl.maximum(\1, 1)"),
               "dense slots": (r"initial_state_stride \+", "(HV * K * V) +")},
    "tilelang": {"no indices and no skip": (r"state_indices_n = T\.cast\(state_indices_in\[n\]", "state_indices_n = T.cast(n")},
    "pto": {"no skip": (r"if \(state_indices_gm\[n\] < 0\) continue;", "")},
}


@pytest.mark.slow
@pytest.mark.parametrize("target, what", [(t, what) for t, all_ in MUTATIONS.items() for what in all_])
def test_mutation_fails(target, what, monkeypatch):
    b = build(target, ALL, "fused")
    text, n = re.subn(*MUTATIONS[target][what], render(b))
    assert n
    if target == "pto":  # it reads before the pool, which the simulator reports
        with pytest.raises(PtoSimError):
            pool_is_right(b, module(text).chunk_gated_delta_rule, monkeypatch)
        return
    assert not pool_is_right(b, module(text).chunk_gated_delta_rule, monkeypatch)
