"""Outputs that an agent finishes while the products of the next state run, and rings that it frees at different times."""
from dataclasses import replace
from itertools import groupby

import pytest
from test_members_in_groups import delta_net, ssd_y, two_states
from test_own_pages import means_the_page

from gdn_codegen.algorithms import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import Carry, Op, loops, map_ops
from gdn_codegen.ir.types import Tile
from gdn_codegen.passes.agents.outputs_early import carried_first, outputs_early
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.rings import check_rings
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.agents import ASSIGNMENTS, WALK, Assignment

pytestmark = pytest.mark.usefixtures("unchecked")
PAGES = ("kimi_delta_attention", "gated_delta_rule_2", "gated_delta_rule", "delta_rule", "gla")


def walk(page="kimi_delta_attention", **fields):
    fields = {"v_block": 64, "agents": "early_outputs", **fields}
    fields |= {"residuals": "@update"} if page == "kimi_delta_attention" else {}
    return lowered(Build("tilelang", 64, algorithm=page, dtype="bfloat16", head_dim_k=128, head_dim_v=128, arch="sm_90a",
                         schedule=varied("operand_walk", "sm_90a", **fields)))


def of_agent(k, agent="state"):
    """The ops of an agent in the loop over the part's chunks, without expressions."""
    return [o for o in [*loops(k.body)][-1].ops if o.agent == agent and (o.buffer or not o.out)]


@pytest.mark.parametrize("fields", [{}, {"partition": "decay"}])
@pytest.mark.parametrize("page", PAGES)
def test_outputs_are_stored_while_the_next_state_is_computed(page, fields):
    k = walk(page, **fields).kernels[-1]
    ops, (carried,) = of_agent(k), [*loops(k.body)][-1].carried
    sums = [o for o in ops if o.kind == "matmul" and o.buffer == carried.name]
    stored = next(n for n, o in enumerate(ops) if o.kind == "transpose" and o.attr("space") == "shared")
    assert sums and all(o.attr("asynchronous") for o in sums) and sums[-1].out == carried.next
    assert [o for o in ops if o.kind == "matmul"][-len(sums):] == sums  # those of outputs have begun before
    *_, of_outputs, last = [n for n, o in enumerate(ops) if o.kind == "drain"]
    assert ops.index(sums[-1]) < of_outputs < stored < last
    assert ops[of_outputs].attr("but") == tuple(o.out for o in sums) and not ops[last].attr("but")


@pytest.mark.parametrize("page", ["kimi_delta_attention", "gated_delta_rule_2", "gated_delta_rule"])
def test_the_state_is_scaled_beside_the_product_before_it(page):
    """In its registers, after the tile that products read has been made of it."""
    ops = of_agent(walk(page).kernels[-1])
    scaled = next(o for o in ops if o.kind == "mul" and o.buffer == "S")
    cast = next(o for o in ops if o.kind == "cast" and "S" in o.args)
    before = [o for o in ops[:ops.index(scaled)] if o.kind == "matmul"][-1]
    end = next(o for o in ops[ops.index(before):] if o.kind == "drain")
    assert before.attr("asynchronous") and ops.index(cast) < ops.index(before) < ops.index(scaled) < ops.index(end)


def test_rings_that_are_free_at_different_times_have_barriers_of_their_own():
    """The loader waits for each in the order in which they are free, and the state for each before it first reads."""
    k = walk().kernels[-1]
    state, loader = of_agent(k), of_agent(k, "loader")
    freed = [o.attr("channel") for o in state if o.kind == "signal" and o.attr("channel").endswith("_free")]
    assert len(freed) == len(set(freed)) == 3
    assert [o.attr("channel") for o in loader if o.kind == "wait"] == freed
    steps = [o.kind for o in loader if o.kind in ("wait", "load", "signal")]
    assert [kind for kind, _ in groupby(steps)] == ["wait", "load", "signal"] * 3  # no load waits for another ring's slot
    products = [n for n, o in enumerate(state) if o.kind == "matmul"]
    at = [next(n for n, o in enumerate(state) if o.kind == "signal" and o.attr("channel") == x) for x in freed]
    assert [sum(p > n for p in products) for n in at] == [4, 3, 0]


@pytest.mark.parametrize("page, fields", [
    ("rwkv7", {"residuals": "@update"}), ("gated_delta_rule_2", {"v_block": 0, "residuals": "@update"}),
    ("kimi_delta_attention", {"stages": 1}), ("kimi_delta_attention.saving", {"residuals": "@update"}),
    ("kimi_delta_attention", {"agents": "operand_walk"})])
def test_other_walks_keep_their_order(page, fields):
    """A load of what outputs read begins when they are done. So they come last. So they do where the walk stores its states, and
    under an assignment that does not ask for early outputs."""
    ops = of_agent(walk(page, **fields).kernels[-1])
    sums = [o for o in ops if o.kind == "matmul" and o.out in ("S_next", "U_product_sum")]
    assert sums and not any(o.attr("asynchronous") for o in sums)
    assert page.endswith("saving") or [o for o in ops if o.kind == "matmul"][-1] not in sums


def test_walks_with_products_of_other_agents_keep_their_order(monkeypatch):
    """`aux` has products too, so that threads of the state have fewer registers."""
    monkeypatch.setitem(ASSIGNMENTS, "early_walk", Assignment("early_walk", WALK.agents, outputs_early=True))
    p = lowered(Build("tilelang", 64, dtype="bfloat16", arch="sm_90a", schedule=varied("walk", "sm_90a", agents="early_walk")))
    ops = of_agent(p.kernels[-1])
    assert [o.out for o in ops if o.attr("asynchronous")] == ["k_S"]


@pytest.mark.parametrize("page", PAGES)
def test_each_load_has_its_slots_ahead(page):
    """As `loads_ahead` has reckoned before buffers were there."""
    k = walk(page).kernels[-1]
    loaded = {o.buffer for o in k.ops if o.kind == "load" and o.agent == "loader"}
    assert loaded and {b.slots for b in k.buffers if b.name in loaded} == {2}


@pytest.mark.parametrize("page, fields", [*((page, {}) for page in PAGES), ("kimi_delta_attention", {"partition": "decay"}),
                                          ("gated_delta_rule", {"partition": "exact"})])
def test_early_outputs_mean_the_page(page, fields):
    """Whole walks, and parts whose warm-up has no outputs."""
    plan = varied("operand_walk", "sm_90a", agents="early_outputs", **fields)
    means_the_page(find(page), plan, "tilelang", "sm_90a", {"C": 64, "K": 64, "V": 64}, span=1 if fields else 0)


@pytest.mark.parametrize("page", [delta_net, ssd_y, two_states])
@pytest.mark.parametrize("form", ["split", "unit"])
def test_pages_of_ones_own(page, form):
    """Other names and spellings, an output that is not called o, and two states, which keep the other order."""
    plan = varied("operand_walk", "sm_90a", agents="early_outputs", form=form)
    means_the_page(page, plan, "tilelang", "sm_90a", {"C": 64, "K": 64, "V": 64})


def changed(p, each):
    """`p` with the ops of its last kernel changed."""
    k = p.kernels[-1]
    new = replace(k, body=map_ops(k.body, each))
    assert new != k
    return replace(p, kernels=(*p.kernels[:-1], new))


def test_the_checker_demands_the_last_drain():
    p = walk()
    last = [o for o in of_agent(p.kernels[-1]) if o.kind == "drain"][-1]
    with pytest.raises(RaceError, match="S_bf16 of state reads S in iteration 1, a product that was begun and not drained"):
        check_rings(changed(p, lambda o: [] if o is last else [o]), SM_90A)


@pytest.mark.parametrize("place", ["last drain", "last product"])
def test_the_checker_knows_that_the_state_is_what_its_products_write(place):
    """A read of the current state while the next one, which has another name, is computed in its registers."""
    p = walk()
    ops = of_agent(p.kernels[-1])
    cast = next(o for o in ops if o.kind == "cast" and "S" in o.args)
    at = [o for o in ops if o.kind == ("drain" if place == "last drain" else "matmul")][-1]
    late = cast.changed(out="late")

    def each(o):
        return [late, o] if o is at else [o]
    with pytest.raises(RaceError, match="late of state reads S in iteration 0, a product that was begun and not drained"):
        check_rings(changed(p, each), SM_90A)


def test_a_product_adds_without_a_wait_only_where_the_sums_are():
    """Not onto a product in other registers, nor if it is not asynchronous."""
    p = walk()
    first, second = [o for o in of_agent(p.kernels[-1]) if o.kind == "matmul" and o.buffer == "S"]
    assert second.args[2] == first.out
    for changes in ({"buffer": "exp_G_k_S"}, None):
        def each(o, changes=changes):
            if o != second:
                return [o]
            return [o.changed(**changes) if changes else o.with_attrs(asynchronous=None)]
        with pytest.raises(RaceError, match=f"reads {first.out} in iteration 0, a product that was begun and not drained"):
            check_rings(changed(p, each), SM_90A)


TILE, WIDE = Tile(("V", "C"), "float32"), Tile(("V", "K"), "float32")


STATE = Carry("S", "S0", "T", "S1", WIDE)


def op(kind, out, *args, tile=TILE):
    return Op(kind, out, args, (), tile, agent="state")


X = op("matmul", "x", "s", "a")
U = op("cast", "u", "x")
D = op("mul", "d", "S", "S", tile=WIDE)
T = op("matmul", "T", "u", "k", "d", tile=WIDE)
Y = op("matmul", "y", "u", "b")
OUT = op("cast", "o", "y")


@pytest.mark.parametrize("ops, order", [
    ([X, U, D, T, Y, OUT], "x d u y T o"),
    ([X, U, T, Y, OUT], "x u y T o"),  # it adds to the state itself
    ([X, U, D, op("cast", "r", "S"), T, Y, OUT], "x r d u y T o"),  # r reads the state before that is overwritten
    ([X, U, D, T, Y, OUT, op("cast", "r", "S")], "x r d u y T o"),
    ([X, U, D, T, Y, op("add", "o", "y", "S")], ""),
    ([X, U, D, T], ""),  # no outputs
    ([X, U, D, T, op("cast", "y", "u"), OUT], ""),  # outputs without products
    ([X, U, D, T, op("matmul", "y", "T", "b"), OUT], ""),  # they read the next state
    ([X, U, D, T, Y, op("matmul", "z", "o", "b"), OUT], ""),  # one of their products waits for another
    ([X, U, D, op("mul", "T", "d", "d", tile=WIDE), Y, OUT], ""),  # the next state is no product
])
def test_only_products_that_need_not_wait_begin_first(ops, order):
    """A product of outputs begins before those of the next state if nothing that it needs is computed from another one."""
    ops = sorted(ops, key=lambda o: o.out == "z")
    after = outputs_early(ops, "state", [STATE], ["state"])
    assert " ".join(o.out for o in after) == (order or " ".join(o.out for o in ops))
    assert (after == ops) == (not order)
    started = {o.out for o in after if o.attr("asynchronous")}
    assert started == ({"y", "T"} | ({"x"} if D in ops else set()) if order else set())


def test_several_carried_values_keep_their_order():
    ops = [X, U, D, T, Y, OUT]
    assert outputs_early(ops, "state", [STATE, replace(STATE, name="R", next="d")], ["state"]) == ops


def test_the_product_with_the_state_comes_first():
    """What it does not depend on runs beside it. A product before it is not passed by."""
    s, v = op("cast", "s", "S"), op("cast", "v", "w")
    assert [o.out for o in carried_first([v, s, X, U], "state", [STATE], ["state"])] == ["s", "x", "v", "u"]
    early = [op("matmul", "v", "w", "w"), s, X, U]
    assert carried_first(early, "state", [STATE], ["state"]) == early
