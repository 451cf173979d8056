"""Every target against the float64 token recurrence and against each other, on random problems.

Builds are few, since some targets compile; problems are many. Tolerances are RMSE over RMS.
"""
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import TOLERANCE, call, check, expected, in_form, passed, problem, rms_error

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import SCHEDULES, ScheduleError
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.schedule.schedule import FORMS, STATE_LAYOUTS
from gdn_codegen.targets import OWN

pytestmark = pytest.mark.slow

HERE = [t for t in OWN if runs(t, "cpu")]
LADDER = (1, 17, 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 191, 193, 367, 447, 512, 640, 1920)
#: chunk, layout, schedule, dtype, K, V: each value of each option at least once.
BUILDS = {
    "c64-fused-f16": (64, "bthd", "fused", "float16", 128, 128),
    "c32-replay-bf16": (32, "bhtd", "replay", "bfloat16", 32, 64),
    "c16-prepared-f32": (16, "bthd", "prepared", "float32", 32, 16),
    "c32-walk-f32": (32, "bhtd", "walk", "float32", 64, 32),
    "c64-staged-bf16": (64, "bhtd", "staged", "bfloat16", 64, 32),
    "c128-fused-f16": (128, "bthd", "fused", "float16", 64, 64),
}
EXAMPLES = int(os.environ.get("GDN_CODEGEN_EXAMPLES", "3"))


def build(target, name):
    chunk, layout, schedule, dtype, K, V = BUILDS[name]
    return Build(target, chunk, layout, "gated_delta_rule", schedule, dtype, K, V)


@st.composite
def problems(draw, most=140):
    """Lengths (zero too), head counts, gates from never to at once, beta near 0 and 1, with and without a state."""
    batched = draw(st.booleans())
    length = st.sampled_from([n for n in LADDER if n <= most]) | st.integers(0, most)
    lengths = [draw(length)] * draw(st.integers(1, 2)) if batched else draw(st.lists(length, min_size=1, max_size=3))
    heads = draw(st.integers(1, 2))
    return dict(batched=batched, lengths=lengths, H=heads, HV=heads * draw(st.sampled_from([1, 2, 3])),
                gate=draw(st.sampled_from([0.0, -1e-3, -0.1, -1.0, -50.0, "mixed"])),
                beta=draw(st.sampled_from([None, None, 0.0, 1e-3, 0.999, 1.0])), initial=draw(st.booleans()),
                cu_dtype=draw(st.sampled_from([torch.int32, torch.int64])), seed=draw(st.integers(0, 999)))


def made(b, p):
    return problem(p["lengths"], p["H"], p["HV"], b.head_dim_k, b.head_dim_v, getattr(torch, b.dtype), p["gate"], p["beta"],
                   p["initial"], p["seed"])


def tolerance(b, p):
    """float32 keeps 24 bits of a running gate as large as 50 a token, and decay is the exponential of a difference."""
    return TOLERANCE[b.dtype] * (10 if b.dtype == "float32" and p["gate"] == "mixed" else 1)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("target", HERE)
def test_random_problems(target, name):
    b = build(target, name)
    fn = function(b)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
              phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
    @given(problems())
    def run(p):
        check(fn, made(b, p), tolerance(b, p), layout=b.layout, batched=p["batched"], cu_dtype=p["cu_dtype"])
    run()


@st.composite
def builds(draw, target):
    """Any build: every option free, forms and inverses too."""
    form = draw(st.sampled_from(FORMS))
    s = in_form(SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))], form)
    K, V = draw(st.sampled_from([16, 32, 64, 128])), draw(st.sampled_from([16, 32, 64, 128]))
    v_block = draw(st.sampled_from([0, 16, 32, 64]))
    s = replace(s, name="drawn", state_layout=draw(st.sampled_from(STATE_LAYOUTS)), v_block=v_block if v_block < V else 0)
    return Build(target, draw(st.sampled_from([16, 32, 64, 128])), draw(st.sampled_from(["bthd", "bhtd"])), "gated_delta_rule",
                 s, draw(st.sampled_from(["float16", "bfloat16", "float32"])), K, V)


@pytest.mark.parametrize("target", HERE)
def test_random_builds(target):
    """TileLang compiles for seconds a kernel, so it draws fewer."""
    examples = {"triton": 2, "tilelang": 0.7, "pto": 2}[target] * EXAMPLES

    @settings(max_examples=max(1, int(examples)), deadline=None, derandomize=True, database=None,
              phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
    @given(builds(target), problems(most=130))
    def run(b, p):
        try:
            fn = function(b)
        except ScheduleError as e:
            assert "bytes" in str(e)  # refused for its size, and it says so
            return
        check(fn, made(b, p), tolerance(b, p), layout=b.layout, batched=p["batched"], cu_dtype=p["cu_dtype"])
    run()


@st.composite
def contracts(draw):
    """How inputs come, and in which dtypes."""
    forms = {"beta": draw(st.sampled_from(["", "sigmoid", "twice_sigmoid"])), "g": draw(st.sampled_from(["", "linear", "raw"])),
             "k": draw(st.sampled_from(["", "l2norm"])), "q": draw(st.sampled_from(["", "l2norm"]))}
    dtypes = {n: draw(st.sampled_from(["float32", "float16", "bfloat16"])) for n in ("beta", "g")}
    return Contract(tuple((n, x) for n, x in forms.items() if x), tuple(dtypes.items()))


@pytest.mark.parametrize("target", HERE)
def test_random_forms_of_inputs(target):
    examples = {"triton": 1, "tilelang": 0.2, "pto": 0.34}[target] * EXAMPLES

    @settings(max_examples=max(1, int(examples)), deadline=None, derandomize=True, database=None,
              phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
    @given(builds(target), contracts(), problems(most=90))
    def run(b, c, p):
        b = replace(b, head_dim_k=min(b.head_dim_k, 64), head_dim_v=min(b.head_dim_v, 64), contract=c,
                    schedule=replace(b.plan, v_block=0))
        x, page = passed(p["lengths"], p["H"], p["HV"], b.head_dim_k, b.head_dim_v, dict(c.inputs),
                         {n: getattr(torch, d) for n, d in c.dtypes}, getattr(torch, b.dtype), p["seed"])
        check(function(b), x, TOLERANCE[b.dtype] * (3 if b.dtype == "float32" else 1), page, layout=b.layout,
              batched=p["batched"], cu_dtype=p["cu_dtype"])
    run()


LADDER_BUILD = (64, "bthd", "replay", "float16", 32, 32)


@pytest.mark.parametrize("target", HERE)
def test_length_ladder_alone(target):
    fn = function(Build(target, *LADDER_BUILD[:2], "gated_delta_rule", *LADDER_BUILD[2:]))
    for n in LADDER:
        check(fn, problem([n], 1, 1, 32, 32, seed=n))


@pytest.mark.parametrize("target", HERE)
def test_length_ladder_mixed(target):
    fn = function(Build(target, *LADDER_BUILD[:2], "gated_delta_rule", *LADDER_BUILD[2:]))
    check(fn, problem([0, *LADDER[:9], 0, 0, *LADDER[9:14], 0], 1, 2, 32, 32, gate=-0.05))


@pytest.mark.skipif(len(HERE) < 2, reason="one target runs here; agreement needs two")
@pytest.mark.parametrize("seed", range(3))
def test_targets_agree(seed):
    x = problem([65, 0, 129], 1, 2, 32, 32, gate=(-0.05, -1.0, "mixed")[seed], seed=seed)
    outs = [call(function(Build(t, *LADDER_BUILD[:2], "gated_delta_rule", *LADDER_BUILD[2:])), x) for t in HERE]
    for o, S in outs[1:]:
        assert rms_error(o, outs[0][0]) < 5e-3 and rms_error(S, outs[0][1]) < 5e-3


@pytest.mark.parametrize("target", HERE)
def test_same_bits_twice_and_nan_stays_in_its_sequence(target):
    fn = function(Build(target, *LADDER_BUILD[:2], "gated_delta_rule", *LADDER_BUILD[2:]))
    x = problem([40, 70, 33], 1, 1, 32, 32)
    o, S = call(fn, x)
    o2, S2 = call(fn, x)
    assert torch.equal(o, o2) and torch.equal(S, S2)
    x["v"][45] = float("nan")
    o3, S3 = call(fn, x)
    clean = [*range(40), *range(110, 143)]
    assert torch.equal(o3[clean], o[clean]) and torch.equal(S3[[0, 2]], S[[0, 2]])
    assert o3[45:110].isnan().any() and S3[1].isnan().any()


# --- negative controls: the comparison must be able to fail ----------------------------------------------------------
def _exact(x):
    def fn(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        return with_rest(x, q)
    return fn


def with_rest(x, q):
    """The truth, with zeros in rows past the last sequence's end."""
    o, S = expected(x)
    return torch.cat([o, o.new_zeros(q.shape[1] - len(o), *o.shape[1:])])[None].clone(), S.clone()


def _zeros(x):
    return lambda *a, **k: tuple(torch.zeros_like(t) for t in _exact(x)(*a, **k))


def _tail_dropped(x):
    def fn(*a, **k):
        o, S = _exact(x)(*a, **k)
        end = sum(x["lengths"])
        o[0, end - x["lengths"][-1] % 64:end] = 0
        return o, S
    return fn


def _gates_swapped(x):
    swapped = {**x, "g": x["g"].flip(1)}
    return lambda q, *a, **k: with_rest(swapped, q)


def _state_stale(x):
    fresh = {**x, "S": None}
    return lambda q, *a, **k: with_rest(fresh, q)


def _not_written(x):
    def fn(*a, **k):
        o, S = _exact(x)(*a, **k)
        o[0, 3, 0, 0] = float("nan")
        return o, S
    return fn


X = dict(lengths=[64, 65], H=1, HV=2, K=16, V=16, gate=-0.05)


def test_the_comparison_accepts_the_truth():
    x = problem(**X)
    check(_exact(x), x)


@pytest.mark.parametrize("wrong", [_zeros, _tail_dropped, _gates_swapped, _state_stale, _not_written])
def test_negative_controls(wrong):
    x = problem(**X)
    with pytest.raises(AssertionError, match="state"):
        check(wrong(x), x)
