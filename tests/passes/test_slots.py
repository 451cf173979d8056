"""Storage with slots: channels of two tiles, halves of L0, and what a walk does one chunk ahead."""
from dataclasses import replace
from itertools import pairwise

import pytest
from reference import problem, rms_error
from test_agents import _unchecked, lowered, needed  # noqa: F401
from test_passes import run

from gdn_codegen.algorithms import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir import page as pages
from gdn_codegen.ir.core import Loop, loops, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.rings import rings
from gdn_codegen.passes.sync.accesses import accesses
from gdn_codegen.prove.happens_before import RaceError, check_waits
from gdn_codegen.schedule import Schedule
from gdn_codegen.targets import lower

SMALL = {"C": 32, "K": 16, "V": 32}
WALKS = [("fused", "all"), ("fused", "loads"), ("fused", "operands"), ("replay", "all"), ("staged", "loads")]


def kernel(p, name):
    return next(k for k in p.kernels if k.name == name)


def changed(p, change):
    """The program with each op put through `change`; None drops it."""
    def each(body):
        for s in body:
            if isinstance(s, Loop):
                yield replace(s, body=tuple(each(s.body)))
            elif (o := change(s)) is not None:
                yield o
    return replace(p, kernels=tuple(replace(k, body=tuple(each(k.body))) for k in p.kernels))


def with_attr(o, **attrs):
    return replace(o, attrs=tuple(sorted({**dict(o.attrs), **attrs}.items())))


# --- waits -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name, prefetch", WALKS)
def test_every_wait_of_a_walk_ahead_is_needed(name, prefetch):
    needed(lowered(name, sizes=SMALL, prefetch=prefetch))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["gated_delta_rule", "simple_gla"])
@pytest.mark.parametrize("name, changes", [
    ("staged", {"value_heads": 1}), ("staged", {"order": "page"}), ("replay", {}), ("fused", {"prefetch": "all"})])
def test_every_wait_with_two_slots_a_channel_is_needed(name, changes, page):
    needed(lowered(name, page=page, sizes=SMALL, channel_slots=2, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["staged", "fused"])
def test_every_wait_with_one_tile_in_l0_is_needed(name):
    needed(lowered(name, sizes=SMALL, l0_slots=1))


# --- channels --------------------------------------------------------------------------------------------------------
def test_a_writer_waits_for_the_reads_of_the_turn_before_the_last():
    """Two signals before the loop prime the two slots, and two waits after it take the last signals."""
    def primes(slots):
        k = kernel(lowered("staged", sizes=SMALL, value_heads=1, order="page", channel_slots=slots), "A")
        i = next(i for i, s in enumerate(k.body) if isinstance(s, Loop))
        return ([o.attr("why") for o in k.body[:i] if o.kind == "signal" and "." in o.attr("src")],
                [o.attr("why") for o in k.body[i:] if not isinstance(o, Loop) and o.kind == "wait" and "." in o.attr("src")])
    once, twice = primes(1), primes(2)
    assert len(once[0]) == len(once[1]) > 0
    assert sorted(twice[0]) == sorted(twice[1]) == sorted(2 * once[0])


def test_one_slot_does_not_do_with_the_waits_of_two():
    p = lowered("staged", sizes=SMALL, value_heads=1, order="page", channel_slots=2)
    one = replace(p, tensors=tuple(replace(t, slots=1) for t in p.tensors))
    with pytest.raises(RaceError, match="does not wait for"):
        check_waits(one, ASCEND_A2)


def test_slots_of_a_channel_are_interpreted():
    """A load from the other slot gets the tile of another iteration."""
    p = lowered("fused", sizes=SMALL, channel_slots=2, prefetch="no")
    problem = Problem([70], 1, 1)

    def output(q):
        import torch
        gen = torch.Generator().manual_seed(0)
        x = {t.name: torch.randn(1 if t.index == "sequence" else 70, 1, *t.tile.shape(p.sizes)[t.index != "sequence":],
                                 generator=gen, dtype=torch.float64) / 8 for t in p.role("input")}
        return interpret(q, problem, x, dict.fromkeys(p.scalars, 0.5))["o"]
    right = output(p)
    channel = {t.name for t in p.tensors if t.slots == 2}
    first = next(o for o in walk(p.kernels[0].body) if o.kind == "load" and o.attr("tensor") in channel)
    wrong = changed(p, lambda o: with_attr(o, ahead=1) if o is first else o)
    with pytest.raises(KeyError):  # no op wrote that slot yet
        output(wrong)
    assert right.isfinite().all()


# --- L0 --------------------------------------------------------------------------------------------------------------
def test_operands_of_products_take_the_halves_of_l0_in_turn(_unchecked):  # noqa: F811
    for k in lowered("staged", sizes={"C": 128, "K": 128, "V": 128}).kernels:
        for space in ("L0A", "L0B"):
            here = {b.name: b.offset for b in k.buffers if b.space == space}
            order = [here[o.buffer] for o in walk(k.body) if o.buffer in here]
            assert all(x != y for x, y in pairwise(order)), (k.name, space)
            assert set(order) <= {0, ASCEND_A2.spaces[space] // 2}


def test_one_tile_in_l0(_unchecked):  # noqa: F811
    p = lowered("staged", sizes={"C": 128, "K": 128, "V": 128}, l0_slots=1)
    assert {b.offset for k in p.kernels for b in k.buffers if b.space in ("L0A", "L0B")} == {0}


def test_halves_that_are_too_small_are_no_error(_unchecked):  # noqa: F811
    lowered("staged", dtype="float32", sizes={"C": 128, "K": 128, "V": 128})


# --- ahead -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name, prefetch", WALKS)
def test_what_is_ahead_has_a_slot_a_turn(name, prefetch):
    p = lowered(name, sizes=SMALL, prefetch=prefetch)
    found = [c for k in p.kernels for lp in loops(k.body) for c in lp.carried if c.slots == 2]
    assert found
    for k in p.kernels:
        ring, access = rings(k), accesses(p, k, ASCEND_A2)
        for found in access.values():
            for a in found:
                if a.value in ring and a.space in ASCEND_A2.spaces:
                    assert a.slots == 2 and (a.at({a.loop: 0}).low, a.at({a.loop: 1}).low) != (a.low, a.low) or not a.loop


@pytest.mark.slow
def test_operands_ahead_are_loads_of_the_cube():
    p = lowered("staged", sizes=SMALL, prefetch="operands")
    ahead = [o for k in p.kernels for o in walk(k.body) if o.attr("ahead") and o.kind not in ("signal", "wait")]
    assert ahead and {(o.agent, o.kind) for o in ahead} == {("cube", "load"), ("cube", "valid")}


def test_all_is_what_needs_no_state():
    """Of the next chunk the inverse, but no product with the state."""
    p = lowered("fused", sizes=SMALL, prefetch="all")
    ahead = {o.out.removesuffix("_next") for o in walk(p.kernels[0].body) if o.attr("ahead") and o.out.endswith("_next")}
    assert {"k_kT", "G", "q_kT"} <= ahead
    assert not {"U", "o", "S_f16", "S"} & ahead


def test_nothing_is_ahead_over_instances():
    p = lowered("staged", sizes=SMALL, prefetch="all")
    assert not any(o.attr("ahead") for k in p.kernels if k.grid == "chunks" for o in walk(k.body))


def test_values_that_are_ahead_by_mistake_are_seen():
    """A load that is not ahead any more gives this chunk's tile where the next one's is meant."""
    p = lowered("fused", sizes=SMALL, prefetch="loads")
    first = next(o for o in walk(p.kernels[0].body) if o.kind == "load" and o.out.endswith("_next"))
    late = changed(p, lambda o: replace(o, attrs=tuple(a for a in o.attrs if a[0] != "ahead")) if o is first else o)
    x = problem([35, 17], 1, 2, 16, 32)
    assert rms_error(run(late, x)["o"], run(p, x)["o"]) > 1e-3


SUMS = """
from gdn_codegen.ir.builder import algorithm, carried


@algorithm(v="C V", S=carried("C V"))
def sums(v, S):
    U = v * 2.0
    o = S * 1.0
    S = S + U
    return o, S
"""


@pytest.mark.parametrize("change, message", [
    (lambda o: with_attr(o, id=o.attr("id")[:1]) if isinstance(o.attr("id"), tuple) else o, "set again|does not wait"),
    (lambda o: with_attr(o, ahead=o.attr("ahead", 0) + 1) if o.kind == "wait" and isinstance(o.attr("id"), tuple) else o,
     "nothing sets|does not wait"),
    (lambda o: None if isinstance(o.attr("id"), tuple) else o, "does not wait|left set")])
def test_ids_take_turns(tmp_path, monkeypatch, change, message):
    """A pipe signals the next chunk's tile before this one's signal was taken: two ids alternate. The state has the dims of the
    tile, which pages may not have, so that no product lies between."""
    monkeypatch.setattr(pages, "of_state", lambda *declared: ("C", "V"))
    page = tmp_path / "sums.py"
    page.write_text(SUMS)
    s = Schedule("sums", (("U",), ("o", "S")), prefetch="loads", order="page")
    p = lower(find(f"{page}:sums").trace(), "pto", s, SMALL, "float16")
    turns = [o for k in p.kernels for o in walk(k.body) if isinstance(o.attr("id"), tuple)]
    assert turns and all(len(set(o.attr("id"))) == 2 and o.attr("loop") == "chunk" for o in turns)
    with pytest.raises(RaceError, match=message):
        check_waits(changed(p, change), ASCEND_A2)
