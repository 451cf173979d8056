"""partition: parts side by side give what one walk gives; what they forget stays below the bound."""
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from reference import expected, problem, rms_error, variant

from gdn_codegen.algorithms import find
from gdn_codegen.devices import HOPPER
from gdn_codegen.ir.builder import algorithm, carried, exp
from gdn_codegen.ir.core import Loop, Op, loops
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.ops import TypeRuleError
from gdn_codegen.ir.types import Tile
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.cut.partition import BOUND, partition
from gdn_codegen.schedule import SCHEDULES, Schedule, ScheduleError, named
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 16, "V": 16}
LENGTHS = [5 * 16 + 3, 0, 16, 3 * 16, 1]


@pytest.fixture(autouse=True)
def short_reach(monkeypatch):
    """Warm-ups are two parts long at most, on any device, so that short sequences have summaries."""
    monkeypatch.setattr("gdn_codegen.passes.cut.partition.longest_warm_up", lambda device: 2)


def lowered(how, schedule="replay", target="triton", dtype="float32", page="gated_delta_rule"):
    s = named(schedule) if isinstance(schedule, str) else schedule
    return lower(find(page).trace(), target, replace(s, partition=how), SIZES, dtype)


def run(p, x, span, exact=True):
    """The interpreter after a run, and its outputs."""
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}
    i = Interpreter(p, Problem(x["lengths"], x["q"].shape[1], x["v"].shape[1], span), {"scale": x["scale"]}, exact)
    return i, i.run({t.name: given[t.name] for t in p.role("input")})


def errors(p, x, span):
    got, want = run(p, x, span)[1], expected(x)
    return rms_error(got["o"], want[0]), rms_error(got["final_state"], want[1])


def heads(x, *gates):
    """The problem with a gate a head: a number, or what to multiply its gates by."""
    for h, gate in enumerate(gates):
        x["g"][:, h] = gate
    return x


@pytest.mark.slow
@pytest.mark.parametrize("target, schedule, span", [
    (("triton", "tilelang")[(m + n) % 2], s, span) for m, s in enumerate(SCHEDULES) for n, span in enumerate((0, 1, 2, 5))])
def test_exact_is_exact(target, schedule, span):
    x = problem(LENGTHS, 1, 2, 16, 16, torch.float32, gate=-0.01)
    assert max(errors(lowered("exact", schedule, target), x, span)) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("form", ["direct", "wy", "gate-free", "unit"])
@pytest.mark.parametrize("v_block", [0, 8])
def test_every_form_has_summaries(form, v_block):
    x = problem([70, 33], 1, 2, 16, 16, torch.float32, gate=-0.01)
    s = replace(variant("replay", form=form), v_block=v_block)
    s = replace(s, kernels=(*s.kernels[:-1], ("U_weight", "U_offset"), s.kernels[-1])) if form == "wy" else s
    assert max(errors(lowered("exact", s), x, 1)) < 1e-11
    if v_block:
        blocked = {k.name: k.blocked_dim for k in lowered("decay", s).kernels}
        assert blocked["S_offset"] == blocked["S_start"] == blocked["o_S"] == "V" and blocked["S_factor"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("span", [0, 1, 2, 3])
def test_decay_forgets_below_its_bound(schedule, span):
    """Heads that forget in a chunk, in two, in none; the initial state in reach of some parts."""
    x = heads(problem(LENGTHS, 2, 4, 16, 16, torch.float32), -3.0, -0.8, -0.2, 0.0)
    assert max(errors(lowered("decay", schedule), x, span)) < 1e-8


def warm_up(i, seq, head, x):
    """The warm-up length of each part of a sequence but the first, which has none and for which none is stored."""
    at, part = i.problem.starts[seq], i.problem.part(16)
    first = at // part + seq
    assert i.memory["S_warm_up"][first].isnan().all()
    return i.memory["S_warm_up"][first + 1:first + i.problem.parts(seq, 16), head].tolist()


def test_each_part_and_head_has_its_own_warm_up():
    x = heads(problem([10 * 16], 1, 5, 16, 16, torch.float32), -50.0, -0.8, -0.3, 0.0, 0.0)
    x["g"][:64, 4] = -50.0  # forgets in its first parts only
    i, got = run(lowered("decay", dtype="float16"), x, 2)
    bound = BOUND["float16"]
    assert [warm_up(i, 0, h, x) for h in range(5)] == [
        [1, 1, 1, 1], [1, 1, 1, 1], [2, 3, 3, 3], [-1, -1, -1, -1], [1, 1, 3, -1]]
    assert 0.8 * 16 > bound > 0.3 * 32
    S = i.memory
    assert S["S_factor"][:, :3].isnan().all(), "summaries of heads that forget"
    assert S["S_factor"][0, 3].isnan().all() and S["S_factor"][4, 3].isnan().all() and S["S_factor"][1:4, 3].isfinite().all()
    want = expected(x)
    assert rms_error(got["o"], want[0]) < 1e-5 and rms_error(got["final_state"], want[1]) < 1e-5
    assert rms_error(got["o"][:, 3], want[0][:, 3]) < 1e-11


def lengths_loaded(p):
    """How many warm-up lengths the kernel of M loads."""
    (k,) = (k for k in p.kernels if k.name == "S_factor")
    return sum(o.kind == "load" and o.attr("tensor") == "S_warm_up" for o in k.ops)


def test_factors_are_computed_beside_offsets_where_kernels_start_early():
    """Of a head that forgets slowly: neither reads what the other stores, and both leave multiprocessors idle. M finds its
    lengths itself then. Blocks of the fold and of the walk start early, too, and wait where they need summaries."""
    sizes = {"C": 64, "K": 128, "V": 128}
    for how in ("decay", "exact"):
        p = lower(find("gated_delta_rule").trace(), "tilelang", replace(named("fused_walk", "sm_90a"), partition=how), sizes,
                  "bfloat16", "sm_90a")
        starts = {k.name: k.start for k in p.kernels}
        assert starts.pop("S_factor") == starts.pop("S_start") == "beside" and starts.pop("o_S") == "unless_summed"
        assert set(starts.values()) == {""}
        assert lengths_loaded(p) == 0
    assert lengths_loaded(lowered("decay")) == 2


ADVERSARIAL = {
    "keys of norm 2, beta 1": (2.0, 1.0, -0.05),  # 1 - beta |k|^2 = -3: a token makes the state grow
    "keys of norm 2, beta 1, gates that just forget": (2.0, 1.0, -1.15),
    "unit keys, beta 2": (1.0, 2.0, -0.1),
    "gates of 0": (1.0, 0.5, 0.0),
    "gates that forget at once": (2.0, 1.0, -80.0),
}


@pytest.mark.parametrize("what", ADVERSARIAL)
def test_the_bound_holds_for_any_input(what):
    """One key and its opposite direction: the product of the tokens' factors is as large as the bound says."""
    norm, beta, gate = ADVERSARIAL[what]
    x = problem([6 * 16], 1, 1, 16, 16, torch.float32, gate=gate, beta=beta, same_keys=True)
    x["g"][:] = gate
    x["k"] = F.normalize(x["k"], dim=-1) * norm
    i, got = run(lowered("decay"), x, 1)
    want = expected(x)
    assert rms_error(got["o"], want[0]) < 1e-8 and rms_error(got["final_state"], want[1]) < 1e-8
    a_token = gate + torch.log(torch.tensor(max(1.0, abs(1 - beta * norm ** 2)))).item()
    if a_token * 16 * 2 > -BOUND["float32"]:
        assert warm_up(i, 0, 0, x)[2:] == [-1, -1, -1]


@pytest.mark.slow
def test_a_bound_for_unit_keys_only_would_not_hold():
    """Without the keys' part of the bound, the same inputs give a wrong state: the test above can fail."""
    @algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V", forgets="g"))
    def careless(q, k, v, g, beta, S, *, scale):
        return find("gated_delta_rule").fn(q, k, v, g, beta, S, scale=scale)

    x = problem([6 * 16], 1, 1, 16, 16, torch.float32, beta=1.0, same_keys=True)
    x["g"][:] = -1.15
    x["k"] = 2 * x["k"]
    p = lower(careless.trace(), "triton", Schedule("mine", ((careless.trace().role("output")[0].name, "S"),), partition="decay"),
              SIZES, "float32")
    got, want = run(p, x, 1)[1], expected(x)
    assert rms_error(next(iter(got.values())), want[0]) > 1e-3


@pytest.mark.slow
def test_nan_stays_in_its_sequence():
    x = heads(problem([40, 50, 40], 1, 3, 16, 16, torch.float32), -3.0, -0.2, 0.0)
    for how in ("exact", "decay"):
        p = lowered(how)
        clean = run(p, x, 1)[1]
        poisoned = {**x, "v": x["v"].clone(), "k": x["k"].clone(), "g": x["g"].clone()}
        for n in ("v", "k", "g"):
            poisoned[n][40:90] = float("nan")
        got = run(p, poisoned, 1)[1]
        for at in (slice(0, 40), slice(90, 130)):
            assert torch.equal(clean["o"][at], got["o"][at])
        assert torch.equal(clean["final_state"][::2], got["final_state"][::2])


@pytest.mark.slow
def test_simple_gla():
    x = heads(problem(LENGTHS, 1, 3, 16, 16, torch.float32), -3.0, -0.5, 0.0)
    want = expected(x, delta=False)
    for how in ("exact", "decay"):
        got = run(lowered(how, page="simple_gla"), x, 1)[1]
        assert rms_error(got["o"], want[0]) < 1e-8 and rms_error(got["final_state"], want[1]) < 1e-8


def factor_of(page, schedule="replay"):
    p = lowered("exact", schedule, page=page, dtype="float16")
    return p.tensor("S_factor")


@pytest.mark.parametrize("page, schedule", [
    ("simple_gla", "replay"), ("simple_gla", "walk"), ("gla", "walk"), ("mamba2", "staged"), ("lightning_attention", "fused")])
def test_a_state_whose_rows_are_scaled_has_a_vector_of_factors(page, schedule):
    assert (factor_of(page, schedule).dims, factor_of(page, schedule).dtype) == (("K",), "float32")
    assert factor_of("gated_delta_rule", schedule).dims == factor_of("kimi_delta_attention", schedule).dims == ("K", "K")


@pytest.mark.parametrize("schedule", ["replay", "walk"])
def test_parts_do_not_round_a_state_whose_rows_are_scaled(schedule):
    """Of gates that keep everything nothing but float32 sums is rounded, in however many parts. A product of the fold would round
    the state in each."""
    x = heads(problem([16 * 16], 1, 2, 16, 16, torch.float16), 0.0, 0.0)
    got = run(lowered("exact", schedule, dtype="float16", page="simple_gla"), x, 1, exact=False)[1]
    want = expected(x, delta=False)
    assert rms_error(got["final_state"], want[1]) < 1e-6 and rms_error(got["o"], want[0]) < 1e-3


@pytest.mark.slow
def test_rounding_stays_within_bounds():
    x = problem([16 * 16], 1, 2, 16, 16, torch.float16, gate=-0.005)
    for how in ("exact", "decay"):
        got, want = run(lowered(how, dtype="float16"), x, 2, exact=False)[1], expected(x)
        assert rms_error(got["o"], want[0]) < 1e-3 and rms_error(got["final_state"], want[1]) < 1e-3


# --- the schedule ----------------------------------------------------------------------------------------------------
def test_kernels():
    assert [k.name for k in lowered("exact").kernels] == ["G_Tinv", "S_offset", "S_factor", "S_start", "o_S"]
    assert [k.name for k in lowered("decay").kernels] == ["G_Tinv_F_chunk", "S_offset", "S_factor", "S_start", "o_S"]
    assert [k.name for k in lowered("decay", "fused").kernels][:3] == ["F_chunk_least", "F_chunk", "S_offset"]
    assert lowered(None) == lower(find("gated_delta_rule").trace(), "triton", named("replay"), SIZES, "float32")
    assert lowered(None).forgets == "" and not any("F" in t.name for t in lowered(None).tensors)


def test_what_is_refused():
    with pytest.raises(ScheduleError, match="partition='x'; accepted are None, exact, decay"):
        replace(named("replay"), partition="x")
    with pytest.raises(ScheduleError, match="partition='decay'; accepted for pto is None"):
        lowered("decay", target="pto")

    @algorithm(q="C K", v="C V", S=carried("K V"))
    def no_bound(q, v, S):
        return q @ S + v, S + q.T @ v

    @algorithm(q="C K", v="C V", S=carried("K V"))
    def curved(q, v, S):
        return q @ S + v, exp(S) + q.T @ v

    @algorithm(q="C K", v="C V", S=carried("K V"))
    def mixed(q, v, S):
        return q @ S + v, S @ (v.T @ v)

    def parts(page, how):
        s = Schedule("mine", ((page.trace().role("output")[0].name, "S"),), partition=how)
        return lower(page.trace(), "triton", s, SIZES, "float32")

    parts(no_bound, "exact")
    with pytest.raises(ScheduleError, match="needs a page that bounds how a token changes the state"):
        parts(no_bound, "decay")
    for page in (curved, mixed):
        with pytest.raises(ScheduleError, match="each column is affine in the same column"):
            parts(page, "exact")
    with pytest.raises(TypeRuleError, match="forgets='F' is not a value of the page with dims C"):
        algorithm(q="C K", v="C V", S=carried("K V", forgets="F"))(no_bound.fn).trace()


# --- negative controls: the program less one thing, the same comparison must fail -------------------------------------
def edited(how, kernel, change):
    p = lowered(how)
    return replace(p, kernels=tuple(change(k) if k.name == kernel else k for k in p.kernels))


def no_fold(k):
    """The state before a part's first chunk is what the part before it made of none."""
    def each(o):
        return replace(o, kind="add", args=("N", "N_0"), attrs=()) if o.out == "S_next" else o
    zeros = Op("full", "N_0", (), (("dims", ("K", "V")), ("value", 0.0)), Tile(("K", "V")))
    return replace(k, body=(zeros, *(s if isinstance(s, Op) else replace(s, body=tuple(map(each, s.body))) for s in k.body)))


def fewer(k):
    """A warm-up of a chunk less."""
    at = next(i for i, s in enumerate(k.body) if not isinstance(s, Op))
    less = (Op("const", "one", (), (("value", 1.0),), Tile()), Op("sub", "less", (k.body[at].warm_up, "one"), (), Tile()))
    return replace(k, body=(*k.body[:at], *less, replace(k.body[at], warm_up="less"), *k.body[at + 1:]))


@pytest.mark.parametrize("how, kernel, change", [
    ("exact", "S_start", no_fold), ("decay", "S_start", no_fold), ("decay", "o_S", fewer)])
def test_mutations_fail(how, kernel, change):
    x = heads(problem([6 * 16], 1, 2, 16, 16, torch.float32), -0.8, 0.0)
    assert max(errors(lowered(how), x, 1)) < 1e-8
    assert not max(errors(edited(how, kernel, change), x, 1)) < 1e-8


def test_a_warm_up_stores_nothing(monkeypatch):
    """An interpreter that stores it leaves what later parts, which run after, made of no state."""
    x = heads(problem([6 * 16], 1, 1, 16, 16, torch.float32), -0.8)
    p, own, store = lowered("decay"), Interpreter.own, Interpreter.store
    assert max(errors(p, x, 1)) < 1e-8

    def careless(self, *given):
        monkeypatch.setattr(Interpreter, "own", lambda *_: 0)
        store(self, *given)
        monkeypatch.setattr(Interpreter, "own", own)

    monkeypatch.setattr(Interpreter, "store", careless)
    assert not max(errors(p, x, 1)) < 1e-8


def test_a_walk_with_a_warm_up_stands_in_a_grid_over_parts():
    p = lowered("decay")
    k = p.kernels[-1]
    assert next(loops(k.body)).warm_up == "warm_up"
    p = replace(p, stage="cut")
    assert partition(p, named("replay"), HOPPER, "float16") is p


@pytest.mark.parametrize("kind", ["load", "store"])
def test_what_is_of_a_later_part_has_one_tile_for_each_part(kind):
    p = lowered("decay")
    k = next(k for k in p.kernels if k.name == "o_S")

    def late(o):
        attrs = tuple(sorted([*o.attrs, ("parts_ahead", 1)]))
        return replace(o, attrs=attrs) if o.kind == kind and o.attr("tensor") in ("q", "o") else o
    body = tuple(replace(s, body=tuple(map(late, s.body))) if isinstance(s, Loop) else s for s in k.body)
    with pytest.raises(VerifyError, match=r"has parts_ahead, and [qo] has one tile for each token"):
        verify(replace(p, kernels=tuple(replace(x, body=body) if x is k else x for x in p.kernels)))
