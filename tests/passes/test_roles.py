"""Roles: schedules that speak of them serve pages whatever their values are called, and pages of two states, on all targets."""
from dataclasses import replace
from math import inf

import pytest
import torch
from reference import rms_error
from test_own_pages import inverse_read_twice

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, row_sum, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.core import Op
from gdn_codegen.ir.types import Tile
from gdn_codegen.passes.algebra.rewrite import rewrite
from gdn_codegen.passes.cut.decay_bound import decay_bound
from gdn_codegen.passes.cut.elementwise import elementwise, sums_rows
from gdn_codegen.passes.cut.kernels import cut
from gdn_codegen.passes.cut.roles import roles
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import SCHEDULES, Schedule, ScheduleError, named
from gdn_codegen.targets import OWN
from gdn_codegen.targets import lower as lower_program

SIZES = {"C": 16, "K": 32, "V": 64}


def decayed(G):
    return exp(lower(G[:, None] - G[None, :], fill=-inf))


@algorithm(q="C K", k="C K", v="C V", a="C", b="C", S=carried("K V"))
def renamed(q, k, v, a, b, S):
    """Gated DeltaNet, its output called y and all else otherwise, too."""
    total = cumsum(a)
    decay = decayed(total)
    inv = unit_lower_inverse(strictly_lower(b[:, None] * (k @ k.T) * decay))
    new = inv @ (b[:, None] * (v - exp(total)[:, None] * (k @ S)))
    y = exp(total)[:, None] * (q @ S) + ((q @ k.T) * decay) @ new
    S = exp(last(total)) * S + k.T @ (exp(last(total) - total)[:, None] * new)
    return y, S


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"), Z=carried("K K"))
def normalised(q, k, v, g, S, Z):
    """Two states of other dims each: y = S^T q / (1 + q^T Z q)."""
    G = cumsum(g)
    P = (q @ k.T) * decayed(G)
    above = exp(G)[:, None] * (q @ S) + P @ v
    below = exp(G) * row_sum((q @ Z) * q) + row_sum((P @ k) * q)
    y = above / (1 + below)[:, None]
    w = exp(last(G) - G)[:, None] * k
    S = exp(last(G)) * S + w.T @ v
    Z = exp(last(G)) * Z + w.T @ k
    return y, S, Z


@algorithm(q="C K", k="C K", v="C V", u="C V", g="C", S=carried("K V"), Z=carried("K V"))
def channels(q, k, v, u, g, S, Z):
    """Two states of the same dims: y = S^T q / (1 + (Z^T q)^2)."""
    G = cumsum(g)
    P = (q @ k.T) * decayed(G)
    below = exp(G)[:, None] * (q @ Z) + P @ u
    y = (exp(G)[:, None] * (q @ S) + P @ v) / (1 + below * below)
    w = exp(last(G) - G)[:, None] * k
    S = exp(last(G)) * S + w.T @ v
    Z = exp(last(G)) * Z + w.T @ u
    return y, S, Z


def of_renamed(x, S):
    S = torch.exp(x["a"]) * S
    S = S + torch.outer(x["k"], x["b"] * (x["v"] - x["k"] @ S))
    return x["q"] @ S, S


def of_normalised(x, S, Z):
    S, Z = (torch.exp(x["g"]) * y + torch.outer(x["k"], n) for y, n in ((S, x["v"]), (Z, x["k"])))
    return x["q"] @ S / (1 + x["q"] @ Z @ x["q"]), S, Z


def of_channels(x, S, Z):
    S, Z = (torch.exp(x["g"]) * y + torch.outer(x["k"], n) for y, n in ((S, x["v"]), (Z, x["u"])))
    return x["q"] @ S / (1 + (x["q"] @ Z) ** 2), S, Z


def problem(page, tokens):
    """Inputs in float32 by name, [1, T, 1, dims], and outputs and final states by the token recurrence in float64."""
    gen, x = torch.Generator().manual_seed(0), {}
    for t in (t for t in page.trace().role("input") if t.index == "token"):
        dims = [SIZES[d] for d in t.dims[1:]]
        x[t.name] = torch.randn(1, tokens, 1, *dims, generator=gen) / 4 if dims else -torch.rand(1, tokens, 1, generator=gen)
    if "b" in x:
        x["b"] = -x["b"]
    states = [torch.zeros([SIZES[d] for d in dims], dtype=torch.float64) for dims in page.states.values()]
    rows = []
    for t in range(tokens):
        y, *states = RECURRENCES[page.name]({n: a[0, t, 0].double() for n, a in x.items()}, *states)
        rows.append(y)
    return x, [torch.stack(rows)[None, :, None], *(s[None, None] for s in states)]


RECURRENCES = {"renamed": of_renamed, "normalised": of_normalised, "channels": of_channels}


def ways():
    """Each page and schedule on Triton, the page of two other states with each on all targets, and the others with one each. What
    is left out differs from one that runs in nothing but names, or the dims of the second state. Two of a page are fast. Half of
    the others are run by hand: each schedule runs on two targets at least."""
    one = {(renamed, "tilelang", "fused_walk"), (renamed, "pto", "staged"), (channels, "tilelang", "walk"),
           (channels, "pto", "walk")}
    for page in (renamed, normalised, channels):
        for t, target in enumerate(OWN):
            for s, schedule in enumerate(SCHEDULES):
                if target == "triton" or page is normalised or (page, target, schedule) in one:
                    quick = target == "triton" and schedule in ("staged", "walk")
                    often = (s + t + (page is renamed)) % 2 == 0 or (page, target, schedule) in one
                    yield pytest.param(page, target, schedule, id=f"{page.name}-{target}-{schedule}",
                                       marks=() if quick else pytest.mark.slow if often else pytest.mark.long)


@pytest.mark.parametrize("page, target, schedule", list(ways()))
def test_every_schedule_runs_pages_of_other_names_and_of_two_states(page, target, schedule):
    b = Build(target, 16, algorithm=f"{__file__}:{page.name}", schedule=schedule, dtype="float32", head_dim_k=SIZES["K"],
              head_dim_v=SIZES["V"])
    x, want = problem(page, 37)
    got = function(b)(**x, output_final_state=True)
    assert len(got) == len(want)
    for y, w in zip(got, want, strict=True):
        assert rms_error(y, w) < 1e-5


@pytest.mark.parametrize("form, own", [
    ("direct", {"inverse": ("Tinv",), "weight": (), "offset": (), "solution": ("U",),
                "operand": ("Tinv", "exp_G", "q_kT_D", "decay_to_end"), "right_side": ("operand_of_U",)}),
    ("wy", {"inverse": ("Tinv",), "weight": ("U_weight",), "offset": ("U_offset",), "solution": ("U",),
            "operand": ("Tinv", "exp_G", "beta_v", "U_weight", "q_kT_D", "decay_to_end"), "right_side": ()}),
    ("gate-free", {"inverse": ("Tinv",), "weight": (), "offset": (), "solution": ("U",),
                   "operand": ("Tinv", "exp_G", "q_kT_D", "decay_to_end"), "right_side": ("operand_of_U",)}),
    ("split", {"inverse": ("Tinv_scaled",), "weight": (), "offset": ("U_offset",), "solution": ("U_unscaled",),
               "operand": ("Tinv_scaled", "exp_G", "q_kT_D_beta", "beta_decay_to_end"), "right_side": ("minus_exp_G_k_S",)}),
    ("unit", {"inverse": ("Tinv_below",), "weight": (), "offset": (), "solution": ("U_unscaled",),
              "operand": ("exp_G", "Tinv_below", "q_kT_D_beta", "beta_decay_to_end"), "right_side": ("v_minus_exp_G_k_S",)})])
def test_roles_of_gated_delta_rule(form, own):
    p = rewrite(find("gated_delta_rule").trace(), Schedule("own", (("@output", "@state"),), form=form))
    assert roles(p) == {"output": ("o",), "state": ("S",), "gate": ("g", "beta"), "gate_sum": ("G",), "system": ("A",),
                        "summand": own["offset"], "early": own["offset"], "early_keyless": own["offset"],
                        "factor": (), "score": (), "late_score": (), "keyless": ("o",), "sum": (), "tile": ("o",), "core": ("o",),
                        "converted": (), "normed": (), "elementwise": (), "keyless_elementwise": (), "stateless": (),
                        "stateless_keyed": (),
                        "pair": (own["operand"][-2],), "keyed": own["weight"], "state_solution": own["solution"],
                        "update": (), **own}


@pytest.mark.parametrize("page, update", [("kimi_delta_attention", ("k_decay_to_end",)), ("rwkv7", ("to_end_b",)), ("gla", ())])
def test_an_update_multiplies_what_depends_on_a_state(page, update):
    """In `gla` the decayed k multiplies v, and nothing that comes from the state. exp(G) k multiplies the state itself."""
    assert roles(rewrite(find(page).trace(), Schedule("own", (("@output", "@state"),), form="unit")))["update"] == update


def test_a_role_with_a_star_gives_each_of_several_values_a_kernel():
    s = Schedule("own", (("@gate_sum",), ("@pair*",), ("@output", "@state")))
    kernels = cut(find("rwkv7").trace(), s, {"C": 16, "K": 16, "V": 16}).kernels
    assert [k.name for k in kernels][1:-1] == list(roles(find("rwkv7").trace())["pair"]) and len(kernels) == 5
    one = cut(find("gla").trace(), s, {"C": 16, "K": 16, "V": 16}).kernels
    assert [k.name for k in one] == ["G_g", "o_S"]
    with pytest.raises(ScheduleError, match=r"@pair\*, which is no role"):
        Schedule("own", (("@gate_sum", "@pair*"), ("@output", "@state")))


def test_a_role_that_no_value_has_is_empty_and_one_may_have_several_values():
    have = {n: x for n, x in roles(normalised.trace()).items() if x}
    assert have == {"output": ("y",), "state": ("S", "Z"), "gate": ("g",), "gate_sum": ("G",),
                    "operand": ("P", "exp_G", "row_sums_P_k_q", "w"), "early": ("P_v", "row_sums_P_k_q"),
                    "early_keyless": ("P_v", "row_sums_P_k_q"), "keyless": ("y",), "pair": ("P",), "keyed": ("w",),
                    "sum": ("row_sums_q_Z_q",), "tile": ("y",), "core": ("y",)}
    p = inverse_read_twice.trace()
    assert roles(p)["inverse"] == ("Tinv",) and roles(p)["solution"] == ("U",) and len(roles(p)["offset"]) == 1


def kernels(page, *groups, **more):
    p = decay_bound(page.trace(), named("fused"))  # which drops the page's bound
    return [k.name for k in cut(p, Schedule("own", groups, **more), {"C": 64, "K": 64, "V": 64}).kernels]


def test_groups_of_names_and_roles():
    """A value stands where a name puts it, else in the first group with a role of it; what no later group reads drops out."""
    page = find("gated_delta_rule")
    assert kernels(page, ("G", "@inverse"), ("@output", "S")) == ["G_Tinv", "o_S"]
    assert kernels(page, ("@gate_sum", "@system"), ("Tinv", "G"), ("@output", "@state")) == ["A", "Tinv_G", "o_S"]
    assert kernels(page, ("@gate", "@weight"), ("@output", "@state")) == ["g_beta", "o_S"]
    assert kernels(page, ("@gate_sum", "@system"), ("@inverse",), ("@output", "@state")) == ["G_A", "Tinv", "o_S"]
    assert kernels(page, ("@output", "@state"), ("@solution",)) == ["o_S"]
    assert kernels(normalised, ("@system",), ("@state",), ("@output",)) == ["S_Z", "y"]


@pytest.mark.parametrize("groups, text", [
    ((("@gatesum",), ("o", "S")), "kernels has @gatesum, which is no role; accepted are @output, @state, @gate,"),
    ((("@gate_sum",), ("@output",)), "no group of kernels writes S; accepted: groups that have all outputs and states, as --set "
                                     "kernels=o,S or --set kernels=@output,@state"),
    ((("@gate_sum",), ("@gate_sum", "@output", "@state")), "@gate_sum is twice in kernels"),
    ((("@gate_sum", "Tnv"), ("@output", "@state")), "kernels names Tnv, and gated_delta_rule has no such value; accepted: G, ")])
def test_roles_that_do_not_fit(groups, text):
    with pytest.raises(ScheduleError, match=f"schedule own: {text}"):
        kernels(find("gated_delta_rule"), *groups)


def test_forms_of_schedules_of_roles_suit_pages_without_an_inverse_and_those_of_names_do_not():
    lower_ = lambda s: lower_program(normalised.trace(), "triton", s, SIZES, "float32")
    assert [k.name for k in lower_(replace(named("staged"), form="unit")).kernels] == ["G", "S_Z", "y"]
    with pytest.raises(ScheduleError, match="form unit needs a product of a unit_lower_inverse, which normalised does not have"):
        lower_(Schedule("own", (("y", "S", "Z"),), form="unit"))


def test_a_form_makes_what_it_adds_to_an_inverse_once():
    p = rewrite(inverse_read_twice.trace(), Schedule("own", (("@output", "@state"),), form="unit"))
    assert roles(p)["inverse"] == ("Tinv_below",)


def test_an_elementwise_output_has_one_cotangent():
    """c, d and e are cotangents. Of the outputs y, z and w only y is an elementwise function of one of them."""
    tile, vector = Tile(("C", "K")), Tile(("C",))
    ops = [Op("load", n, (), (), tile) for n in ("c", "d", "e", "x")]
    ops += [Op("mul", "y", ("c", "x"), (), tile), Op("row_sum", "s", ("d",), (), vector),
            Op("col", "s_col", ("s",), (), Tile(("C", 1))), Op("mul", "z", ("d", "s_col"), (), tile),
            Op("mul", "w", ("e", "s_col"), (), tile)]
    types = {o.out: o.type for o in ops}
    assert elementwise(ops, ["c", "d", "e"], ["y", "z", "w"], types) == {"y"}
    ops += [*(Op("load", n, (), (), vector) for n in "fa"), Op("mul", "u", ("f", "a"), (), vector)]
    types |= {"f": vector, "u": vector, "a": vector}
    assert elementwise(ops, ["c", "d", "e", "f"], ["y", "z", "w", "u"], types, rank=1) == {"u"}
    assert sums_rows("z", {o.out: o for o in ops}) and not sums_rows("y", {o.out: o for o in ops})
