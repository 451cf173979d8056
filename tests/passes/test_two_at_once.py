"""Two products of the state's agent that are under way at once: the one by which the solution follows, and o's product with the
state."""
import re
from dataclasses import replace

import pytest

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import loops, map_ops
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
    """A thread begins with 128 registers there, and nvcc serialises products."""
    ops = of_state(lowered(build(page, name)).kernels[-1])
    assert not [o for o in ops if o.kind == "drain" and o.attr("but")]


@pytest.mark.parametrize("but", ["first", "both", "neither drain"])
def test_the_checker_knows_which_products_end(but):
    """A wait for all but the last products ends neither the last one nor, by itself, one that began before."""
    p = lowered(build(v_block=64))
    first, second = [o for o in of_state(p.kernels[-1]) if o.attr("asynchronous")]
    names = {"first": (first.out,), "both": (first.out, second.out), "neither drain": None}[but]

    def each(o):
        drain = o.kind == "drain" and o.agent == "state"
        return [] if drain and names is None else [o.with_attrs(but=names)] if drain and o.attr("but") else [o]
    k = replace(p.kernels[-1], body=map_ops(p.kernels[-1].body, each))
    assert k != p.kernels[-1]
    with pytest.raises(RaceError, match="began later may end first" if but == "first" else "begun and not drained"):
        check_rings(replace(p, kernels=(*p.kernels[:-1], k)), SM_90A)
