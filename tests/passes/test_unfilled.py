"""Loads whose rows past the sequence's end may hold anything: which they are, and that no other load may be one."""
import pytest
import torch
from walks import PLANS, SIZES, inside, lowered, with_body

from gdn_codegen.algorithms import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.padding import sums_over_padding
from gdn_codegen.passes.storage.unfilled import unfilled
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.rings import check_rings
from gdn_codegen.targets import lower

LENGTHS = [70, 1, 64, 130]


def tiles(p):
    """The loads of tiles of tokens in the walk."""
    return [o for o in inside(p) if o.kind == "load" and p.tensor(o.attr("tensor")).index == "token" and o.type.rank == 2]


def marked(p):
    return {o.attr("tensor") for o in tiles(p) if o.attr("unfilled")}


def results(p):
    """The outputs for sequences that end inside a chunk, by the interpreter, which gives NaN for rows that are not filled."""
    g = torch.Generator().manual_seed(0)
    problem = Problem(LENGTHS, 1, 2)
    shapes = {"q": (1, p.memory["K"]), "k": (1, p.memory["K"]), "v": (2, p.memory["V"]), "g": (2,), "beta": (2,)}
    x = {n: torch.randn(sum(LENGTHS), *s, generator=g) for n, s in shapes.items()}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x |= {"g": -x["g"].abs(), "beta": x["beta"].sigmoid()}
    return interpret(p, problem, {t.name: x.get(t.name) for t in p.role("input")}, {"scale": .1}, exact=True)


@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_q_need_no_zeros(plan):
    """And the results hold no NaN, so that none of its rows past the end reached a token or the state."""
    p = lowered(plan)
    assert marked(p) == {"q"}
    assert all(not x.isnan().any() for n, x in results(p).items() if "state" not in n or p.tensor(n).role == "output")


def with_mark(p, name):
    return with_body(p, [o.with_attrs(unfilled=True) if o.kind == "load" and o.attr("tensor") == name else o for o in inside(p)])


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_wrong_mark_gives_nan(name):
    p = with_mark(lowered("fused_walk"), name)
    assert any(x.isnan().any() for x in results(p).values())


def test_a_load_that_is_filled_has_the_barrier_of_a_tail():
    """Without it, the checker refuses the copy of a whole tile, because the last chunk may have fewer rows."""
    p = lowered("fused_walk")
    assert {o.attr("tensor"): bool(o.attr("tail")) for o in tiles(p)} == {"q": False, "k": True, "v": True}
    ops = [o.with_attrs(tail=None) if o.kind == "load" else o for o in inside(p)]
    with pytest.raises(RaceError, match="is copied in whole tiles"):
        check_rings(with_body(p, ops), SM_90A)
    check_rings(with_body(p, [o.with_attrs(unfilled=True) if o.kind == "load" and o.attr("tail") is None else o
                              for o in inside(p)]), SM_90A)


def test_an_unfilled_tile_is_not_known_to_be_zero_past_the_end():
    """So that a pass after it could not sum over its rows unnoticed."""
    p = lower(find("gated_delta_rule").trace(), "tilelang", PLANS["fused_walk"], SIZES, "float16", "sm_90a", upto="async_copies")
    assert not sums_over_padding(p) and marked(unfilled(p)) == {"q"}


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def q_in_the_state(q, k, v, g, S):
    """A page in which the state sums over the rows of q."""
    G = cumsum(g)
    o = exp(G)[:, None] * (k @ S)
    S = exp(last(G)) * S + k.T @ v + q.T @ v
    return o, S


def test_rows_that_are_summed_need_zeros():
    p = lower(q_in_the_state.trace(), "tilelang", PLANS["walk"], SIZES, "float16", "sm_90a", upto="unfilled")
    assert marked(p) == set()
