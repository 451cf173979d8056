"""Two cores of an agent in the same global memory: the checker sees what nothing orders, and joins of the cores order it."""
import shutil
from dataclasses import replace

import pytest
import torch
from reference import module

from gdn_codegen import pto_sim
from gdn_codegen.derived_pages import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.core import map_ops, walk
from gdn_codegen.passes.sync import synchronise
from gdn_codegen.prove.happens_before import RaceError, check_waits
from gdn_codegen.runtime import build as build_module
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 32, "V": 32}
IN_PLACE = Contract.parse("state=pool/in_place")
CONVOLUTION = Build("pto", 16, algorithm="causal_conv1d", head_dim_k=32, head_dim_v=32, schedule="fused", contract=IN_PLACE)


def changed(p, each):
    """The program with other ops."""
    return replace(p, kernels=tuple(replace(k, body=map_ops(k.body, each)) for k in p.kernels))


def joins(p):
    return [o for k in p.kernels for o in walk(k.body) if o.kind == "barrier" and o.attr("scope") == "cores"]


def without_joins(p):
    return changed(p, lambda o: [] if o.attr("scope") == "cores" else [o])


def test_a_vector_that_overwrites_itself_needs_one_join():
    """In a sequence of no tokens no flags between the cores order them. The one join stands for all four states."""
    p = lowered(CONVOLUTION)
    check_waits(p, ASCEND_A2)
    assert len(joins(p)) == 1
    with pytest.raises(RaceError, match=r"store \(vector 0.MTE3, writes final_s1\) does not wait for s1_0 \(vector 1.MTE2, reads "
                                        r"initial_s1\); both use initial_s1 of item 2\[0:16\]"):
        check_waits(without_joins(p), ASCEND_A2)


def test_a_join_of_another_pipe_or_after_the_store_is_refused():
    p = lowered(CONVOLUTION)
    (join,) = joins(p)
    with pytest.raises(RaceError, match=r"vector 1\.MTE2"):
        check_waits(changed(p, lambda o: [o.with_attrs(src="MTE3")] if o == join else [o]), ASCEND_A2)

    def later(o):
        return [] if o == join else [o, join] if o.attr("tensor") == "final_s4" else [o]
    with pytest.raises(RaceError, match=r"vector 1\.MTE2"):
        check_waits(changed(p, later), ASCEND_A2)


@pytest.mark.parametrize("contract", ["", "state=pool", "in_place"])
def test_states_in_other_memory_and_states_with_rows_need_none(contract):
    page, how = ("gated_delta_rule", "state=vk/pool/in_place") if contract == "in_place" else ("causal_conv1d", contract)
    p = lower(find(page).trace(), "pto", varied("fused"), SIZES, "float16", contract=Contract.parse(how))
    assert not joins(p)


def test_cores_that_divide_a_state_in_two_ways_race():
    """Each stores all that it has, where both should have columns of their own."""
    contract = Contract.parse("state=vk/pool/in_place")
    p = lower(find("gated_delta_rule").trace(), "pto", varied("fused"), {**SIZES, "K": 64}, "float16", contract=contract)
    check_waits(p, ASCEND_A2)

    def by_rows(o):
        return [o.with_attrs(columns=None)] if o.kind == "store" and o.attr("tensor") == "final_state" else [o]
    with pytest.raises(RaceError, match=r"vector 1.MTE3, writes final_state\) does not wait for store \(vector 0"):
        check_waits(changed(p, by_rows), ASCEND_A2)


def test_a_tensor_that_two_agents_use_is_seen():
    """The cube core stores to the tensor from which vector cores load: no channel, and no flag for it."""
    p = lower(find("gated_delta_rule").trace(), "pto", varied("fused"), SIZES, "float16")
    made = next(o for k in p.kernels for o in walk(k.body) if o.kind == "store" and o.agent == "cube")

    def also(o):
        return [o, o.with_attrs(tensor="v")] if o is made else [o]
    with pytest.raises(RaceError, match=r"both use v of item"):
        check_waits(changed(p, also), ASCEND_A2)


def test_kernels_of_one_launch_have_a_barrier_between():
    p = lower(find("gated_delta_rule").trace(), "pto", varied("staged", launch="single"), SIZES, "float16")
    check_waits(p, ASCEND_A2)
    for agent in ASCEND_A2.agents:
        first, *rest = p.kernels
        body = tuple(s for s in first.body if s not in first.body[-2:] or s.agent != agent)
        with pytest.raises(RaceError, match="no barrier over the device at its end"):
            check_waits(replace(p, kernels=(replace(first, body=body), *rest)), ASCEND_A2)


def test_a_join_has_a_flag_of_its_own(monkeypatch):
    """With as many flags as the exchange between agents takes, there is none left for it."""
    p = lower(find("causal_conv1d").trace(), "pto", varied("fused"), SIZES, "float16", contract=IN_PLACE, upto="pack")
    done = synchronise.synchronise(p, ASCEND_A2)
    used = {o.attr("id") for k in done.kernels for o in walk(k.body) if o.kind == "wait" and "." in o.attr("src")}
    assert ASCEND_A2.flags - 1 not in used
    synchronise.synchronise(p, replace(ASCEND_A2, flags=len(used) + 1))
    with pytest.raises(ScheduleError, match=rf"needs {len(used) + 1} cross-core flags, ascend_a2 has {len(used)}"):
        synchronise.synchronise(p, replace(ASCEND_A2, flags=len(used)))


# --- in the simulator ------------------------------------------------------------------------------------------------
def updated(lengths):
    """Whether a call of the module updates its pools, states bit by bit, and no other slot."""
    torch.manual_seed(0)
    x, at = torch.randn(1, sum(lengths), 2, 32).half(), torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    pools = {f"initial_s{i}": torch.randn(len(lengths) + 2, 2, 32) for i in range(1, 5)}
    want, start = [x.clone() for x in pools.values()], 0
    for n, length in enumerate(lengths, 1):
        for t in range(start, start + length):
            last = [x[0, t].float(), *(w[n].clone() for w in want[:3])]
            for w, s in zip(want, last, strict=True):
                w[n] = s
        start += length
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    fn = getattr(module(render(CONVOLUTION)), CONVOLUTION.function)
    fn(x, torch.randn(2, 32), torch.randn(2, 32), **pools, linear=1.0, cu_seqlens=ends, state_indices=at)
    return all(torch.equal(a, b) for a, b in zip(pools.values(), want, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ 12 or newer")
def test_the_simulator_sees_the_same(monkeypatch):
    """Without the join it stops at the sequence of no tokens, and not before."""
    assert updated([5, 17]) and updated([0, 17, 2, 0])
    less = without_joins(lowered(CONVOLUTION))
    monkeypatch.setattr(build_module, "lowered", lambda b: less)
    assert updated([5, 17])
    with pytest.raises(pto_sim.PtoSimError, match=r"\[race\] WAR on GM"):
        updated([0, 17, 2, 0])
