"""Two products of the state's agent that are under way at once: the one by which the solution follows, and o's product with the
state."""
import re
from dataclasses import replace

import pytest

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import Op, loops, map_ops
from gdn_codegen.ir.types import Tile
from gdn_codegen.passes.agents.behind_products import two_at_once
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.rings import check_rings
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import varied

pytestmark = pytest.mark.usefixtures("unchecked")


def build(page="kimi_delta_attention", name="operand_walk", **fields):
    return Build("tilelang", 64, algorithm=page, dtype="bfloat16", head_dim_k=128, head_dim_v=128, arch="sm_90a",
                 schedule=varied(name, "sm_90a", **fields))


def of_state(k):
    """The ops of the state's agent in the loop over the part's chunks, without expressions."""
    return [o for o in [*loops(k.body)][-1].ops if o.agent == "state" and (o.buffer or not o.out)]


@pytest.mark.parametrize("page", ["kimi_delta_attention", "delta_rule", "gated_delta_rule"])
@pytest.mark.parametrize("fields", [{}, {"v_block": 64}, {"v_block": 64, "partition": "decay"}])
def test_a_product_begins_with_another(page, fields):
    """The second drain comes before a product adds to the second result. The solution depends on the first one alone."""
    ops = of_state(lowered(build(page, **fields)).kernels[-1])
    first, second = [o for o in ops if o.attr("asynchronous")]
    assert ops.index(second) == ops.index(first) + 1 and not first.args[2:] and not second.args[2:]
    drains = [o for o in ops if o.kind == "drain"]
    assert [o.attr("but") for o in drains] == [(second.out,), None]
    all_ops = [*[*loops(lowered(build(page, **fields)).kernels[-1].body)][-1].ops]
    reader = next(o for o in all_ops if second.out in o.args)
    assert page == "gated_delta_rule" or (reader.kind == "matmul" and reader.args[2] == second.out)
    assert (second.out == f"{reader.out}_begun") == (page == "kimi_delta_attention")
    place = [next(n for n, o in enumerate(all_ops) if o == x) for x in (first, *drains, *([reader] if reader.buffer else []))]
    assert place == sorted(place)


def test_a_warm_up_waits_for_the_product_that_it_has():
    """It computes no o, so that its one product is also the last that began."""
    text = render(build(v_block=64, partition="decay"))
    walk = text[text.rindex("T.set_max_nreg(240"):]
    warm_up, part = walk.split("in T.serial(first - begin, stop - begin)")[:2]
    assert re.findall(r"wait_wgmma\((\d)\)", warm_up) == ["0"] and re.findall(r"wait_wgmma\((\d)\)", part) == ["1", "0"]


@pytest.mark.parametrize("page, name", [("gated_delta_rule", "fused_walk"), ("gated_delta_rule", "walk"),
                                        ("delta_rule", "fused_walk"), ("delta_rule", "walk")])
def test_blocks_with_products_of_other_agents_have_one_at_a_time(page, name):
    """Threads of such blocks have fewer registers, and nvcc serialises products that are under way at once."""
    ops = of_state(lowered(build(page, name)).kernels[-1])
    assert not [o for o in ops if o.kind == "drain" and o.attr("but")]


@pytest.mark.parametrize("page", ["gla", "gated_delta_rule_2", "rwkv7", "simple_gla"])
def test_pages_without_such_products_keep_their_order(page):
    """No product of theirs begins by itself, or the other one is the next state."""
    ops = of_state(lowered(build(page, v_block=64)).kernels[-1])
    assert not [o for o in ops if o.kind == "drain" and o.attr("but")]


def a_walk(*more):
    """Ops of a state's agent: a product that begins, u, and what `more` gives."""
    tile, wide = Tile(("V", "C"), "float32"), Tile(("V", "K"), "float32")
    begun = Op("matmul", "p", ("S", "a"), (("asynchronous", True), ("tb", True)), tile, agent="state")
    u = Op("mul", "u", ("p", "p"), (), tile, agent="state")
    made = {"x": Op("matmul", "x", ("u", "b"), (("tb", True),), tile, agent="state"),
            "y": Op("matmul", "y", ("S", "c", "x"), (("tb", True),), tile, agent="state"),
            "z": Op("matmul", "z", ("S", "c"), (("tb", True),), tile, agent="state"),
            "next": Op("matmul", "T", ("u", "k"), (), wide, agent="state"),
            "read x": Op("mul", "r", ("x", "x"), (), tile, agent="state"),
            "read z": Op("mul", "r", ("z", "z"), (), tile, agent="state"),
            "store": Op("store", "", ("y",), (), None, agent="state")}
    return [begun, u, *(made[n] for n in more)]


@pytest.mark.parametrize("ops, carried, moved", [
    (("x", "y", "store"), (), "y_begun"), (("x", "y", "store"), ("x",), ""), (("x", "y", "store"), ("y",), ""),
    (("x", "y", "read x", "store"), (), ""), (("next", "z", "read z"), ("T",), "z"), (("next", "z"), ("z",), ""),
    (("z",), (), "")])
def test_a_product_moves_only_if_nothing_else_needs_its_place(ops, carried, moved):
    """Not if the other product is read by itself, or is the next state, nor if the iteration does not read the result."""
    before = a_walk(*ops)
    after = two_at_once(before, "state", carried, lambda name: name)
    begun = [o.out for o in after if o.attr("asynchronous")]
    assert begun == (["p", moved] if moved else ["p"]) and (after == before) == (not moved)
    known = {"S", "a", "b", "c", "k"}
    for o in after:
        assert known.issuperset(o.args), o
        known.add(o.out)
    assert {o.out for o in before} - known <= ({"x"} if moved == "y_begun" else set())


@pytest.mark.parametrize("but", ["first", "both"])
def test_the_checker_knows_which_products_end(but):
    """A wait for all but the last products ends neither the last one nor, by itself, one that began before."""
    p = lowered(build(v_block=64))
    first, second = [o for o in of_state(p.kernels[-1]) if o.attr("asynchronous")]
    names = {"first": (first.out,), "both": (first.out, second.out)}[but]

    def each(o):
        return [o.with_attrs(but=names)] if o.kind == "drain" and o.attr("but") else [o]
    k = replace(p.kernels[-1], body=map_ops(p.kernels[-1].body, each))
    assert k != p.kernels[-1]
    with pytest.raises(RaceError, match="began later may end first" if but == "first" else "begun and not drained"):
        check_rings(replace(p, kernels=(*p.kernels[:-1], k)), SM_90A)


@pytest.mark.parametrize("over", [0, 1])
def test_nothing_is_written_over_a_product_that_is_under_way(over):
    """`state` moves v before the first product ends, and computes the solution before the second does."""
    p = lowered(build(v_block=64))
    ops = of_state(p.kernels[-1])
    product = [o for o in ops if o.attr("asynchronous")][over]
    moved = next(o for o in ops if o.kind == "transpose") if over == 0 else next(
        o for o in ops[ops.index(product):] if o.kind == "matmul" and o is not product and o.buffer != product.buffer)
    k = p.kernels[-1]
    k = replace(k, body=map_ops(k.body, lambda o: [o.changed(buffer=product.buffer)] if o == moved else [o]))
    with pytest.raises(RaceError, match=f"over {product.out}, a product that was begun and not drained"):
        check_rings(replace(p, kernels=(*p.kernels[:-1], k)), SM_90A)
