"""Warm-ups of walks over parts, and parts longest first."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error
from walks import PLANS, SIZES, inside, lowered, walker, with_body

from gdn_codegen.algorithms import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import Loop, loops, map_ops, walk
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.ops import OWN_PART
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes import pipelines
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.rings import check_rings
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import ScheduleError, named, varied
from gdn_codegen.targets import lower


def test_warm_ups_leave_out_what_leads_to_no_state():
    marked = inside(lowered("warm_up", upto="mbarriers"))
    own = {o.out or (o.kind, o.attr("channel")) for o in marked if o.attr(OWN_PART)}
    assert {"q", "q_kT", "q_S", "o_sum", "q_kT_D_beta_f16_shared", "o_f16_shared"} <= own
    needed = {"k", "v", "Tinv_below", "beta", "G", "k_S", "v_T", "U_unscaled", "S_next", "exp_G_shared", ("wait", "k_ready"),
              ("signal", "k_free")}
    assert not own & needed
    assert {c for o in own if isinstance(o, tuple) and (c := o[1])} == {"o_f16_shared_ready", "o_f16_shared_free"}
    assert not any(o.attr(OWN_PART) for o in inside(lowered(replace(PLANS["warm_up"], warm_up="all"), upto="mbarriers")))


def test_a_warm_up_that_leaves_ops_out_is_a_loop_before_the_part():
    """It has the ops that are not marked, without barriers for a ragged tail, and hands the state to the loop over the part."""
    marked, p = lowered("warm_up", upto="mbarriers"), lowered("warm_up")
    before, part = (lp for lp in walker(p).body if isinstance(lp, Loop))
    assert (before.index, before.warm_up, part.index, part.warm_up) == ("before", "warm_up", "chunk", "")
    assert [c.result for c in before.carried] == [c.init for c in part.carried]
    bare = lambda o: o.with_attrs(**{OWN_PART: None, "tail": None, "begun": None})
    assert [bare(o) for o in inside(p)] == [bare(o) for o in inside(marked)]
    assert inside(p, "before") == [bare(o) for o in inside(marked) if not o.attr(OWN_PART)]
    assert [o.attr("tail") for o in inside(p)] == [o.attr("tail") for o in inside(marked)]
    for plan in ("walk", replace(PLANS["warm_up"], warm_up="all")):
        assert len(list(loops(walker(lowered(plan)).body))) == 1


def test_an_agent_with_the_same_ops_in_both_loops_runs_one_loop():
    """The other agents have ops that only the part needs, or that handle a ragged tail."""
    p = lowered("fused_warm_up")
    assert walker(p).one_loop == ("solve",)
    assert not walker(lowered("fused_walk")).one_loop
    assert not walker(lowered(replace(PLANS["fused_warm_up"], warm_up="all"))).one_loop
    assert parse_program(program_text(p)) == p
    with pytest.raises(VerifyError, match="state run one loop over a warm-up and the part; accepted: agents with the"):
        verify(replace(p, kernels=tuple(replace(k, one_loop=("solve", "state")) if k == walker(p) else k for k in p.kernels)))
    ops = inside(p, "before")
    with pytest.raises(VerifyError, match="solve run one loop"):
        verify(of_warm_up(p, [o for o in ops if (o.kind, o.agent) != ("fence", "solve")]))


def test_the_text_has_one_loop_of_an_agent_whose_ops_are_the_same():
    text = render(Build("tilelang", 64, schedule=varied("fused_walk", "sm_90a", partition="decay"), arch="sm_90a"))
    text = text[text.index("def o_S_kernel("):]
    assert text.count("t.whole_inverses(") == 1
    assert text.count("for iteration in T.serial(stop - begin):") == 1


def of_warm_up(p, body, **fields):
    """The program with another body in the loop over the warm-up. fields: of that loop."""
    k = walker(p)
    new = tuple(replace(s, body=tuple(body), **fields) if isinstance(s, Loop) and s.index == "before" else s for s in k.body)
    return replace(p, kernels=tuple(replace(k, body=new) if x is k else x for x in p.kernels))


def test_the_loop_over_the_part_continues_that_over_the_warm_up():
    """Else the verifier refuses the program."""
    p = lowered("warm_up")
    ops = inside(p, "before")
    assert verify(of_warm_up(p, ops)) == p and parse_program(program_text(p)) == p
    with pytest.raises(VerifyError, match="in the loop over a warm-up: accepted are ops of the loop after it"):
        verify(of_warm_up(p, [*ops[1:3], ops[0], *ops[3:]]))
    (at,) = (n for n, o in enumerate(ops) if o.out == "k_S")
    with pytest.raises(VerifyError, match="k_S"):
        verify(of_warm_up(p, [*ops[:at], replace(ops[at], buffer="U_unscaled"), *ops[at + 1:]]))
    with pytest.raises(VerifyError, match="k_S is read before it is defined"):
        verify(of_warm_up(p, ops[:at] + ops[at + 1:]))
    with pytest.raises(VerifyError, match=r"accepted are ops .*that store nothing"):
        verify(of_warm_up(p, inside(p)))
    (c,) = next(loops(walker(p).body)).carried
    with pytest.raises(VerifyError, match="hands other to the next loop"):
        verify(of_warm_up(p, ops, carried=(replace(c, result="other"),)))


@pytest.mark.parametrize("warm_up", ["all", "state"])
def test_warm_ups_do_not_change_the_results(warm_up):
    """Stage by stage, what warm-ups leave out being NaN; short parts, gates that forget a chunk and a half."""
    x = problem([9 * 64 + 5, 64, 0], 1, 2, 64, 64, torch.float32, gate=-0.2)
    want, seen = expected(x), []
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}

    def see(name, before, p, c):
        if name in ("partition", "warm_up", "mbarriers", "warm_up_loop"):
            i = Interpreter(p, Problem(x["lengths"], 1, 2, 2), {"scale": x["scale"]}, exact=True)
            got = i.run({t.name: given[t.name] for t in p.role("input")})
            seen.append((name, rms_error(got["o"], want[0]), rms_error(got["final_state"], want[1])))
            assert (i.memory["S_warm_up"] > 0).any()
    pipelines.observers.append(see)
    try:
        lowered(replace(PLANS["warm_up"], warm_up=warm_up))
    finally:
        pipelines.observers.remove(see)
    assert [n for n, *_ in seen] == ["partition", "warm_up", "mbarriers", "warm_up_loop"]
    assert all(max(e) < 1e-4 for _, *e in seen), seen


def test_a_value_left_out_of_a_warm_up_is_nan_there():
    """A product that the state needs is marked: the state, and all that is read of it after the warm-up, is NaN."""
    x, found = problem([9 * 64], 1, 2, 64, 64, torch.float32, gate=-0.2), []
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}

    def mark(o):
        return [o.with_attrs(**{OWN_PART: True}) if o.kind == "matmul" and o.type.dims == ("V", "K") else o]

    def see(name, before, p, c):
        if name == "warm_up":
            for y in (p, p.map_kernels(lambda k: replace(k, body=map_ops(k.body, mark)) if k.name == "o_S" else k)):
                i = Interpreter(y, Problem(x["lengths"], 1, 2, 2), {"scale": x["scale"]}, exact=True)
                found.append(bool(i.run({t.name: given[t.name] for t in y.role("input")})["o"].isnan().any()))
    pipelines.observers.append(see)
    try:
        lowered("warm_up")
    finally:
        pipelines.observers.remove(see)
    assert found == [False, True]


def test_longest_first_walks_each_part_once():
    """Stage by stage: parts of two chunks, whose warm-ups have two chunks or, in the other head, one."""
    x = problem([6 * 64 + 5, 64, 0], 1, 2, 64, 64, torch.float32, gate=-0.1)
    x["g"][:, 1] *= 20  # forgets within a chunk
    want, seen = expected(x), []
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}

    class Counting(Interpreter):
        def part(self, k, body, env, at, sizes):
            super().part(k, body, env, at, sizes)
            if k.name == "o_S":
                self.shares.append((at.seq, at.head, at.part, at.half, "S_T" in env))

    def see(name, before, p, c):
        if name in ("partition", "mbarriers"):
            i = Counting(p, Problem(x["lengths"], 1, 2, 2), {"scale": x["scale"]}, exact=True)
            i.shares = []
            got = i.run({t.name: given[t.name] for t in p.role("input")})
            seen.append((rms_error(got["o"], want[0]), rms_error(got["final_state"], want[1])))
            walked = [half for *_, half, done in i.shares if done]
            assert set(walked) == {0, 1} and len(walked) * 2 == len(i.shares)
    pipelines.observers.append(see)
    try:
        lowered("longest")
    finally:
        pipelines.observers.remove(see)
    assert len(seen) == 2 and all(max(e) < 1e-4 for e in seen), seen


@pytest.mark.slow
def test_longest_first_is_for_parts_that_have_a_warm_up():
    for how in (None, "exact"):
        with pytest.raises(ScheduleError, match="longest_first=True; accepted only with partition='decay'"):
            replace(named("walk"), partition=how, longest_first=True)
    shares = {at: any(o.kind == "claim_part" for k in lower(find("gated_delta_rule").trace(), at[0], PLANS["longest"], SIZES,
                                                       "float16", at[1]).kernels for o in walk(k.body))
              for at in (("tilelang", "sm_90a"), ("tilelang", ""), ("triton", ""))}
    assert shares == {("tilelang", "sm_90a"): True, ("tilelang", ""): False, ("triton", ""): True}


def test_a_value_that_the_state_needs_cannot_be_left_out():
    """The proof knows the warm-up length: a ring filled in iterations of the own part only, read in all of them."""
    p = lowered("warm_up", upto="mbarriers")
    for lost in ("k", "exp_G_shared"):
        ops = [replace(o, attrs=(*o.attrs, (OWN_PART, True))) if o.out == lost else o for o in inside(p)]
        with pytest.raises(RaceError, match=lost):
            check_rings(with_body(p, ops), SM_90A)
    p = lowered("warm_up")
    for lost in ("k", "exp_G_shared"):
        with pytest.raises(RaceError, match=lost):
            check_rings(of_warm_up(p, [o for o in inside(p, "before") if o.out != lost]), SM_90A)


def test_waits_of_the_warm_up_are_proved():
    p = lowered("warm_up")
    check_rings(p, SM_90A)
    passed = []
    for n, o in enumerate(ops := inside(p, "before")):
        if o.kind in ("wait", "signal"):
            try:
                check_rings(of_warm_up(p, ops[:n] + ops[n + 1:]), SM_90A)
                passed.append((o.kind, o.agent, o.attr("channel")))
            except RaceError:
                pass
    # What only the part's own ops need: aux reads k for the output alone, and its wait for k keeps it from running ahead.
    assert set(passed) == {("wait", "aux", "k_ready"), ("wait", "aux", "exp_G_shared_free")}


def test_only_chunks_of_a_warm_up_are_copied_without_a_tail():
    p = lowered("warm_up")
    ops = [o.with_attrs(tail=None) if o.out == "k" else o for o in inside(p)]
    with pytest.raises(RaceError, match="k of loader is copied in whole tiles in iteration 0, where a chunk may have fewer rows"):
        check_rings(with_body(p, ops), SM_90A)


def test_barriers_of_own_turns_count_those():
    p = lowered("warm_up", upto="mbarriers")
    ops = [replace(o, attrs=tuple(a for a in o.attrs if a[0] != OWN_PART)) if o.kind == "wait" else o for o in inside(p)]
    with pytest.raises(RaceError, match="of the warm-up: its barrier counts the others only"):
        check_rings(with_body(p, ops), SM_90A)
    p = lowered("warm_up")
    own = next(o for o in inside(p) if o.kind == "wait" and o.attr("channel") == "o_f16_shared_ready")
    with pytest.raises(RaceError, match="of the warm-up: its barrier counts the others only"):
        check_rings(of_warm_up(p, [*inside(p, "before"), own]), SM_90A)


@pytest.mark.parametrize("name", ["walk", pytest.param("fused_walk", marks=pytest.mark.slow)])
def test_summaries_of_parts_by_agents_mean_the_page(name):
    """Each part starts from the summaries of the parts before it. Kernels that compute them hold the state transposed."""
    x = problem([9 * 64 + 5, 64, 0], 1, 2, 64, 64, torch.float32, gate=-0.001)
    p = lowered(replace(PLANS[name], partition="exact"))
    assert [k.name for k in p.kernels if k.agents] == ["S_offset", "S_factor", "o_S"]
    i = Interpreter(p, Problem(x["lengths"], 1, 2, 2), {"scale": x["scale"]}, exact=True)
    got = i.run({**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]})
    want = expected(x)
    assert max(rms_error(got["o"], want[0]), rms_error(got["final_state"], want[1])) < 1e-4
