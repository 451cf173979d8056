"""Which warp group computes what is data: assignments from outside the package build without an edit of a pass."""
import ast
from dataclasses import replace
from pathlib import Path

import pytest
from test_members_in_groups import delta_net, dplr, ssd
from test_own_pages import means_the_page
from walks import SIZES, SYNC, inside, lowered, walker

import gdn_codegen
from gdn_codegen.algorithms import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.emit import tilelang
from gdn_codegen.ir.core import map_ops
from gdn_codegen.passes.agents.tasks import Tasks
from gdn_codegen.passes.agents.warp_groups import warp_groups
from gdn_codegen.schedule import Schedule, ScheduleError, named
from gdn_codegen.schedule.agents import ASSIGNMENTS, SOLVING_WALK, WALK, WALK_TASKS, AgentPlan, Assignment, register
from gdn_codegen.targets import lower

#: One warp group that computes, and a warp that copies.
TWO = Assignment("two", (AgentPlan("compute", ("state", "output", "rest", "solved"), 0, 232),
                         AgentPlan("mover", ("load", "store"), 1, 24)))
#: One that inverts, too.
THREE = Assignment("three", (AgentPlan("compute", ("state", "output", "rest", "solved", "inverse"), 0, 232),
                             AgentPlan("loader", ("load",), 1, 24), AgentPlan("store", ("store",), 1, 24)))
#: What leads to no next state has warps of its own.
SIX = Assignment("six", (AgentPlan("state", ("state", "solved"), 0, 152), AgentPlan("out", ("output",), 0, 104),
                         AgentPlan("aux", ("rest",), 4, 80, slots=3), AgentPlan("loader", ("load",), 1, 48),
                         AgentPlan("store", ("store",), 1, 48), AgentPlan("solve", ("inverse",), 2, 48)))


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    for x in (TWO, THREE, SIX):
        monkeypatch.setitem(ASSIGNMENTS, x.name, x)


def test_the_passes_name_no_agent():
    """Nor do emitters, checkers and devices. "store" is an op, too, and "state" a task."""
    agents = {a.name for x in (WALK, SOLVING_WALK) for a in x.agents} - {"store", "state"}
    for folder in ("passes", "emit", "prove", "devices"):
        for path in (Path(gdn_codegen.__file__).parent / folder).rglob("*.py"):
            words = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
            assert not agents & words, path


@pytest.mark.parametrize("page", ["gated_delta_rule", "simple_gla"])
@pytest.mark.parametrize("agents, schedule", [("two", "walk"), ("three", "walk"), ("three", "fused_walk"), ("six", "walk"),
                                              ("six", "fused_walk")])
def test_assignments_from_outside_mean_the_page(agents, schedule, page):
    means_the_page(find(page), replace(named(schedule, "sm_90a"), agents=agents, stages=1), "tilelang", "sm_90a")


@pytest.mark.parametrize("page", [ssd, delta_net, dplr])
@pytest.mark.parametrize("agents", ["three", "six"])
def test_they_serve_other_members(agents, page):
    means_the_page(page, replace(named("fused_walk", "sm_90a"), agents=agents, stages=1), "tilelang", "sm_90a")


@pytest.mark.parametrize("x, plan", [(TWO, "walk"), (THREE, "fused_walk"), (SIX, "fused_walk")])
def test_agents_have_the_tasks_threads_and_registers_that_they_were_given(x, plan):
    p = lowered(replace(named(plan, "sm_90a"), agents=x.name))
    k = walker(p)
    assert [(a.name, a.registers, a.slots) for a in k.agents] == [(a.name, a.registers, a.slots) for a in x.agents]
    assert [a.threads for a in k.agents] == [32 * (a.warps or 4) for a in x.agents]
    assert [a.first for a in k.agents] == [sum(b.threads for b in k.agents[:n]) for n in range(len(k.agents))]
    mine = {a.name: {o.kind for o in inside(p) if o.agent == a.name and o.kind not in (*SYNC, "await_kernels")}
            for a in k.agents}
    assert mine[x.agent_of["load"]] == {"load", *(["store"] if x is TWO else [])}
    assert ("diag_inverse" in mine[x.agent_of.get("inverse", "mover")]) == (x is not TWO)
    assert all(w.name in text.body for k, text in zip(p.kernels, tilelang.emit(p, "bthd"), strict=True) for w in k.buffers)


def test_what_an_agent_reads_of_its_own_through_shared_memory_it_waits_for():
    """Its threads run side by side."""
    p = lowered(replace(named("walk", "sm_90a"), agents="two"))
    own = [o for o in inside(p) if o.kind == "move" and o.agent == "compute"]
    assert own
    signals, waits = ({o.attr("channel") for o in inside(p) if o.kind == kind and o.agent == "compute"}
                      for kind in ("signal", "wait"))
    assert signals & waits


def test_tasks_come_from_the_graph():
    p = lower(find("gated_delta_rule").trace(), "tilelang", named("fused_walk", "sm_90a"), SIZES, "float16", "sm_90a",
                        upto="accumulate")
    r = Tasks(p, p.kernels[1], 64)
    of = {o.out or f"{o.kind} {o.attr('tensor')}": task for o, task in r.of.items()}
    assert set(of.values()) == set(WALK_TASKS) - {"load_numbers", "solved", "tokens", "vectors"}
    assert {n for n, x in of.items() if x == "load"} == {"q", "k", "v", "G", "beta"}
    assert [n for n, x in of.items() if x == "store"] == ["store o"]
    assert of["k_kT"] == of["q_kT"] == "rest" and of["q_S"] == "output"
    assert of["k_S"] == of["v_minus_exp_G_k_S"] == of["S_next"] == "state"


def test_what_is_computed_from_an_inverse_alone_has_a_place():
    """Form wy: W and the offset of U do not wait for the state."""
    means_the_page(find("gated_delta_rule"), replace(named("fused_walk", "sm_90a"), form="wy"), "tilelang", "sm_90a")
    p = lowered(replace(named("fused_walk", "sm_90a"), form="wy"))
    assert {o.agent for o in inside(p) if o.out == "U_offset"} == {"state"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("agents, sizes, message", [
    ("two", {}, r"agents=two has no agent for Tinv_below_f16 \(inverse\); accepted: an assignment with these tasks"),
    ("walk", {}, r"agents=walk has no agent for Tinv_below_f16 \(inverse\)"),
    ("three", {"V": 128}, "product k_kT is 64 x 64 over 64; compute takes 128 rows"),
    ("six", {"V": 128}, "agents=six takes 768 threads and 81920 registers .*state 256 threads of 152 registers, .*; "
                        "a block has 1024 and 65536; with v_block=64 the state needs one warp group")])
def test_an_assignment_that_does_not_fit_is_refused_in_words(agents, sizes, message):
    with pytest.raises(ScheduleError, match=message):
        lowered(replace(named("fused_walk", "sm_90a"), agents=agents), sizes={**SIZES, **sizes})


def test_a_schedule_names_an_assignment_that_is_known():
    accepted = "walk, operand_walk, early_outputs, solving_walk, fused_gradient, four_in_turn, two, three, six"
    with pytest.raises(ScheduleError, match=f"agents='none'; accepted are {accepted}, or '' for one"):
        Schedule("own", (("o", "S"),), agents="none")
    assert register(WALK) is WALK
    with pytest.raises(ValueError, match="the name 'walk', which is registered already"):
        register(replace(SOLVING_WALK, name="walk"))


ALL = ("state", "output", "rest", "load", "store")


@pytest.mark.parametrize("agents, message", [
    ((AgentPlan("a b", ALL, 0, 200),), "agent 'a b'; accepted: an identifier"),
    ((AgentPlan("a", ALL, 0, 200), AgentPlan("a", ("inverse",), 1, 24)), "agent 'a'; accepted: an identifier, once"),
    ((AgentPlan("a", ALL, 5, 200),), "warps=5; accepted: 0 .* or a multiple of 4"),
    ((AgentPlan("a", ALL, 0, 100),), "registers=100; accepted: multiples of 8 from 24 to 240"),
    ((AgentPlan("a", ALL, 0, 200, slots=0),), "slots=0; accepted: whole numbers from 1"),
    ((AgentPlan("a", ALL[1:], 0, 200), AgentPlan("b", ("state",), 2, 24)), "warps=2 for the tasks state; accepted .*: 0, 4, 8"),
    ((AgentPlan("a", (*ALL, "all"), 0, 200),), "got the tasks .*all; accepted: each of load, load_numbers, gates, rest"),
    ((AgentPlan("a", ("state",), 0, 200),), "and state and output"),
    ((AgentPlan("a", ALL, 0, 200), AgentPlan("b", ("vectors",), 2, 24)), "agent b: warps=2 for the task vectors; accepted: 1"),
    ((AgentPlan("a", ALL, 4, 200, in_turns=True),), "in_turns=True, warps=4 .*state, output.*tasks rest, gates"),
    ((AgentPlan("a", ALL[:2], 0, 200), AgentPlan("b", ("rest",), 0, 80, in_turns=True)), "in_turns=True, warps=0.*4, 8"),
    ((AgentPlan("a", ALL[:2], 0, 200), AgentPlan("b", ("rest",), 4, 80, slots=3, in_turns=True)), "slots=3 .*as many slots"),
    ((AgentPlan("a", ALL[:2], 0, 200), AgentPlan("b", ("rest",), 4, 80, in_turns=1)), "in_turns=1, .*accepted: False, or True"),
    ((AgentPlan("b", ("load",), 1, 24), AgentPlan("a", ALL[:3], 0, 200)), "agents of fewer than four warps last"),
    ((AgentPlan("a", ALL[:3], 0, 200), AgentPlan("b", ("load",), 1, 24), AgentPlan("c", ("store",), 1, 32)),
     "with the same registers")])
def test_what_is_no_assignment(agents, message):
    with pytest.raises(ValueError, match=message):
        Assignment("mine", agents)
    with pytest.raises(ValueError, match="got the name 'my own'; accepted: an identifier"):
        Assignment("my own", WALK.agents)


@pytest.mark.parametrize("value, what", [
    ("v", "a plain copy of a loaded value"), ("S", "a value that no op of the loop computes")])
def test_a_store_of_what_no_agent_computes_is_refused_in_words(value, what):
    p = lower(find("gated_delta_rule").trace(), "tilelang", named("fused_walk", "sm_90a"), SIZES, "float16", "sm_90a",
              upto="assign")
    k = p.kernels[-1]
    body = map_ops(k.body, lambda o: [replace(o, args=(value,)) if o.kind == "store" and o.attr("tensor") == "o" else o])
    with pytest.raises(ScheduleError, match=f"o is {what}; warp groups cannot store those; let an earlier kernel store it"):
        warp_groups(replace(p, kernels=(*p.kernels[:-1], replace(k, body=body))), named("fused_walk", "sm_90a"), SM_90A)
