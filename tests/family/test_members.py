"""Every member of the family on every target, beside its token recurrence in float64."""
from dataclasses import replace
from pathlib import Path

import pytest
from members import MEMBERS, Case, computed, drawn, expected
from reference import TOLERANCE, rms_error

from gdn_codegen.algorithms import find, names
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.choose import by_token, unfit
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
#: The ladder of lengths in one pack, gates that forget at once among such that keep, a narrower K than V.
LADDER = Case((1, 15, 16, 17, 0, 63, 64, 65, 130))
#: Rows of one length, two value heads of each key head, one key again and again, beta up to 2, no initial state.
REPEAT = Case((70, 70), heads=2, value_heads=4, batched=True, initial=False, gates="slow", repeat=True, strength=2.0, seed=1)
#: A tail in float32, the other layout.
NARROW = Case((65, 17), value_heads=1, seed=2)
#: Few tokens, in chunks of one. Tests of ops decode on other targets, too.
STEP = Case((1, 4, 2), gates="slow", seed=3)
BUILDS = {
    "ladder": (LADDER, dict(head_dim_k=64, head_dim_v=128)),
    "repeat": (REPEAT, dict(head_dim_k=128, head_dim_v=64, dtype="bfloat16", schedule="walk")),
    "float32": (NARROW, dict(head_dim_k=64, head_dim_v=64, dtype="float32", layout="bhtd")),
    "step": (STEP, dict(head_dim_k=64, head_dim_v=128, chunk=1))}


NAMES = [n for n in MEMBERS if n in names()]


def test_every_page_is_a_member():
    assert set(names()) <= set(MEMBERS)


@pytest.mark.parametrize("name", names())
def test_a_page_is_short(name):
    assert len(Path(find(name).fn.__code__.co_filename).read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 16, 32])
def test_a_page_is_the_recurrence(name, chunk):
    """By the interpreter in float64."""
    c = Case((5, 33, 0, 16))
    sizes = {"C": chunk, "K": 16, "V": 8}
    p = replace(find(name).trace(), dims=tuple(sizes.items()))
    x = drawn(name, c, p, sizes)
    given = {"initial_state" if n == "S" else n: y.double() for n, y in x.items()}
    got = interpret(p, Problem(list(c.lengths), c.heads, c.value_heads), given, find(name).scalar_defaults(sizes))
    (o,) = (t.name for t in p.role("output") if t.index == "token")
    for y, want in zip((got[o], got["final_state"]), expected(name, c, x), strict=True):
        assert rms_error(y, want) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_each_input_matters(name):
    """A kernel that reads one input of a member wrongly is off by far more than what the comparison below accepts."""
    c, sizes = Case((40,), gates="slow", strength=2.0), {"C": 64, "K": 16, "V": 8}
    x = drawn(name, c, find(name).trace(), sizes)
    want = expected(name, c, x)
    for n in MEMBERS[name].inputs:
        other = expected(name, c, {**x, n: x[n] * 0.9 + 0.05})
        assert rms_error(other[0], want[0]) > 0.02, n


def bound(b, want, got, strength):
    """What the dtype keeps. Where beta reaches 2 a token may turn the state about, so errors of all tokens stay."""
    return max(TOLERANCE[b.dtype] * (2 if strength > 1 else 1), 2 * rms_error(want.to(got.dtype), want))


def cases():
    """Each member on each target in one case, and each case there with every third member; the others by hand."""
    for n, name in enumerate(NAMES):
        for t, target in enumerate(HERE):
            for c, case in enumerate(BUILDS):
                if case != "step" or target == "triton":
                    yield pytest.param(name, target, case, marks=pytest.mark.long if (n + t + c) % 3 else ())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "case"), [*cases()])
def test_a_member_agrees_with_its_recurrence(name, target, case):
    c, options = BUILDS[case]
    b = Build(target, algorithm=name, **options)
    b = by_token(b, few=False) if b.chunk == 1 else replace(b, chunk=32) if unfit(b) else b  # RWKV-7 has many tiles
    x = drawn(name, c, lowered(b), b.sizes)
    for what, got, want in zip(("o", "state"), computed(b, c, x), expected(name, c, x), strict=True):
        error, most = rms_error(got, want), bound(b, want, got, c.strength)
        assert error <= most, f"{what} is off by {error:.1e}; accepted: {most:.1e}"
