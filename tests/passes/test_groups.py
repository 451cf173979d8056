"""Warp groups: who computes what and where, and errors that say what fits."""
from dataclasses import replace

import pytest
from devices import lower_for
from walks import OWN, PLANS, SIZES, SYNC, WALK, inside, lowered, walker

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.builder import lower as below
from gdn_codegen.ir.core import walk
from gdn_codegen.schedule import Schedule, ScheduleError, named
from gdn_codegen.targets import lower


def test_agents_follow_the_data():
    p = lowered()
    k, ops = walker(p), inside(p)
    mine = {a.name: [o for o in ops if o.agent == a.name and o.kind not in (*SYNC, "await_kernels")] for a in k.agents}
    assert {o.kind for o in mine["loader"]} == {"load"} and {o.kind for o in mine["store"]} == {"store"}
    assert {o.out for o in mine["loader"]} == {"k", "q", "v", "Tinv_below", "beta", "G"}
    assert [o.out for o in mine["aux"] if o.kind == "matmul"] == ["q_kT"]
    assert [o.out for o in mine["state"] if o.kind == "matmul"] == ["k_S", "U_unscaled", "S_next", "q_S", "o_sum"]
    assert [(a.first, a.threads) for a in k.agents] == [(0, 128), (128, 128), (256, 32), (288, 32)]


def test_who_reads_a_tile_transposed_turns_it():
    """v is loaded untransposed; the state's agent, whose tiles are transposed, moves it to a fragment and widens it there."""
    k, ops = walker(lowered()), inside(lowered())
    made = {o.out: o for o in ops if o.out}
    space = {b.name: b.space for b in k.buffers}
    turned = [o for o in ops if o.kind == "transpose"]
    assert [(o.args[0], o.agent, space[o.buffer]) for o in turned] == [("v", "state", "fragment"), ("o_f16", "state", "shared")]
    assert not made["v"].attr("transposed") and space[made["v"].buffer] == "shared"
    assert [o.agent for o in ops if turned[0].out in o.args] == ["state"]
    assert made["U_unscaled"].args == ("v_minus_exp_G_k_S_f16", "Tinv_below", "v_minus_exp_G_k_S")
    assert len([o for o in ops if o.kind == "matmul"]) == 6


def test_a_group_of_four_warps_for_each_64_rows_of_the_state():
    p = lowered(sizes={**SIZES, "V": 128})
    assert [a.threads for a in walker(p).agents] == [256, 128, 32, 32]
    assert sum(-(-a.threads // 128) * 128 * a.registers for a in walker(p).agents[:3]) <= 64 * 1024
    assert [a.threads for a in walker(lowered("columns")).agents] == [128, 128, 32, 32]


@pytest.mark.parametrize("plan", ["fused_walk", "fused_warm_up"])
def test_inverses_have_warps_of_their_own(plan):
    p = lowered(plan)
    k, ops = walker(p), inside(p)
    mine = {a.name: [o for o in ops if o.agent == a.name and o.kind not in (*SYNC, "await_kernels")] for a in k.agents}
    (inverse,) = mine["solve"]
    assert (inverse.kind, inverse.attr("size")) == ("diag_inverse", 64)
    (handed,) = (o for o in mine["aux"] if o.out == inverse.args[0])
    assert handed.kind == "move" and [o.out for o in mine["aux"] if o.kind == "matmul"] == ["k_kT", "q_kT"]
    assert {o.out for o in mine["loader"]} == {"k", "G", "beta", "q", "v"} and inverse.args[1:] == () and inverse.attr("strict")
    assert {o.agent for o in ops if inverse.out in o.args} == {"state"}
    assert [(a.name, a.first, a.threads) for a in k.agents] == [("state", 0, 128), ("aux", 128, 128), ("loader", 256, 32),
                                                                ("store", 288, 32), ("solve", 320, 64)]
    registers = {a.name: a.registers for a in k.agents}
    assert registers["loader"] == registers["store"] == registers["solve"]  # of one warp group
    assert 128 * (registers["state"] + registers["aux"] + registers["solve"]) <= 64 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_aux_begins_what_leads_to_no_inverse_once_it_handed_over_what_does(plan):
    ops = inside(lowered(plan))
    later = [o.out for o in ops if o.attr("asynchronous") and o.agent == "aux"]
    assert later == (["q_kT"] if "fused" in plan else [])
    for name in later:
        aux = [o for o in ops if o.agent == "aux"]
        at = {o.out: n for n, o in enumerate(aux) if o.out}
        (inverse,) = (o for o in ops if o.kind == "diag_inverse")
        told = next(n for n, o in enumerate(aux) if n > at[inverse.args[0]] and o.kind == "signal")
        drained = next(n for n, o in enumerate(aux) if o.kind == "drain")
        masked = next(o.out for o in aux if name in o.args)  # an expression in who stores it
        read = next(n for n, o in enumerate(aux) if masked in o.args)
        assert at["k_kT"] < at[inverse.args[0]] < told < at[name] < drained < read
        # What else it computes and moves hides the product.
        assert all(at[name] < at[x] < drained for x in ("exp_G_shared", "chunk_decay_shared", "beta_decay_to_end_shared"))


@pytest.mark.parametrize("plan", ["walk", "fused_walk", "fused_warm_up"])
def test_state_reads_v_while_its_first_product_runs(plan):
    state = [o for o in inside(lowered(plan)) if o.agent == "state"]
    at = {o.out: n for n, o in enumerate(state) if o.out}
    drained = next(n for n, o in enumerate(state) if o.kind == "drain")
    assert [o.out for o in state if o.attr("asynchronous")] == ["k_S"]
    assert at["k_S"] < at["exp_G_row"] < at["v_T"] < drained < at["U_unscaled"]


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
    assert {slots[n] for n in ("k", "q", "v", "Tinv_below", "beta", "G")} == {3}
    assert slots["exp_G_shared"] == 2 and slots["o_f16_shared"] == 1


def test_an_inverse_is_turns_ahead():
    """And takes the place of what it inverts."""
    slots = {b.name: b.slots for b in walker(lowered("fused_walk")).buffers if b.space == "shared"}
    assert slots == {**dict.fromkeys(("k", "q", "v", "G", "beta", "Tinv_below_f16", "exp_G_shared",
                                      "chunk_decay_shared", "beta_decay_to_end_shared",
                                      "q_kT_D_beta_f16_shared"), 3), "o_f16_shared": 1}


def test_a_product_takes_the_place_of_a_summand_that_nobody_reads_later():
    """Form unit: U_unscaled = X + Tinv_below X, X in float32 and rounded, as an operand."""
    p = lowered("fused_walk")
    (u,) = (o for o in inside(p) if o.out == "U_unscaled")
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

    plan = Schedule("own", (("G", "@inverse"), ("o", "S")), form="unit", state_layout="vk")
    p = lower(kept.trace(), "tilelang", plan, SIZES, "float16", "sm_90a")
    (u,) = (o for o in inside(p) if o.out == "U")
    x = next(o for o in inside(p) if o.out == u.args[2])
    assert x.buffer and x.buffer != u.buffer and any(x.out in o.args for o in inside(p)[inside(p).index(u) + 1:])


def test_only_kernels_that_walk_have_groups():
    assert [bool(k.agents) for k in lowered().kernels] == [False, True]
    assert {o.agent for o in walk(lowered().kernels[0].body) if o.kind != "wait"} == {"block"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("plan, sizes, dtype, message", [
    ("walk", {"C": 32}, "float16", "32 x 32 over 64; aux takes 64 rows: C=64, K and V of 64 or 128"),
    ("walk", {"K": 32}, "float16", "64 x 64 over 32; aux takes columns and a depth that are multiples of 64, or of 16"),
    ("walk", {"V": 32}, "float16", r"carried values \(S\) have 32 rows; state takes 64, 128"),
    ("walk", {"V": 256}, "float16", "state takes 64, 128"),
    ("walk", {"K": 256}, "float16", "K and V of 64 or 128"), ("walk", {}, "float32", "accepted: float16, bfloat16"),
    (replace(WALK, state_layout="kv"), {"K": 128, "V": 128}, "float16", "float16; .* state_layout='vk' has fewer such"),
    (replace(OWN, kernels=(("G",), ("o", "S")), form="gate-free"), {}, "float16", "move D .* in float32; accepted: tiles"),
    (replace(OWN, kernels=(("G", "A"), ("o", "S"))), {"C": 128}, "float16", "aux would move A_f16 .* as 128 x 128 in float16"),
    ("fused", {}, "float16", "no rule for warp groups; let an earlier kernel")])
def test_what_does_not_fit_says_what_does(plan, sizes, dtype, message):
    with pytest.raises(ScheduleError, match=message):
        lowered(named(plan, "sm_90a") if plan == "fused" else plan, sizes={**SIZES, **sizes}, dtype=dtype)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_largest_fits_shared_memory(stages, dtype):
    p = lowered(replace(WALK, stages=stages), sizes={"C": 64, "K": 128, "V": 128}, dtype=dtype)
    assert walker(p).agents


@pytest.mark.usefixtures("unchecked")
def test_too_much_shared_memory_is_an_error(monkeypatch):
    small = replace(SM_90A, spaces={**SM_90A.spaces, "shared": 128 * 1024})
    lower_for(monkeypatch, small, "tilelang", "sm_90a")
    with pytest.raises(ScheduleError, match=r"shared has 131072 bytes, \d+ are needed: .*; stages=1 fits"):
        lowered(sizes={"C": 64, "K": 128, "V": 128})
