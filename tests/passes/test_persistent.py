"""Blocks that take one walk after another: what the pass makes, what orders the agents, and what is emitted."""
import shutil
from dataclasses import replace

import pytest
import torch
from walks import SIZES, SYNC, lowered, walker

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.builder import algorithm, carried
from gdn_codegen.ir.core import Loop, loops, map_ops
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.ring_runs import items, iterations
from gdn_codegen.prove.rings import check_rings
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import Schedule, ScheduleError, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower

PLANS = {n: varied(n, "sm_90a", persistent=True) for n in ("walk", "fused_walk")}
LENGTHS = [70, 0, 1, 64, 130, 0, 0]


def results(p, rest=3):
    """The outputs for sequences of several lengths, some without tokens, with initial states."""
    gen = torch.Generator().manual_seed(0)
    tokens, shapes = sum(LENGTHS) + rest, {"q": (1, 64), "k": (1, 64), "v": (2, 64), "g": (2,), "beta": (2,)}
    x = {n: torch.randn(tokens, *s, generator=gen) / 8 for n, s in shapes.items()}
    x |= {"g": -x["g"].abs(), "initial_state": torch.randn(len(LENGTHS), 2, 64, 64, generator=gen)}
    given = {t.name: x.get(t.name) for t in p.role("input")}
    return interpret(p, Problem(LENGTHS, 1, 2, rest=rest), given, {"scale": .1}, exact=False)


def with_ops(p, each):
    """The program with each op of its walk replaced by what `each` returns."""
    k = walker(p)
    return replace(p, kernels=tuple(replace(x, body=map_ops(x.body, each)) if x is k else x for x in p.kernels))


def around(p):
    """The ops of the loop over items, without those of the walk."""
    (loop,) = (lp for lp in loops(walker(p).body) if lp.index == "item")
    return [s for s in loop.body if not isinstance(s, Loop)]


@pytest.mark.parametrize("plan", PLANS)
def test_all_walks_give_the_same_bits_as_one_in_each_block(plan):
    one, several = results(lowered(plan)), results(lowered(PLANS[plan]))
    assert one.keys() == several.keys() and all(torch.equal(one[n], several[n]) for n in one)
    assert not any(x.isnan().any() for x in several.values())


def computed(body):
    """The ops of a body but for barriers, which follow from products that are asynchronous."""
    return [s.with_attrs(absent=None, asynchronous=None) if s.kind == "matmul" else s for s in body if s.kind not in SYNC]


@pytest.mark.parametrize("plan", PLANS)
def test_products_with_a_state_that_is_zero_are_left_out(plan):
    """Those that read the carried state alone, in the first iteration of a walk without an initial state."""
    p = lowered(PLANS[plan])
    marked = [o for o in walker(p).ops if o.kind == "matmul" and o.attr("absent")]
    state = next(lp for lp in loops(walker(p).body) if lp.index == "chunk").carried[0].name
    casts = {o.out for o in walker(p).ops if o.args[:1] == (state,)}
    assert marked and {o.attr("absent") for o in marked} == {"initial_state"}
    assert marked == [o for o in walker(p).ops if o.kind == "matmul" and o.args[0] in casts and len(o.args) == 2]
    text = render(Build("tilelang", 64, schedule=PLANS[plan], dtype="bfloat16", arch="sm_90a"))
    assert text.count("if has_initial_state != 0 or chunk > 0:") == len(marked)
    assert "absent" not in str(lowered(plan))


@pytest.mark.parametrize("plan", PLANS)
def test_the_walk_itself_stays_as_it_is(plan):
    """Its rings and their barriers, too: only the ring of numbers has new ones, of one slot more than loads have."""
    before, p = lowered(plan), lowered(PLANS[plan])
    (loop,) = walker(p).body
    assert loop.index == "item"
    assert [computed(x.body) for x in loops(loop.body)] == [computed(x.body) for x in loops(walker(before).body)]
    assert not any(o.attr("absent") and o.attr("asynchronous") for o in walker(p).ops)
    new = [b for b in walker(p).buffers if b not in walker(before).buffers]
    assert [b.name for b in new] == ["claimed", "claimed_ready", "claimed_free"]
    assert {b.slots for b in new} == {PLANS[plan].stages + 1}
    assert [(o.agent, o.attr("tensor")) for o in around(p) if o.kind == "claim_item"] == [("loader", "o_S_items")]
    assert [o.agent for o in around(p) if o.kind == "next_item"] == [a.name for a in walker(p).agents]
    assert [o.attr("tensor") for o in p.kernels[0].ops if o.kind == "clear_counter"] == ["o_S_items"]


@pytest.mark.parametrize("plan", PLANS)
def test_every_wait_and_arrival_of_the_numbers_is_needed(plan):
    p = lowered(PLANS[plan])
    check_rings(p, SM_90A)
    syncs = [o for o in around(p) if o.kind in SYNC]
    assert len(syncs) == 1 + 2 * len(walker(p).agents)  # the loader, which writes the ring, frees nothing
    for o in syncs:
        with pytest.raises(RaceError):
            check_rings(with_ops(p, lambda x, o=o: [] if x is o else [x]), SM_90A)


def test_empty_items_show_that_the_ring_of_numbers_holds_agents_back(monkeypatch):
    """Without them no proof sees that the loader claims too far ahead, because the rings of the walk hold it back."""
    p = lowered(PLANS["fused_walk"])
    loose = with_ops(p, lambda o: [] if o.attr("channel") == "claimed_free" else [o])
    k = walker(p)
    assert 0 in items(k) and items(k).count(1) > 4 and sum(items(k)) >= iterations(k)
    with pytest.raises(RaceError, match=r"claimed_ready.* nothing ends it"):  # its phase is over unseen
        check_rings(loose, SM_90A)
    monkeypatch.setattr("gdn_codegen.prove.rings.items", lambda k: [3] * 8)
    check_rings(loose, SM_90A)


@pytest.mark.parametrize("name, change, said", [
    ("claimed", {"slots": 3}, "without waiting|written"), ("claimed_free", {"shape": (512,)}, "nothing ends it"),
    ("claimed_ready", {"slots": 1}, "nothing ends it"), ("k_tail", {"shape": (64,)}, "k_tail is not of k's ragged tail"),
    ("k_tail", {"slots": 2}, "k_tail is not of k's")])
def test_counts_and_slots_are_checked(name, change, said):
    p = lowered(PLANS["fused_walk"])
    k = walker(p)
    buffers = tuple(replace(b, **change) if b.name == name else b for b in k.buffers)
    with pytest.raises(RaceError, match=said):
        check_rings(replace(p, kernels=(*p.kernels[:-1], replace(k, buffers=buffers))), SM_90A)


def test_a_barrier_of_a_tail_serves_one_copy():
    """Its phases are counted by walks with a tail."""
    p = lowered(PLANS["fused_walk"])
    both = with_ops(p, lambda o: [o.with_attrs(tail="k_tail") if o.attr("tail") else o])
    with pytest.raises(RaceError, match="k_tail is not of"):
        check_rings(both, SM_90A)


@pytest.mark.parametrize("change, said", [
    (lambda o: [] if o.kind == "next_item" and o.agent == "aux" else [o], "goes on with claimed items"),
    (lambda o: [o, o] if o.kind == "next_item" and o.agent == "aux" else [o], "goes on with claimed items"),
    (lambda o: [o.with_attrs(tensor="q")] if o.kind == "claim_item" else [o], "0 claim items from it")])
def test_verify_sees_what_is_wrong_with_items(change, said):
    with pytest.raises(VerifyError, match=said):
        verify(with_ops(lowered(PLANS["walk"]), change))


def test_a_counter_is_cleared_by_an_earlier_kernel():
    """verify refuses a program without it, and in the interpreter no item would be claimed."""
    p = lowered(PLANS["walk"])
    first = replace(p.kernels[0], body=tuple(o for o in p.kernels[0].body if o.kind != "clear_counter"))
    p = replace(p, kernels=(first, *p.kernels[1:]))
    with pytest.raises(VerifyError, match="o_S_items is cleared by 0 ops"):
        verify(p)
    with pytest.raises(ValueError, match="next_item: got nan; accepted: 1"):
        results(p)


def test_parts_and_a_walk_that_comes_first_are_refused():
    with pytest.raises(ScheduleError, match="persistent=True with partition='decay'; accepted only without"):
        varied("walk", "sm_90a", persistent=True, partition="decay")

    @algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
    def plain(q, k, v, S):
        o = q @ S
        S = S + k.T @ v
        return o, S

    with pytest.raises(ScheduleError, match="kernel o_S on sm_90a: persistent=True; accepted only after another kernel"):
        lower(plain.trace(), "tilelang", Schedule("own", (("o", "S"),), state_layout="vk", persistent=True), SIZES, "float16",
              "sm_90a")


def walk_text(accept=""):
    """The module's text, and that of its walk."""
    text = render(Build("tilelang", schedule=PLANS["fused_walk"], arch="sm_90a", contract=Contract.parse(accept)))
    return text, text[text.index("def o_S_kernel("):text.index("    return o_S_kernel")]


def test_what_is_emitted_counts_through_all_items():
    text, walk = walk_text()
    assert "with t.kernel(T.min(blocks_at_a_time, (ends - 1) * HV), threads=512) as first_instance:" in walk
    assert text.count("o_S_items[0] = 0") == 1 and text.index("o_S_items[0] = 0") < text.index("def o_S_kernel(")
    assert walk.count("while instance < (ends - 1) * HV:") == walk.count("instance = first_instance") == 5
    assert walk.count("iterations_before = iterations_before + T.ceildiv(length, C)") == 5
    assert walk.count("tails_before = tails_before + 1") == 1 and "barrier_wait(k_tail[0], tails_before % 2)" in walk
    assert "chunk %" not in walk and "chunk //" not in walk and walk.count("items_before = items_before + 1") == 5
    assert walk.count("T.atomic_add(") == 1
    assert walk.count("if clear_o != 0:") == 1 and walk.index("o_f16_shared_ready[0], iteration") > walk.index("if clear_o != 0:")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")
def test_it_compiles_with_few_spills_and_products_side_by_side(tmp_path):
    check_tilelang = pytest.importorskip("gdn_codegen.tools.check_tilelang")
    pytest.importorskip("tilelang")
    (tmp_path / "persistent.py").write_text(walk_text()[0])
    (found,) = check_tilelang.compiled(tmp_path / "persistent.py", ["o_S"])
    assert not found.error and found.wgmma and found.tma and found.spills <= 480 and not found.serialised


def test_a_skipped_sequence_is_an_item_too():
    """Its agents do nothing but go on with the next one."""
    _, walk = walk_text("state=pool/in_place")
    head = "                    if state_indices_n >= 0:\n"
    assert walk.count("if state_indices_n >= 0:") == 5 and head in walk
    part = walk[walk.index(head) + len(head):]
    own = part[:part.index("T.assume(items_before >= 0)")].splitlines()
    assert all(x.startswith(" " * 24) for x in own[:-1] if x.strip())
