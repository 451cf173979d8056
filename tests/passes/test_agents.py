"""Agents with pipes: placement that fits, waits that are all needed, and errors that name what is wrong."""
from dataclasses import replace

import pytest
from devices import lower_for
from reference import ON_CORES, in_form
from tiers import every

from gdn_codegen.algorithms import find
from gdn_codegen.devices import HOPPER
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.core import Loop, walk
from gdn_codegen.passes.sync.synchronise import synchronise
from gdn_codegen.prove.happens_before import RaceError, channels, check_waits, without, without_barrier
from gdn_codegen.schedule import ScheduleError, named
from gdn_codegen.schedule.schedule import FORMS
from gdn_codegen.targets import lower

SIZES = {"C": 64, "K": 64, "V": 64}


def lowered(name="fused", form=None, dtype="float16", page="gated_delta_rule", sizes=SIZES, **changes):
    s = replace(in_form(named(name), form) if form else named(name), **changes)
    return lower(find(page).trace(), "pto", s, sizes, dtype)


# --- waits -----------------------------------------------------------------------------------------------------------
CHANGES = {"blocks": {"inverse_block": 16}, "page": {"value_heads": 1, "order": "page", "cache_masks": False}}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", ["staged", "replay"])
def test_every_wait_of_a_variant_is_needed(name, changes):
    needed(lowered(name, sizes={"C": 32, "K": 16, "V": 32}, **CHANGES[changes]))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["gated_delta_rule", pytest.param("simple_gla", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ON_CORES)
def test_every_wait_and_barrier_is_needed(name, page):
    """Take one out and the check fails: none is redundant."""
    needed(lowered(name, page=page, sizes={"C": 32, "K": 16, "V": 32}))


def needed(p):
    spare = []
    for k in p.kernels:
        assert channels(k)
        fewer = [(f"{k.name} wait {n}", without(k, n)) for n in channels(k)]
        fewer += [(f"{k.name} barrier {n}", without_barrier(k, n))
                  for n in range(sum(o.kind == "barrier" for o in walk(k.body)))]
        for what, less in fewer:
            try:
                check_waits(replace(p, kernels=(less,)), ASCEND_A2)
                spare.append(what)
            except RaceError:
                pass
    assert not spare


def drop(k, kind, n):
    """The kernel less its n-th op of a kind."""
    seen = -1

    def each(body):
        nonlocal seen
        for s in body:
            if isinstance(s, Loop):
                yield replace(s, body=tuple(each(s.body)))
                continue
            seen += s.kind == kind
            if s.kind != kind or seen != n:
                yield s
    return replace(k, body=tuple(each(k.body)))


def test_a_race_names_both_ops_and_the_bytes():
    p = lowered(prefetch="no")
    (k,) = p.kernels
    n = next(o.attr("channel") for o in walk(k.body) if o.kind == "wait" and o.attr("why").startswith("k_kT_channel ->"))
    with pytest.raises(RaceError, match=r"k_kT_in \(vector.MTE2, reads k_kT_channel\) does not wait for store \(cube.FIX, writes "
                                        r"k_kT_channel\); both use k_kT_channel"):
        check_waits(replace(p, kernels=(without(k, n),)), ASCEND_A2)


@pytest.mark.slow
@pytest.mark.parametrize("kind, message", [("signal", "nothing sets it|set again|left set|does not wait"),
                                           ("wait", "set again|left set|does not wait")])
def test_half_a_pair_is_refused(kind, message):
    p = lowered()
    (k,) = p.kernels
    for n in range(0, sum(o.kind == kind for o in walk(k.body)), 7):
        with pytest.raises(RaceError, match=message):
            check_waits(replace(p, kernels=(drop(k, kind, n),)), ASCEND_A2)


def test_one_agent_needs_no_waits():
    p = lower(find("gated_delta_rule").trace(), "tilelang", named("fused"), SIZES, "float16")
    assert synchronise(replace(p, stage="placed"), HOPPER).kernels == p.kernels
    assert not any(o.kind in ("signal", "barrier") for k in p.kernels for o in walk(k.body))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CORES)
def test_ids_are_the_devices(name):
    for k in lowered(name).kernels:
        for o in walk(k.body):
            if o.kind in ("signal", "wait"):
                ids = o.attr("id") if isinstance(o.attr("id"), tuple) else (o.attr("id"),)
                assert 0 <= min(ids) <= max(ids) < (ASCEND_A2.flags if "." in o.attr("src") else ASCEND_A2.events)


# --- places ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param((16, 64, 64), marks=pytest.mark.long), (128, 128, 128)])
@pytest.mark.parametrize("name, form, dtype", every(2, ON_CORES, FORMS, ["float16", "float32"]))
def test_schedules_fit(unchecked, name, form, size, dtype):
    p = lowered(name, form, dtype, sizes=dict(zip("CKV", size, strict=True)), inverse="doubling")
    for k in p.kernels:
        for b in k.buffers:
            assert b.offset % ASCEND_A2.align == 0, b
        spaces = {b.space for b in k.buffers}
        assert spaces <= set(ASCEND_A2.spaces)


def test_too_much_is_an_error_that_names_values_and_bytes(unchecked):
    with pytest.raises(ScheduleError, match=r"kernel o_S on ascend_a2: (UB|L0C|L0A|L0B) has \d+ bytes, and at the fullest "
                                            r"point \d+ are live: \w+ \d+, \w+ \d+.*; use a smaller chunk"):
        lowered("fused", sizes={"C": 128, "K": 256, "V": 256})


def test_rows_that_do_not_halve_are_refused(unchecked, monkeypatch):
    """On a device whose tiles may have any extent."""
    lower_for(monkeypatch, replace(ASCEND_A2, extents=()), "pto")
    with pytest.raises(ScheduleError, match=r"8 rows; accepted: multiples of 16, for 2 cores"):
        lowered("fused", sizes={"C": 32, "K": 8, "V": 32})


@pytest.mark.slow
def test_a_smaller_device_is_respected(unchecked, monkeypatch):
    small = replace(ASCEND_A2, spaces={**ASCEND_A2.spaces, "L1": 64 * 1024})
    lower_for(monkeypatch, small, "pto")
    for b in (b for k in lowered("fused").kernels for b in k.buffers if b.space == "L1"):
        assert b.offset + b.shape[0] * b.shape[1] * 2 <= 64 * 1024
    lower_for(monkeypatch, replace(ASCEND_A2, spaces={**ASCEND_A2.spaces, "L1": 16 * 1024}), "pto")
    with pytest.raises(ScheduleError, match="L1 has 16384 bytes"):
        lowered("fused")
