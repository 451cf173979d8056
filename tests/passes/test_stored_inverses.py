"""Inverses that a walk of states stores for a gradient, on Hopper's warp groups."""
from dataclasses import replace

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.core import Op, loops, walk
from gdn_codegen.ir.differentiate import differentiate, saving
from gdn_codegen.ir.stored import inverses, stored
from gdn_codegen.ir.verify import verify
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower

SIZES = {"C": 64, "K": 128, "V": 128}


def kernels(kind, plan, **fields):
    """The kernels of a derived page of Gated DeltaNet in float16, with all that crosses memory in 16 bits."""
    page = find(f"gated_delta_rule.{kind}").trace()
    slots = sorted(t.name for t in page.tensors if t.index == "slot")
    return lower(page, "tilelang", varied(plan, "sm_90a", **fields), SIZES, "float16", "sm_90a",
                 Contract(dtypes=tuple((n, "float16") for n in slots))).kernels


def test_which_inverses_are_stored():
    """Those that only what solves a system reads."""
    assert inverses(find("gated_delta_rule").trace()) == ["Tinv"] and not inverses(find("simple_gla").trace())


def test_a_page_may_have_the_name_of_what_is_stored():
    """The value gets another name."""
    p, names = find("gated_delta_rule").trace(), {"U": "Tinv_below"}
    p = p.with_walk(replace(p.walk, body=tuple(o.renamed(names).changed(out=names.get(o.out, o.out)) for o in p.walk.body)))
    assert stored(p, "inverses")["Tinv"] not in ("Tinv", "Tinv_below")
    for made in (saving(p, outputs=False, solved="inverses"), differentiate(p, "inverses")):
        verify(replace(made, dims=(("C", 16), ("K", 16), ("V", 16))))


def test_an_inverse_is_stored_from_the_tile_that_products_read():
    """By the agent of stores, without a copy: the walk has one inverse, and no op but that one makes what is stored."""
    k = kernels("inverse_states", "fused_walk", partition="decay")[-1]
    ops = [o for lp in loops(k.body) for o in walk(lp.body) if isinstance(o, Op)]
    stores = [o for o in ops if o.kind == "store" and o.attr("tensor") == "Tinv_below_chunks"]
    (stored,) = {o.args[0] for o in stores}
    assert {o.agent for o in stores} == {"store"}
    assert {(o.kind, o.attr("strict")) for o in ops if o.out == stored} == {("diag_inverse", True)}
    assert {o.agent for o in ops if o.kind == "matmul" and stored in o.args} == {"state"}


def test_a_state_is_stored_by_the_agent_that_holds_it():
    """It is carried, so that no op of the walk makes it."""
    k = kernels("saving", "fused_walk", partition="decay")[-1]
    assert {o.agent for o in k.ops if o.kind == "store" and o.attr("tensor").startswith("S_chunks")} == {"state"}


def test_a_gradient_with_inverses_has_no_kernel_for_them_and_adds_onto_what_it_solves():
    """The product with the inverse accumulates onto its operand, in registers. So do the products that did before: without, the
    registers of the state do not suffice, and ptxas serialises wgmma."""
    made, other = (kernels(f"{kind}_gradient", "fused_gradient", partition="decay") for kind in ("inverse", "solved"))
    assert not any(o.kind == "diag_inverse" for k in made for o in k.ops)
    products = [o for o in made[-1].ops if o.kind == "matmul" and o.args[1].startswith("Tinv_below")]
    assert products and all(len(o.args) == 3 for o in products)
    onto, before = (sum(o.kind == "matmul" and len(o.args) == 3 for o in k[-1].ops) for k in (made, other))
    assert onto == before + len(products)
