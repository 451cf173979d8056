"""Parts of pages with a gate for each channel: what they forget, where they start, and that they are the recurrence."""
from dataclasses import replace

import pytest
import torch
from members import MEMBERS, Case, computed, drawn, expected, of_head
from reference import TOLERANCE, in_parts, rms_error
from test_ops import ends, near
from tiers import every
from torch.nn.functional import normalize

from gdn_codegen.algorithms import find, names
from gdn_codegen.channels import chunk_kda
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.passes.cut import decay_bound
from gdn_codegen.passes.cut.partition import BOUND
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call.choose import modelled
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import SCHEDULES, ScheduleError, named
from gdn_codegen.targets import lower

pytestmark = pytest.mark.slow

C, K = 16, 16
SIZES = {"C": C, "K": K, "V": K}
CHANNELS = ("gla", "kimi_delta_attention", "gated_delta_rule_2")
HERE = [t for t in ("triton", "tilelang") if runs(t, "cpu")]
#: Most channels forget a state within a chunk, and some never.
MIXED = Case((5 * C + 3, 0, C, 3 * C, 1), repeat=True, strength=2.0)


@pytest.fixture(autouse=True)
def short_reach(monkeypatch):
    """Warm-ups are two parts long at most, on any device, so that short sequences have summaries."""
    monkeypatch.setattr("gdn_codegen.passes.cut.partition.longest_warm_up", lambda device: 2)


def lowered(page, schedule="replay", how="decay", target="triton", sizes=SIZES, upto=""):
    return lower(find(page).trace(), target, replace(named(schedule), partition=how), sizes, "float32", upto=upto)


def ran(page, p, c, x, span):
    """The interpreter after a run in float64, and the errors of o and the state."""
    i = Interpreter(p, Problem(list(c.lengths), c.heads, c.value_heads, span), find(page).scalar_defaults({"K": x["S"].shape[2]}))
    got = i.run({"initial_state" if n == "S" else n: y.double() for n, y in x.items()})
    (o,) = (t.name for t in p.role("output") if t.index == "token")
    return i, [rms_error(y, want) for y, want in zip((got[o], got["final_state"]), expected(page, c, x), strict=True)]


def warm_ups(i, parts):
    """By value head: the warm-up lengths of the parts of the first sequence but the first part, which has none."""
    return i.memory["S_warm_up"][1:parts].T.int().tolist()


@pytest.mark.parametrize("schedule, page", every(2, SCHEDULES, CHANNELS))
def test_parts_are_the_recurrence(page, schedule):
    """Gates from 0 to -50 in each chunk, equal keys, beta up to 2. Each pass is interpreted, too."""
    for n, (how, span) in enumerate((("decay", 1), ("exact", 2), ("decay", 3))):
        p = lowered(page, schedule, how, ("triton", "tilelang")[n % 2])
        x = drawn(page, MIXED, p, SIZES)
        x["g"][:, 0] = torch.where(x["g"][:, 0] < -1, x["g"][:, 0], -3)  # a head of which no channel keeps
        assert max(ran(page, p, MIXED, x, span)[1]) < 1e-8


def maps(page, x, head, numbers):
    """The product of the tokens' factors, for each chunk of the one sequence: [K, K]."""
    given = {n: of_head(y.double(), head, 2) for n, y in x.items() if n != "S"}
    out = []
    for start in range(0, len(x["q"]), C):
        S = torch.eye(K, dtype=torch.float64)
        for t in range(start, start + C):
            token = {n: y[t] if x[n].ndim > 1 else y for n, y in given.items()}
            token |= {n: torch.zeros_like(y) for n, y in token.items() if n.startswith("v")}
            S = MEMBERS[page].recurrence(S, **token, **numbers)[1]
        out.append(S)
    return out


@pytest.mark.parametrize("page", [n for n in names() if find(n).trace().forgets])
@pytest.mark.parametrize("gates", ["slow", "mixed"])
def test_no_chunk_keeps_more_than_its_bound(page, gates):
    """The norm of a chunk's factor of the state. Keys are up to twice as long as unit ones."""
    c = Case((4 * C,), gates=gates, strength=2.0, repeat=gates == "slow", seed=3)
    p = lowered(page, upto="partition")
    x = drawn(page, c, p, SIZES)
    for n in x:
        if n.startswith("k"):
            x[n] = x[n] * torch.linspace(0.2, 2, len(x[n]))[:, None, None]
    i, _ = ran(page, p, c, x, 1)
    (name,) = (t for t in i.memory if t.endswith("_chunk_ws"))
    ratios = []
    for head in range(2):
        for chunk, M in enumerate(maps(page, x, head, find(page).scalar_defaults(SIZES))):
            bound, kept = i.memory[name][chunk, head].exp(), torch.linalg.matrix_norm(M, 2)
            assert kept <= bound * (1 + 1e-6), (head, chunk)
            ratios.append(kept / bound)
    assert page != "gla" or min(ratios) > 1 - 1e-6, "the slowest channel says exactly what is left"


@pytest.mark.parametrize("page", ["delta_rule", "gated_delta_rule", "kimi_delta_attention", "gated_delta_rule_2"])
def test_the_bound_of_one_token_is_the_norm_of_its_factor(page):
    """All other tokens of a chunk keep the state. Keys from short ones to those that make a state grow."""
    c = Case((8 * C,), strength=2.0)
    p = lowered(page, upto="partition")
    x = drawn(page, c, p, SIZES)
    x["k"] *= (torch.arange(8 * C) % C == 3)[:, None, None] * torch.linspace(0.2, 3, 8 * C)[:, None, None]
    if "g" in x:
        x["g"][:] = 0.0
    i, _ = ran(page, p, c, x, 1)
    for head in range(2):
        kept = torch.stack([torch.linalg.matrix_norm(M, 2) for M in maps(page, x, head, find(page).scalar_defaults(SIZES))])
        assert torch.allclose(i.memory["F_chunk_ws"][:8, head].exp(), kept, rtol=1e-6) and kept.max() > 1.1


def keeping(page, c, *channels):
    """A problem in which all channels of a token forget at once but one, which keeps. channels: which, for each token in
    rotation."""
    x = drawn(page, c, find(page).trace(), SIZES)
    x["g"][:] = -50.0
    for t in range(len(x["g"])):
        x["g"][t, :, channels[t % len(channels)]] = 0.0
    return x


def test_where_channels_stay_apart_the_slowest_sum_counts():
    """Where a channel keeps everything, no warm-up is long enough. Two that keep in turn forget as fast as half of the tokens."""
    c = Case((8 * C,))
    p = lowered("gla")
    for channels, early in (((5,), [-1] * 7), ((5, 9), [1] * 7)):
        x = keeping("gla", c, *channels)
        i, errors = ran("gla", p, c, x, 1)
        assert warm_ups(i, 8) == [early, early] and max(errors) < 1e-8
    x["g"][:, 1, 3] = -BOUND["float32"] / 24  # of the second head one channel takes a chunk and a half
    i, errors = ran("gla", p, c, x, 1)
    assert warm_ups(i, 8) == [[1] * 7, [1, *[2] * 6]] and max(errors) < 1e-8


def swapping(page):
    """Every token reflects the state, which exchanges channels 0 and 1. Of these the one that holds the state keeps it."""
    c = Case((8 * C,), heads=2)
    x = keeping(page, c, 0, 1)
    x["k"][:] = normalize(torch.eye(K)[0] - torch.eye(K)[1], dim=0)
    x["beta" if page == "kimi_delta_attention" else "b"][:] = 2.0
    return c, x


@pytest.mark.parametrize("page", ["kimi_delta_attention", "gated_delta_rule_2"])
def test_where_products_mix_channels_each_tokens_slowest_counts(page, monkeypatch):
    """Each channel's sum says that nothing is left. All of the state is, in one channel after the other."""
    c, x = swapping(page)
    i, errors = ran(page, lowered(page), c, x, 1)
    assert warm_ups(i, 8) == [[-1] * 7] * 2 and max(errors) < 1e-8
    monkeypatch.setattr(decay_bound, "channels_apart", lambda p: True)
    i, errors = ran(page, lowered(page), c, x, 1)
    assert warm_ups(i, 8) == [[1] * 7] * 2 and min(errors) > 0.1


@pytest.mark.parametrize("page", CHANNELS)
def test_padding_of_channels_does_not_count(page):
    """Triton's tiles have 32 rows of a state of 20; zeros would be gates of channels that keep."""
    c, sizes = Case((4 * C,)), {**SIZES, "K": 20}
    p = lowered(page, sizes=sizes)
    x = drawn(page, c, find(page).trace(), sizes)
    x["g"][:] = -10.0
    i, errors = ran(page, p, c, x, 1)
    assert p.sizes["K"] == 32 and warm_ups(i, 4) == [[1] * 3] * 2 and max(errors) < 1e-8


def test_a_page_without_a_bound_is_refused_in_words():
    with pytest.raises(ScheduleError, match=r"'decay' needs a page that bounds how a token changes the state, .* rwkv7"):
        lowered("rwkv7")
    lowered("rwkv7", how="exact")


def test_a_page_of_ones_own_may_bound_channels():
    """Also where its state has more than one factor for a token."""
    @algorithm(q="C K", k="C K", v="C V", g="HV C K", h="C", S=carried("K V", forgets="F"))
    def page(q, k, v, g, h, S):
        F = g + h[:, None]
        G = cumsum(F)
        o = (exp(G) * q) @ S
        S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
        return o, S

    p = lower(page.trace(), "triton", replace(named("fused"), partition="decay"), SIZES, "float32")
    (bound,) = (o for k in p.kernels for o in k.ops if o.kind == "row_max")
    assert bound.type.dims == () and [k.name for k in p.kernels][:2] == ["F_chunk", "S_offset"]


# --- modules ----------------------------------------------------------------------------------------------------------
BUILDS = {"triton": dict(layout="bthd", schedule="walk"), "tilelang": dict(layout="bhtd", schedule="fused")}


def built(page, target, how="decay"):
    fields = BUILDS[target]
    return Build(target, C, fields["layout"], page, replace(named(fields["schedule"]), partition=how), "float32", 32, 32)


def cells():
    """Each page one way on the first target. On the second, whose kernels take up to a minute to compile, most are run by hand
    (`-m long`)."""
    for page in CHANNELS:
        for target in HERE:
            for how in ("decay", "exact"):
                by_hand = (page, how) != ("gla", "decay") if target != HERE[0] else (page == CHANNELS[0]) == (how == "decay")
                yield pytest.param(page, target, how, marks=pytest.mark.long if by_hand else ())


@pytest.mark.parametrize("page, target, how", list(cells()))
def test_modules_are_the_recurrence(page, target, how):
    """A pack with gates from 0 to -50 in each chunk, equal keys, beta up to 2. NaN of padding and workspaces reaches nothing."""
    b, c = built(page, target, how), Case((7 * C + 2, 0, C + 1, 4 * C), repeat=True, strength=2.0, seed=4)
    in_parts(function(b), 1)
    x = drawn(page, c, find(page).trace(), b.sizes)
    x["g"][:, 0] = torch.where(x["g"][:, 0] < -1, x["g"][:, 0], -3)
    for got, want in zip(computed(b, c, x), expected(page, c, x), strict=True):
        assert rms_error(got, want) < TOLERANCE["float32"]


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("page", ["gla", "kimi_delta_attention"])
def test_a_gate_that_is_nan_shows_in_the_next_part(page, target):
    """Its own warm-up runs through it, whatever the maximum over channels makes of it. No other head sees it."""
    b, c = built(page, target), Case((4 * C,))
    in_parts(function(b), 1)
    x = drawn(page, c, find(page).trace(), b.sizes)
    x["g"][:] = -20.0
    clean, _ = computed(b, c, x)
    x["g"][3, 1, 7] = torch.nan
    o, _ = computed(b, c, x)
    assert torch.equal(o[:, 0], clean[:, 0]) and o[3:2 * C, 1].isnan().any(1).all()


@pytest.mark.parametrize("how", ["decay", "exact"])
def test_an_op_takes_parts_by_its_schedule(how):
    """Of a chunk each."""
    c = Case((5 * C, C + 1), gates="slow", strength=2.0)
    x = drawn("kimi_delta_attention", c, find("kimi_delta_attention").trace(), SIZES)
    want = expected("kimi_delta_attention", c, x)
    S, plan = x.pop("S"), replace(named("fused"), partition=how, part_chunks=1)
    got = chunk_kda(**{n: y[None] for n, y in x.items()}, initial_state=S, output_final_state=True, cu_seqlens=ends(c),
                    chunk_size=C, schedule=plan, target=HERE[0])
    near(got, want)


@pytest.mark.parametrize("page", CHANNELS)
def test_dispatch_takes_parts_of_one_schedule_alone(page):
    """The cost of others was fitted to gates that are numbers."""
    for target in ("triton", "tilelang"):
        b = Build(target, algorithm=page)
        options, others = (modelled(x, "sm_90a", True, (0, 3, 15), None) for x in (b, replace(b, algorithm="gated_delta_rule")))
        assert [x.plan.name for x, _ in options if x.plan.partition] == ["operand_walk"]
        assert any(x.plan.partition for x, _ in others)
