"""Other members of the family in warp groups: a decaying state without an inverse, one without gates, rank-1 DPLR."""
from dataclasses import replace
from math import inf

import pytest
from test_own_pages import means_the_page

from gdn_codegen.algorithms import find
from gdn_codegen.emit import tilelang
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.core import loops
from gdn_codegen.passes.agents.order import Cycle, needs_in_place, topological
from gdn_codegen.schedule import Schedule, ScheduleError, named, varied
from gdn_codegen.targets import lower as lower_program


@algorithm(x="C V", b="C K", c="C K", g="C", dt="C", S=carried("K V"))
def ssd(x, b, c, g, dt, S):
    """S <- exp(g) S + b (dt x)^T; o = S^T c (Mamba-2)."""
    G = cumsum(g)
    X = dt[:, None] * x
    o = exp(G)[:, None] * (c @ S) + ((c @ b.T) * exp(lower(G[:, None] - G[None, :], fill=-inf))) @ X
    S = exp(last(G)) * S + b.T @ (exp(last(G) - G)[:, None] * X)
    return o, S


@algorithm(q="C K", k="C K", v="C V", beta="C", S=carried("K V"))
def delta_net(q, k, v, beta, S):
    """S <- S + k (beta (v - S^T k))^T; o = S^T q."""
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T)))
    U = Tinv @ (beta[:, None] * (v - k @ S))
    o = q @ S + lower(q @ k.T) @ U
    S = S + k.T @ U
    return o, S


@algorithm(q="C K", k="C K", v="C V", a="C K", b="C K", g="C", S=carried("K V"))
def dplr(q, k, v, a, b, g, S):
    """S <- (exp(g) I + b a^T) S + k v^T; o = S^T q."""
    G = cumsum(g)
    P = G - g
    D, E = exp(lower(G[:, None] - G[None, :], fill=-inf)), exp(strictly_lower(P[:, None] - G[None, :], fill=-inf))
    Tinv = unit_lower_inverse(strictly_lower((a @ b.T) * E) * -1.0)
    U = Tinv @ (exp(P)[:, None] * (a @ S) + strictly_lower((a @ k.T) * E) @ v)
    o = exp(G)[:, None] * (q @ S) + lower((q @ b.T) * D) @ U + lower((q @ k.T) * D) @ v
    w = exp(last(G) - G)[:, None]
    S = exp(last(G)) * S + b.T @ (w * U) + k.T @ (w * v)
    return o, S


@algorithm(x="C V", b="C K", c="C K", g="C", dt="C", S=carried("K V"))
def ssd_y(x, b, c, g, dt, S):
    """Another name for the output, and another order of factors."""
    G = cumsum(g)
    X = x * dt[:, None]
    y = (exp(lower(G[:, None] - G[None, :], fill=-inf)) * (c @ b.T)) @ X + (c @ S) * exp(G)[:, None]
    S = b.T @ (exp(last(G) - G)[:, None] * X) + S * exp(last(G))
    return y, S


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"), Z=carried("K V"))
def two_states(q, k, v, S, Z):
    """A slow and a fast state of the same values: k^T v is computed once, where both states are."""
    o = q @ S - q @ Z + lower(q @ k.T) @ v
    S = S + k.T @ v
    Z = 0.5 * Z + k.T @ v
    return o, S, Z


@algorithm(q="C K", k="C K", v="C V", d="C V", beta="C", S=carried("K V"))
def skip(q, k, v, d, beta, S):
    """Tiles in float32 that depend on no state, and that the state's agent reads."""
    X = beta[:, None] * v
    o = lower(q @ k.T) @ X + q @ S + d * v + X
    S = S + k.T @ X
    return o, S


@pytest.mark.parametrize("name", ["walk", pytest.param("fused_walk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", [ssd_y, two_states, skip])
def test_pages_with_other_names_states_and_paths(page, name):
    means_the_page(page, replace(named(name, "sm_90a"), stages=1), "tilelang", "sm_90a")


@pytest.mark.parametrize("name, changes", [("walk", {}), ("fused_walk", {"stages": 2})])
@pytest.mark.parametrize("page", [ssd, delta_net, dplr])
def test_walks_mean_the_page(page, name, changes):
    means_the_page(page, replace(named(name, "sm_90a"), **changes), "tilelang", "sm_90a")


@pytest.mark.parametrize("name, fields", [("walk", {}), ("fused_walk", {}), ("operand_walk", {}),
                                          ("operand_walk", {"agents": "early_outputs"})])
@pytest.mark.parametrize("page", [ssd_y, delta_net, dplr, two_states])
def test_parts_that_follow_one_another_mean_the_page(page, name, fields):
    """Each carried state is handed on. Where all depends on states, there is no kernel to run beside a walk."""
    plan = varied(name, "sm_90a", partition="pipelined", stages=1, **fields)
    if page is two_states and name != "operand_walk":
        with pytest.raises(ScheduleError, match="needs kernels over chunks, and after them one walk"):
            means_the_page(page, plan, "tilelang", "sm_90a")
        return
    means_the_page(page, plan, "tilelang", "sm_90a", span=1)
    p = lowered(page, replace(plan, v_block=64))
    handed = {o.attr("tensor") for o in p.kernels[-1].ops if o.kind == "store" and o.attr("parts_ahead")}
    assert handed == {f"{c.name}_start" for c in page.trace().walk.carried} and [k.start for k in p.kernels] == ["next_part", ""]


def lowered(page, plan, size=128):
    return lower_program(page.trace(), "tilelang", plan, {"C": 64, "K": size, "V": size}, "bfloat16", "sm_90a")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["walk", pytest.param("fused_walk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page, stages", [(ssd, 2), (delta_net, 2), (dplr, 1)])
def test_walks_of_128_rows_are_emitted(page, name, stages):
    p = lowered(page, replace(named(name, "sm_90a"), stages=stages))
    assert [bool(k.agents) for k in p.kernels] == [False, True]
    assert all(x.name in text.body for k, text in zip(p.kernels, tilelang.emit(p, "bthd"), strict=True) for x in k.buffers)


@pytest.mark.usefixtures("unchecked")
def test_tiles_of_more_rows_than_a_group_holds_go_to_those_who_hold_them():
    (walk,) = loops(lowered(ssd, named("walk", "sm_90a")).kernels[1].body)
    tall = [o for o in walk.body if o.kind in ("cast", "mul", "matmul") and o.type.dims[0] == "V"]
    assert tall and {o.agent for o in tall} == {"state"}
    (walk,) = loops(lowered(ssd, named("walk", "sm_90a"), 64).kernels[1].body)
    assert {o.agent for o in walk.body if o.kind == "cast" and o.type.dims == ("V", "C")} == {"aux", "state"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name, stages, hint", [("walk", 2, "stages=1 fits"), ("fused_walk", 3, "stages=1 fits")])
def test_too_large_a_walk_names_values_and_bytes(name, stages, hint):
    size = stages * 16384
    with pytest.raises(ScheduleError, match=rf"shared has 231424 bytes, \d+ are needed: a {size}, .*b {size}, .*; {hint}"):
        lowered(dplr, replace(named(name, "sm_90a"), stages=stages))
    lowered(dplr, replace(named(name, "sm_90a"), stages=1))


MEMBERS = [ssd, ssd_y, delta_net, dplr, two_states, find("simple_gla"), find("gated_delta_rule")]
#: What does not fit, by C, K and V, and the sentence.
REFUSED = {(64, 128, 256): "carried values .* have 256 rows; state takes 64, 128; v_block=128 gives an instance as many",
           (64, 128, 192): "carried values .* have 192 rows; state takes 64, 128; v_block=64 gives an instance as many",
           (64, 256, 128): "product .* is 128 x 256 over 64; state takes columns and a depth",
           (64, 192, 64): "product .* is 64 x 192 over 64; state takes columns and a depth",
           (128, 128, 128): "product .* is 128 x 128 over 128; aux takes 64 rows: C=64, K and V of 64 or 128",
           (64, 100, 100): "has rows of 200 bytes; copies of tiles need multiples of 16: K and V that are multiples of 8"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["walk", pytest.param("fused_walk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", MEMBERS, ids=lambda p: p.name)
def test_every_size_builds_or_is_refused_in_words(page, name):
    def lower_for(c, k, v, **changes):
        plan = replace(named(name, "sm_90a"), stages=1, **changes)
        return lower_program(page.trace(), "tilelang", plan, {"C": c, "K": k, "V": v}, "bfloat16", "sm_90a")

    for k in (64, 128):
        for v in (64, 128):
            assert lower_for(64, k, v).kernels[-1].agents
    assert lower_for(64, 128, 256, v_block=64).kernels[-1].agents
    for sizes, sentence in REFUSED.items():
        with pytest.raises(ScheduleError, match=sentence):
            lower_for(*sizes)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["walk", pytest.param("fused_walk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", [x for x in MEMBERS if x is not two_states], ids=lambda p: p.name)
def test_parts_build_or_are_refused_in_words(page, name):
    p = lowered(page, replace(named(name, "sm_90a"), partition="exact", stages=1))
    assert [k.grid for k in p.kernels if k.agents] == ["parts"] * 3  # two summaries of each part, and the walk
    plan = replace(named(name, "sm_90a"), partition="decay", stages=1)
    if page.trace().forgets:
        lowered(page, plan)
    else:
        with pytest.raises(ScheduleError, match="partition='decay' needs a page that bounds how a token changes the state"):
            lowered(page, plan)


def test_a_store_of_a_state_comes_before_what_takes_its_place():
    means_the_page(ssd, Schedule("own", (("G",), ("S",), ("o",))), "tilelang", "sm_90a")


def test_order():
    """Values before readers, else as it was; the next state after those who read the present one."""
    loop = ssd.trace().walk
    needs = needs_in_place(loop)
    at = {o.out: n for n, o in enumerate(topological(reversed(loop.body), needs))}
    assert all(at[a] < at[o.out] for o in loop.body for a in o.args if a in at)
    assert topological(loop.body, needs) == list(loop.body)
    (c,) = loop.carried
    assert all(at[o.out] < at[c.next] for o in loop.body if c.name in o.args and o.out != c.next)
    first, second = loop.body[:2]
    with pytest.raises(Cycle, match=f"{first.out} needs {second.out}; {second.out} needs {first.out}"):
        topological([first, second], lambda o: {first, second} - {o})
