"""Pages and groups unlike the package's: every stage of every target means what the page does."""
from dataclasses import replace
from math import inf

import pytest
import torch
from reference import rms_error

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, row_sum, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.cut.kernels import cut
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import Schedule, ScheduleError, named
from gdn_codegen.targets import lower as lower_program

ONE = (("o", "S"),)
SIZES = {"C": 64, "K": 64, "V": 64}
EVERYWHERE = [("triton", ""), ("tilelang", ""), ("pto", ""), ("tilelang", "sm_90a")]


def means_the_page(page, plan, target="triton", arch="", sizes=SIZES, dtype="float16", span=0):
    """After the front passes and at the end: exactly what the page computes."""
    torch.manual_seed(0)
    lengths = [150, 0, 64]
    p = page.trace()
    seq = Problem(lengths, 1, 2, span)
    x = {}
    for t in p.role("input"):
        if t.index == "token":
            shape = (sum(lengths), 1 if t.heads == "H" else 2, *(sizes[d] for d in t.dims[1:]))
            x[t.name] = torch.randn(shape) / sizes["K"] ** 0.5 if t.dims[1:] else -torch.rand(shape) / 8
    got = []
    see = lambda name, before, p, c: got.append(p) if name in ("accumulate", "launch") else None
    pipelines.observers.append(see)
    try:
        lower_program(p, target, plan, sizes, dtype, arch)
    finally:
        pipelines.observers.remove(see)
    run = lambda p: interpret(p, seq, {t.name: x.get(t.name) for t in p.role("input")}, {"scale": 0.25})
    want = run(replace(p, dims=tuple(sizes.items())))
    for q in got:
        out = run(q)
        assert all(rms_error(out[n], want[n]) < 1e-11 for n in want), {n: rms_error(out[n], want[n]) for n in want}


def decayed(G):
    return exp(lower(G[:, None] - G[None, :], fill=-inf))


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def negative(q, k, v, g, beta, S):
    """Gated DeltaNet, what the inverse multiplies with the other sign."""
    G = cumsum(g)
    D = decayed(G)
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T) * D))
    N = Tinv @ (beta[:, None] * (exp(G)[:, None] * (k @ S) - v))
    o = exp(G)[:, None] * (q @ S) - ((q @ k.T) * D) @ N
    S = exp(last(G)) * S - k.T @ (exp(last(G) - G)[:, None] * N)
    return o, S


@pytest.mark.slow
@pytest.mark.parametrize("form", ["direct", "wy", "gate-free", "unit"])
@pytest.mark.parametrize("target", ["triton", "tilelang", "pto"])
def test_signs_of_what_the_inverse_multiplies(target, form):
    means_the_page(negative, Schedule("own", ONE, form=form), target)


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def read_often(q, k, v, g, beta, S):
    """U is a product's operand beside tiles of the state and free of it, scaled, turned over, and a summand."""
    G = cumsum(g)
    D = decayed(G)
    A = strictly_lower(D * (beta[:, None] * (k @ k.T)))
    Tinv = unit_lower_inverse(A)
    U = Tinv @ ((v - exp(G)[:, None] * (k @ S)) * beta[:, None])
    o = (D * lower(q @ k.T)) @ U + lower((q @ S) @ v.T) @ U + lower(q @ k.T) @ (g[:, None] * U) + U
    S = exp(last(G)) * S + k.T @ U + k.T @ (U * g[:, None])
    return o, S


@algorithm(q="C K", k="C K", v="C V", beta="C", S=carried("K V"))
def inverse_read_twice(q, k, v, beta, S):
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T)))
    U = Tinv @ (beta[:, None] * (v - k @ S))
    o = lower(q @ k.T) @ U + Tinv @ v
    S = 0.5 * S + k.T @ U
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def column_elsewhere(q, k, v, g, beta, S):
    """What is inverted is read besides; another is scaled by another column; another inverse is turned over."""
    A = strictly_lower(beta[:, None] * (k @ k.T))
    U = unit_lower_inverse(A) @ (beta[:, None] * (v - k @ S))
    W = unit_lower_inverse(strictly_lower(g[:, None] * (k @ k.T))) @ (beta[:, None] * v)
    X = unit_lower_inverse(strictly_lower(beta[:, None] * (q @ k.T))).T @ (beta[:, None] * v)
    o = A @ U + W + X
    S = 0.5 * S + k.T @ U
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def all_of_the_state(q, k, v, g, beta, S):
    """The first inverse multiplies two terms of which one depends on the state, the second two that both do."""
    U = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T))) @ (beta[:, None] * (v - k @ S))
    W = unit_lower_inverse(strictly_lower(g[:, None] * (q @ k.T))) @ (g[:, None] * (v - k @ S - lower(q @ k.T) @ U))
    o = lower(q @ k.T) @ W
    S = 0.5 * S + k.T @ U
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def reads_below(q, k, v, g, beta, S):
    """Masks of an inverse that the page reads itself: one with zeros, as form unit makes it, and one with another number."""
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T)))
    U = Tinv @ (beta[:, None] * (v - k @ S))
    o = lower(q @ k.T) @ U + strictly_lower(Tinv, fill=0.5) @ v + g[:, None] * (strictly_lower(Tinv) @ v)
    S = 0.5 * S + k.T @ U
    return o, S


@pytest.mark.parametrize("form", ["direct", "split", "unit"])
def test_a_page_may_mask_an_inverse_itself(form):
    means_the_page(reads_below, Schedule("own", ONE, form=form))


@pytest.mark.parametrize("form", ["split", "unit", "wy"])
def test_a_column_stays_where_the_product_is_not_split(form):
    means_the_page(all_of_the_state, Schedule("own", ONE, form=form))


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def outer_products(q, k, v, g, beta, S):
    """Tiles that are a column times a row: below a diagonal, in a product with U, and where only the other factor is one."""
    U = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T))) @ (beta[:, None] * (v - k @ S))
    W = unit_lower_inverse(strictly_lower(beta[:, None] * g[None, :])) @ (beta[:, None] * v)
    X = unit_lower_inverse(strictly_lower(beta[:, None] * (q @ k.T))) @ (beta[:, None] * g[None, :])
    o = lower(g[:, None] * g[None, :]) @ W + (g[:, None] * beta[None, :]) @ U + X @ v
    S = 0.5 * S + k.T @ U
    return o, S


@pytest.mark.slow
@pytest.mark.parametrize("target", ["triton", "tilelang", "pto"])
@pytest.mark.parametrize("page, groups", [
    *((page, ONE) for page in (read_often, inverse_read_twice, column_elsewhere, outer_products, "gated_delta_rule")),
    *((read_often, ((name,), ("o", "S"))) for name in ("A", "Tinv", "Tinv_below")),
    (read_often, (("Tinv_below",), ("U", "S"), ("o",))),
    ("gated_delta_rule", (("G", "Tinv_below", "beta"), ("U", "S"), ("o",)))])
def test_a_column_that_goes_through_the_inverse(page, groups, target):
    """Form unit takes it out of the product, but where something else reads what would change."""
    means_the_page(find(page) if isinstance(page, str) else page, Schedule("own", groups, form="unit"), target)


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def twice_decayed(q, k, v, g, beta, S):
    G = cumsum(g)
    D = decayed(G)
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T) * D * D))
    o = lower(q @ k.T) @ (Tinv @ v) + q @ S
    S = exp(last(G)) * S + k.T @ v
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def decay_alone(q, k, v, g, beta, S):
    G = cumsum(g)
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * decayed(G)))
    o = lower(q @ k.T) @ (Tinv @ v) + q @ S
    S = exp(last(G)) * S + k.T @ v
    return o, S


def test_gate_free_takes_out_one_decay_of_something():
    means_the_page(twice_decayed, Schedule("own", ONE, form="gate-free"))
    with pytest.raises(ScheduleError, match="form gate-free needs"):
        lower_program(decay_alone.trace(), "triton", Schedule("own", ONE, form="gate-free"), SIZES, "float16")


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def filled(q, k, v, S):
    """What lies above the inverse's diagonal is one."""
    T = unit_lower_inverse(strictly_lower(k @ k.T))
    o = strictly_lower(T, fill=1.0) @ v + q @ S
    S = 0.5 * S + k.T @ v
    return o, S


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_a_mask_that_fills_stays(target):
    means_the_page(filled, Schedule("own", ONE), target)


@algorithm(v="C V", S=carried("V V"))
def square(v, S):
    o = v @ S
    S = 0.5 * S + v.T @ v
    return o, S


def test_tiles_that_have_v_twice_are_not_split():
    plan = Schedule("own", (("S",), ("o",)), v_block=32)
    p = cut(square.trace(), plan, SIZES)
    assert [k.blocked_dim for k in p.kernels] == ["", ""]
    means_the_page(square, plan)


@algorithm(q="C K", k="C K", v="C V", beta="C", S=carried("K V"))
def skip(q, k, v, beta, S):
    """A summand that is an operand later."""
    X = beta[:, None] * v
    o = X + q @ S
    S = S + k.T @ X
    return o, S


@algorithm(q="C K", k="C K", v="C V", beta="C", S=carried("K V"))
def look(q, k, v, beta, S):
    """The next state is a summand, too."""
    X = beta[:, None] * v
    o0 = q @ S
    S = 0.5 * S + k.T @ X
    Z = S + k.T @ v
    o = o0 + q @ Z
    return o, S


@pytest.mark.parametrize("page, target, arch", [*((look, *t) for t in EVERYWHERE), *((skip, *t) for t in EVERYWHERE[:3])])
def test_summands_that_are_read_again(page, target, arch):
    means_the_page(page, Schedule("own", ONE, state_layout="vk" if target != "pto" else "kv"), target, arch)


@pytest.mark.parametrize("page, plan", [
    ("simple_gla", named("walk")), ("simple_gla", replace(named("walk"), partition="exact")),
    ("gated_delta_rule", Schedule("own", (("G",), ("U",), ("o", "S")), state_layout="vk"))])
def test_hopper_reads_a_state_before_it_replaces_it(page, plan):
    means_the_page(find(page), plan, "tilelang", "sm_90a", span=1)


@pytest.mark.slow
def test_interleaved_heads_of_several_kernels_that_compute_the_same():
    groups = (("U_weight",), ("U_offset",), ("S", "U"), ("o",))
    means_the_page(find("gated_delta_rule"), Schedule("own", groups, form="wy"), "pto")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["unit", "direct"])
def test_columns_in_blocks_on_cores(form):
    groups = (("G", "Tinv_below" if form == "unit" else "Tinv"), ("o", "S"))
    b = Build("pto", 64, schedule=Schedule("own", groups, form=form, v_block=32), head_dim_k=32, head_dim_v=64)
    x = torch.manual_seed(0) and [torch.randn(1, 70, 1, n).half() / 6 for n in (32, 32, 64)]
    g, beta = -torch.rand(1, 70, 1) / 8, torch.rand(1, 70, 1)
    plain = Build("triton", 64, schedule="fused", head_dim_k=32, head_dim_v=64)
    (o, S), (want, end) = (function(y)(*x, g, beta, output_final_state=True) for y in (b, plain))
    assert rms_error(o, want.double()) < 2e-3 and rms_error(S, end.double()) < 2e-3


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def linear(q, k, v, S):
    o = lower(q @ k.T) @ v + q @ S
    S = S + k.T @ v
    return o, S


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def halved(q, k, v, S):
    """What is left of a state depends on nothing that is loaded."""
    o = lower(q @ k.T) @ v + q @ S
    S = 0.5 * S + k.T @ v
    return o, S


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def begun_anew(q, k, v, S):
    o = lower(q @ k.T) @ v + q @ S
    S = k.T @ v + row_sum(k.T @ v)[:, None]
    return o, S


@pytest.mark.slow
@pytest.mark.parametrize("page, target", [(linear, "triton"), (halved, "triton"), (halved, "tilelang")])
def test_parts_of_plain_pages(page, target):
    plan = replace(named("fused"), partition="exact", part_chunks=1)
    q, k, v = (torch.randn(1, 100, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    b = Build(target, 16, algorithm=f"{__file__}:{page.name}", dtype="float32", head_dim_k=16, head_dim_v=16)
    run = lambda s: function(replace(b, schedule=s))(q, k, v, output_final_state=True)
    for got, want in zip(run(plan), run(named("fused")), strict=True):
        assert rms_error(got, want.double()) < 1e-5
    with pytest.raises(ScheduleError, match="partition='exact' needs a next state that depends on the state"):
        lower_program(begun_anew.trace(), target, plan, {"C": 16, "K": 16, "V": 16}, "float32")


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"), R=carried("K V"))
def two_walks(q, k, v, S, R):
    o, p = q @ S, k @ R
    S = S + k.T @ v
    R = R + q.T @ v
    return o, p, S, R


@pytest.mark.parametrize("kernels", [(("o", "S"), ("p", "R")), (("o", "S", "p", "R"),)])
def test_parts_need_one_state_in_all_walks(kernels):
    plan = Schedule("own", kernels, partition="exact")
    with pytest.raises(ScheduleError, match="needs one carried state; two_walks has "):
        lower_program(two_walks.trace(), "triton", plan, SIZES, "float16")
