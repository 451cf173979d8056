"""Warp groups: who computes what, rings and barriers that are all needed, and errors that say what fits."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.builder import lower as below
from gdn_codegen.ir.core import Loop, Op, loops, walk
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.ops import OWN_PART
from gdn_codegen.schedule import Schedule, ScheduleError, named, pipelines
from gdn_codegen.schedule.check import RaceError
from gdn_codegen.schedule.check_rings import check_rings, reads
from gdn_codegen.schedule.mbarriers import mbarriers
from gdn_codegen.schedule.pipelines import lower

SIZES = {"C": 64, "K": 64, "V": 64}
SYNC = ("wait", "signal", "fence", "drain")
OWN = Schedule("own", (("G", "Tinv"), ("o", "S")), form="split", state="vk")
#: Three stages, blocks of V, a tile that crosses from group to group and one value a token that threads load.
PLANS = {"walk": named("walk"), "stages": replace(named("walk"), stages=3), "columns": replace(named("walk"), v_block=64),
         "own": OWN, "direct": replace(OWN, form="direct"),
         "unit": replace(OWN, form="unit"),
         "early": replace(named("walk"), partition="decay", early="state"), "fused_walk": named("fused_walk"),
         "fused_early": replace(named("fused_walk"), partition="decay", early="state"),
         "longest": replace(named("walk"), partition="decay", early="all", longest_first=True)}


def lowered(plan="walk", page="gated_delta_rule", sizes=SIZES, dtype="float16"):
    plan = PLANS[plan] if isinstance(plan, str) else plan
    wide = {"columns": {**sizes, "V": 128}}.get(plan.name if plan is not PLANS["columns"] else "columns", sizes)
    return lower(find(page).trace(), "tilelang", plan, wide, dtype, "sm_90a")


def walker(p):
    (k,) = (k for k in p.kernels if k.agents)
    return k


def with_body(p, body, **changes):
    """The program with another walk in its kernel that walks."""
    k = walker(p)
    new = tuple(replace(s, body=tuple(body)) if isinstance(s, Loop) else s for s in k.body)
    return replace(p, kernels=tuple(replace(k, body=new, **changes) if x is k else x for x in p.kernels))


def inside(p):
    (loop,) = loops(walker(p).body)
    return list(loop.body)


# --- who and where ---------------------------------------------------------------------------------------------------
def test_agents_follow_the_data():
    p = lowered()
    k, ops = walker(p), inside(p)
    mine = {a.name: [o for o in ops if o.agent == a.name and o.kind not in SYNC] for a in k.agents}
    assert {o.kind for o in mine["loader"]} == {"load"} and {o.kind for o in mine["store"]} == {"store"}
    assert {o.out for o in mine["loader"]} == {"k", "q", "v", "Toff", "beta", "G"}
    assert [o.out for o in mine["aux"] if o.kind == "matmul"] == ["q_k"]
    assert [o.out for o in mine["state"] if o.kind == "matmul"] == ["k_S", "delta", "S_next", "q_S", "add_mul"]
    assert [(a.first, a.threads) for a in k.agents] == [(0, 128), (128, 128), (256, 32), (288, 32)]


def test_who_reads_a_tile_transposed_turns_it():
    """v comes as it lies; `state`, whose tiles lie transposed, takes it into a fragment and widens it there."""
    k, ops = walker(lowered()), inside(lowered())
    made = {o.out: o for o in ops if o.out}
    space = {b.name: b.space for b in k.buffers}
    turned = [o for o in ops if o.kind == "transpose"]
    assert [(o.args[0], o.agent, space[o.buffer]) for o in turned] == [("v", "state", "fragment"), ("o_h", "state", "shared")]
    assert not made["v"].attr("transposed") and space[made["v"].buffer] == "shared"
    assert [o.agent for o in ops if turned[0].out in o.args] == ["state"]
    assert made["delta"].args == ("sub_v_h", "Toff", "sub_v") and len([o for o in ops if o.kind == "matmul"]) == 6


def test_a_group_of_four_warps_for_each_64_rows_of_the_state():
    p = lowered(sizes={**SIZES, "V": 128})
    assert [a.threads for a in walker(p).agents] == [256, 128, 32, 32]
    assert sum(-(-a.threads // 128) * 128 * a.registers for a in walker(p).agents[:3]) <= 64 * 1024
    assert [a.threads for a in walker(lowered("columns")).agents] == [128, 128, 32, 32]


@pytest.mark.parametrize("plan", ["fused_walk", "fused_early"])
def test_inverses_have_warps_of_their_own(plan):
    p = lowered(plan)
    k, ops = walker(p), inside(p)
    mine = {a.name: [o for o in ops if o.agent == a.name and o.kind not in SYNC] for a in k.agents}
    (inverse,) = mine["solve"]
    assert (inverse.kind, inverse.attr("size")) == ("diag_inverse", 64)
    (handed,) = (o for o in mine["aux"] if o.out == inverse.args[0])
    assert handed.kind == "move" and [o.out for o in mine["aux"] if o.kind == "matmul"] == ["k_k", "q_k"]
    assert {o.out for o in mine["loader"]} == {"k", "G", "beta", "q", "v"} and inverse.args[1:] == () and inverse.attr("strict")
    assert {o.agent for o in ops if inverse.out in o.args} == {"state"}
    assert [(a.name, a.first, a.threads) for a in k.agents] == [("state", 0, 128), ("aux", 128, 128), ("loader", 256, 32),
                                                                ("store", 288, 32), ("solve", 320, 64)]
    registers = {a.name: a.registers for a in k.agents}
    assert registers["loader"] == registers["store"] == registers["solve"]  # of one warp group
    assert 128 * (registers["state"] + registers["aux"] + registers["solve"]) <= 64 * 1024


@pytest.mark.parametrize("plan", PLANS)
def test_aux_begins_what_leads_to_no_inverse_once_it_handed_over_what_does(plan):
    ops = inside(lowered(plan))
    later = [o.out for o in ops if o.attr("later")]
    assert later == (["q_k"] if "fused" in plan else [])
    for name in later:
        aux = [o for o in ops if o.agent == "aux"]
        at = {o.out: n for n, o in enumerate(aux) if o.out}
        (inverse,) = (o for o in ops if o.kind == "diag_inverse")
        told = next(n for n, o in enumerate(aux) if n > at[inverse.args[0]] and o.kind == "signal")
        drained = next(n for n, o in enumerate(aux) if o.kind == "drain")
        masked = next(o.out for o in aux if name in o.args)  # an expression in who stores it
        read = next(n for n, o in enumerate(aux) if masked in o.args)
        assert at["k_k"] < at[inverse.args[0]] < told < at[name] < drained < read
        # What else it computes and moves hides the product.
        assert all(at[name] < at[x] < drained for x in ("exp_G_s", "exp_last_G_s", "mul_exp_5_s"))


def test_what_leads_to_an_inverse_is_loaded_first_and_waited_for_alone():
    ops = inside(lowered("fused_walk"))
    loads = {o.out: o.attr("channel") for o in ops if o.kind == "load"}
    assert list(loads) == ["k", "G", "beta", "q", "v"]
    assert not {loads[x] for x in ("k", "G", "beta")} & {loads[x] for x in ("q", "v")}
    (inverse,) = (n for n, o in enumerate(ops) if o.kind == "diag_inverse")
    waits = [o.attr("channel") for o in ops[:inverse] if o.agent == "solve" and o.kind == "wait"]
    (told,) = (o.attr("channel") for o in ops if o.kind == "signal" and o.attr("channel") in waits)
    assert waits == [told] and [o.agent for o in ops if o.attr("channel") == told] == ["aux", "solve"]


@pytest.mark.parametrize("plan", PLANS)
def test_products_read_fragments_first_and_rings_second(plan):
    p = lowered(plan)
    buffers = {b.name: b for b in walker(p).buffers}
    home = {o.out: buffers[o.buffer] for o in inside(p) if o.buffer}
    there = {o.out for o in inside(p) if o.kind in ("load", "diag_inverse")}
    for o in inside(p):
        if o.kind == "matmul":
            assert home[o.args[1]].space == "shared" and home[o.out].space == "fragment"
            assert home[o.args[0]].space == "fragment" or o.args[0] in there


def test_rings_turn_as_the_schedule_says():
    slots = {b.name: b.slots for b in walker(lowered("stages")).buffers if b.space == "shared"}
    assert {slots[n] for n in ("k", "q", "v", "Toff", "beta", "G")} == {3} and slots["exp_G_s"] == 2 and slots["o_h_s"] == 1


def test_an_inverse_is_turns_ahead():
    """And takes the place of what it inverts."""
    slots = {b.name: b.slots for b in walker(lowered("fused_walk")).buffers if b.space == "shared"}
    assert slots == {**dict.fromkeys(("k", "q", "v", "G", "beta", "mul_h_3_s", "exp_G_s", "exp_last_G_s", "mul_exp_5_s",
                                      "mul_h_s"), 3), "o_h_s": 1}


def test_a_product_takes_the_place_of_a_summand_that_nobody_reads_later():
    """Form unit: delta = X + Toff X, X in float32 and rounded, as an operand."""
    p = lowered("fused_walk")
    (u,) = (o for o in inside(p) if o.out == "delta")
    x = next(o for o in inside(p) if o.out == u.args[2])
    assert x.kind == "sub" and x.buffer == u.buffer and u.args[0] != x.out
    assert next(o for o in inside(p) if o.out == u.args[0]).args == (x.out,)

    @algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
    def kept(q, k, v, g, beta, S):
        """What is a summand leads to o, too."""
        X = beta[:, None] * (v - k @ S)
        U = unit_lower_inverse(strictly_lower(k @ k.T)) @ X
        o = below(q @ k.T) @ U + X
        G = cumsum(g)
        S = exp(last(G)) * S + k.T @ U
        return o, S

    plan = Schedule("own", (("G", "Toff"), ("o", "S")), form="unit", state="vk")
    p = lower(kept.trace(), "tilelang", plan, SIZES, "float16", "sm_90a")
    (u,) = (o for o in inside(p) if o.out == "U")
    x = next(o for o in inside(p) if o.out == u.args[2])
    assert x.buffer and x.buffer != u.buffer and any(x.out in o.args for o in inside(p)[inside(p).index(u) + 1:])


def test_only_kernels_that_walk_have_groups():
    assert [bool(k.agents) for k in lowered().kernels] == [False, True]
    assert {o.agent for o in walk(lowered().kernels[0].body) if o.kind != "wait"} == {"block"}


# --- barriers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", PLANS)
def test_every_wait_arrival_fence_and_drain_is_needed(plan):
    """Take one out, at once or with its other half, and the check fails."""
    p = lowered(plan)
    ops, spare = inside(p), []
    syncs = [n for n, o in enumerate(ops) if o.kind in SYNC]
    assert {ops[n].kind for n in syncs} == set(SYNC) - ({"drain"} if "fused" not in plan else set())
    for n in syncs:
        try:
            check_rings(with_body(p, ops[:n] + ops[n + 1:]), SM_90A)
            spare.append(ops[n])
        except RaceError:
            pass
    for channel in {ops[n].attr("channel") for n in syncs} - {None}:
        rest = [o for o in ops if o.kind not in ("wait", "signal") or o.attr("channel") != channel]
        try:
            check_rings(with_body(p, rest), SM_90A)
            spare.append(channel)
        except RaceError:
            pass
    assert not spare


def test_what_the_rest_orders_has_no_barrier():
    """The loader waits once a turn: what frees k came after all else that the turn loaded."""
    ops = inside(lowered())
    assert [o.attr("channel") for o in ops if o.kind == "wait" and o.agent == "loader"] == ["k_free"]
    assert [o.agent for o in ops if o.kind == "signal" and o.attr("channel") == "k_free"] == ["state"]


@pytest.mark.parametrize("plan", ["walk", "fused_walk", "fused_early"])
@pytest.mark.parametrize("kind", ["late wait", "late drain", "early signal", "early fence"])
def test_each_stands_where_it_must(kind, plan):
    """Move a wait or drain after the op that it guards, or a signal or fence before the op that it follows."""
    p = lowered(plan)
    ops, passed = inside(p), []
    for n, o in enumerate(ops):
        if o.kind != kind.split()[1] or (o.kind == "fence" and o.agent == "loader"):  # which has a later one
            continue
        ahead = kind.startswith("late")
        order = range(n + 1, len(ops)) if ahead else range(n - 1, -1, -1)
        other = next((m for m in order if ops[m].agent == o.agent and ops[m].buffer), None)
        if other is None:
            continue
        less = ops[:n] + ops[n + 1:]
        try:
            check_rings(with_body(p, [*less[:other], o, *less[other:]]), SM_90A)
            passed.append(o)
        except RaceError:
            pass
    # k_free orders all but the last write of that ring, too.
    assert [o.attr("channel") for o in passed] == ["exp_G_s_free"] * (kind == "late wait")


@pytest.mark.parametrize("plan", ["fused_walk", "fused_early"])
def test_a_product_that_was_begun_is_drained_before_it_is_read(plan):
    """Not without its drain, nor with it after the reader or before the product."""
    p = lowered(plan)
    ops = inside(p)
    (n,) = (n for n, o in enumerate(ops) if o.kind == "drain")
    (product,) = (o for o in ops if o.attr("later"))
    read = reads(walker(p))
    reader = next(m for m, o in enumerate(ops) if product.out in read[id(o)])
    assert product.agent == ops[n].agent == ops[reader].agent and ops.index(product) < n < reader
    message = f"{ops[reader].out} of aux reads {product.out} in turn 0, a product that was begun and not drained"
    for body in (ops[:n] + ops[n + 1:], [*ops[:n], *ops[n + 1:reader + 1], ops[n], *ops[reader + 1:]],
                 [*ops[:ops.index(product)], ops[n], *(o for o in ops[ops.index(product):] if o is not ops[n])]):
        with pytest.raises(RaceError, match=message if plan == "fused_walk" else message.replace("turn 0", r"turn \d")):
            check_rings(with_body(p, body), SM_90A)


def test_a_product_that_is_not_begun_needs_no_drain():
    p = lowered("fused_walk")
    whole = [replace(o, attrs=tuple(a for a in o.attrs if a[0] != "later")) for o in inside(p) if o.kind != "drain"]
    check_rings(with_body(p, whole), SM_90A)


@pytest.mark.parametrize("drained", [False, True])
def test_what_a_begun_product_reads_is_not_written(drained):
    """By its own agent, whose ops are in order otherwise."""
    p, body = lowered("fused_walk"), []
    for o in inside(p):
        body.append(o)
        if o.kind == "drain" if drained else o.attr("later"):
            body.append(Op("move", "again", ("G_col",), (), None, 0, "aux", "q"))
    with pytest.raises(RaceError) as e:
        check_rings(with_body(p, body), SM_90A)
    assert ("again of aux is written in turn 0 while q_k of aux reads its slot" in str(e.value)) != drained


@pytest.mark.parametrize("drained", [False, True])
def test_a_begun_product_frees_its_rings_when_it_is_drained(drained):
    """Let `aux` alone read q, of one slot, and say so to the loader before the drain or after it."""
    p, body = lowered("fused_walk"), []
    ops = inside(p)
    (frees_k,), (frees_q,) = ([o for o in ops if o.kind == "signal" and o.attr("channel") == c] for c in ("k_free", "q_free"))
    for o in ops:
        if o.kind == "wait" and o.attr("channel") == "q_free":
            o = replace(o, attrs=tuple((n, 1 if n == "back" else x) for n, x in o.attrs))
        if o is not frees_k and o is not frees_q:
            body.append(replace(o, args=("S_h", "k")) if o.out == "q_S" else o)
        body += [frees_k] * (o.out == "q_S")
        body += [replace(frees_q, agent="aux")] * bool(o.kind == "drain" if drained else o.attr("later"))
    one = tuple(replace(b, slots=1) if b.name in ("q", "q_ready", "q_free") else b for b in walker(p).buffers)
    if drained:
        check_rings(with_body(p, body, buffers=one), SM_90A)
    else:
        with pytest.raises(RaceError, match="q of loader is written in turn 1 before q_k of aux is sure"):
            check_rings(with_body(p, body, buffers=one), SM_90A)


@pytest.mark.parametrize("name, change, message", [
    ("k", {"slots": 1}, "written in turn|without waiting"), ("k_ready", {"slots": 1}, "phase|parity"),
    ("k_ready", {"shape": (64,)}, "nothing ends it"),
    ("exp_G_s_ready", {"shape": (64,)}, "phase|without waiting|arrive")])
def test_counts_and_slots_are_checked(name, change, message):
    p = lowered()
    buffers = tuple(replace(b, **change) if b.name == name else b for b in walker(p).buffers)
    with pytest.raises(RaceError, match=message):
        check_rings(with_body(p, inside(p), buffers=buffers), SM_90A)


def test_a_fragment_stays_with_its_agent():
    p = lowered()
    ops = [replace(o, agent="aux") if o.out == "delta_h" else o for o in inside(p)]
    with pytest.raises(RaceError, match="fragment of"):
        check_rings(with_body(p, ops), SM_90A)


def test_a_producer_looks_back_as_far_as_its_ring_is_long():
    p = lowered()
    ops = [replace(o, attrs=tuple(x for x in o.attrs if x[0] != "back")) if o.attr("back") else o for o in inside(p)]
    with pytest.raises(RaceError, match="nothing ends it"):
        check_rings(with_body(p, ops), SM_90A)


def test_kernels_over_chunks_need_no_barriers():
    p = lowered()
    assert mbarriers(replace(p, kernels=p.kernels[:1]), SM_90A).kernels == p.kernels[:1]


# --- what does not fit -----------------------------------------------------------------------------------------------
@pytest.fixture
def _unchecked():
    kept, pipelines.observers[:] = list(pipelines.observers), []
    yield
    pipelines.observers[:] = kept


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("plan, sizes, dtype, message", [
    ("walk", {"C": 32}, "float16", "C=64, K and V of 64 or 128"), ("walk", {"K": 32}, "float16", "C=64, K and V of 64 or 128"),
    ("walk", {"V": 32}, "float16", "32 rows; state takes 64, 128"), ("walk", {"V": 256}, "float16", "state takes 64, 128"),
    ("walk", {"K": 256}, "float16", "K and V of 64 or 128"), ("walk", {}, "float32", "float16 and bfloat16 fit"),
    (replace(named("walk"), state="kv"), {}, "float16", "state='vk' does not"),
    (replace(named("fused_walk"), form="wy"), {}, "float16", "U0 would be computed by solve, which inverts and no more"),
    (replace(OWN, kernels=(("G",), ("o", "S")), form="gate-free"), {}, "float16", "D would .* in float32; tiles .* in 16 bit"),
    (replace(OWN, kernels=(("G", "A"), ("o", "S"))), {"C": 128}, "float16", "A_h would .* and aux as 128 x 128 in float16"),
    ("fused", {}, "float16", "no rule for warp groups; let an earlier kernel")])
def test_what_does_not_fit_says_what_does(plan, sizes, dtype, message):
    with pytest.raises(ScheduleError, match=message):
        lowered(named(plan) if plan == "fused" else plan, sizes={**SIZES, **sizes}, dtype=dtype)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_largest_fits_shared_memory(stages, dtype):
    p = lowered(replace(named("walk"), stages=stages), sizes={"C": 64, "K": 128, "V": 128}, dtype=dtype)
    assert walker(p).agents


@pytest.mark.usefixtures("_unchecked")
def test_too_much_shared_memory_is_an_error(monkeypatch):
    small = replace(SM_90A, spaces={**SM_90A.spaces, "shared": 128 * 1024})
    monkeypatch.setitem(pipelines.ARCHS, ("tilelang", "sm_90a"), (pipelines.GROUPS, small))
    with pytest.raises(ScheduleError, match=r"shared has 131072 bytes, \d+ are needed: .*; fewer stages need less"):
        lowered(sizes={"C": 64, "K": 128, "V": 128})


# --- turns before a walk's own part ----------------------------------------------------------------------------------
def test_early_turns_leave_out_what_leads_to_no_state():
    own = {o.out or (o.kind, o.attr("channel")) for o in inside(lowered("early")) if o.attr(OWN_PART)}
    assert {"q", "q_k", "q_S", "add_mul", "mul_h_s", "o_h_s"} <= own
    needed = {"k", "v", "Toff", "beta", "G", "k_S", "v_T", "delta", "S_next", "exp_G_s", ("wait", "k_ready"),
              ("signal", "k_free")}
    assert not own & needed
    assert {c for o in own if isinstance(o, tuple) and (c := o[1])} == {"o_h_s_ready", "o_h_s_free"}
    assert not any(o.attr(OWN_PART) for o in inside(lowered(replace(PLANS["early"], early="all"))))


@pytest.mark.parametrize("early", ["all", "state"])
def test_early_turns_do_not_change_what_comes_out(early):
    """Stage by stage, what early turns leave out being NaN; short parts, gates that forget a chunk and a half."""
    x = problem([9 * 64 + 5, 64, 0], 1, 2, 64, 64, torch.float32, gate=-0.2)
    want, seen = expected(x), []
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}

    def see(name, before, p, c):
        if name in ("partition", "early", "synchronise"):
            i = Interpreter(p, Problem(x["lengths"], 1, 2, 2), {"scale": x["scale"]}, exact=True)
            got = i.run({t.name: given[t.name] for t in p.role("input")})
            seen.append((name, rms_error(got["o"], want[0]), rms_error(got["final_state"], want[1])))
            assert (i.memory["S_early"] > 0).any()
    pipelines.observers.append(see)
    try:
        lowered(replace(PLANS["early"], early=early))
    finally:
        pipelines.observers.remove(see)
    assert [n for n, *_ in seen] == ["partition", "early", "synchronise"]
    assert all(max(e) < 1e-4 for _, *e in seen), seen


def test_longest_first_walks_each_part_once():
    """Stage by stage: parts of two chunks, which begin two early or, in the other head, one."""
    x = problem([6 * 64 + 5, 64, 0], 1, 2, 64, 64, torch.float32, gate=-0.1)
    x["g"][:, 1] *= 20  # forgets within a chunk
    want, seen = expected(x), []
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"]}

    class Counting(Interpreter):
        def part(self, k, body, env, at, sizes):
            super().part(k, body, env, at, sizes)
            if k.name == "o_S":
                self.shares.append((at.seq, at.head, at.part, at.share, "S_T" in env))

    def see(name, before, p, c):
        if name in ("partition", "synchronise"):
            i = Counting(p, Problem(x["lengths"], 1, 2, 2), {"scale": x["scale"]}, exact=True)
            i.shares = []
            got = i.run({t.name: given[t.name] for t in p.role("input")})
            seen.append((rms_error(got["o"], want[0]), rms_error(got["final_state"], want[1])))
            walked = [share for *_, share, done in i.shares if done]
            assert set(walked) == {0, 1} and len(walked) * 2 == len(i.shares)
    pipelines.observers.append(see)
    try:
        lowered("longest")
    finally:
        pipelines.observers.remove(see)
    assert len(seen) == 2 and all(max(e) < 1e-4 for e in seen), seen


def test_longest_first_is_for_parts_that_begin_early():
    for how in (None, "exact"):
        with pytest.raises(ScheduleError, match="longest_first=True; accepted with partition='decay' alone"):
            replace(named("walk"), partition=how, longest_first=True)
    shares = {at: any(o.kind == "share" for k in lower(find("gated_delta_rule").trace(), at[0], PLANS["longest"], SIZES,
                                                       "float16", at[1]).kernels for o in walk(k.body))
              for at in (("tilelang", "sm_90a"), ("tilelang", ""), ("triton", ""))}
    assert shares == {("tilelang", "sm_90a"): True, ("tilelang", ""): False, ("triton", ""): True}


def test_a_value_that_the_state_needs_cannot_be_left_out():
    """The proof knows how many turns are early: a ring filled in own turns only, read in all of them."""
    p = lowered("early")
    for lost in ("k", "exp_G_s"):
        ops = [replace(o, attrs=(*o.attrs, (OWN_PART, True))) if o.out == lost else o for o in inside(p)]
        with pytest.raises(RaceError, match=lost):
            check_rings(with_body(p, ops), SM_90A)


def test_barriers_of_own_turns_count_those():
    p = lowered("early")
    ops = [replace(o, attrs=tuple(a for a in o.attrs if a[0] != OWN_PART)) if o.kind == "wait" else o for o in inside(p)]
    with pytest.raises(RaceError):
        check_rings(with_body(p, ops), SM_90A)
