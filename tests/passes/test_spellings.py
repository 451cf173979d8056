"""Ten spellings of Gated DeltaNet make the same kernels, up to names, under every schedule and on every target."""
# ruff: noqa: F841 - a page's `forgets` names F
from math import inf

import pytest
from up_to_names import difference

from gdn_codegen.ir.builder import (
    algorithm,
    carried,
    cumsum,
    exp,
    last,
    log,
    lower,
    maximum,
    row_sum,
    strictly_lower,
    unit_lower_inverse,
)
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import SCHEDULES

DIMS = dict(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V", forgets="F"))


def bound(g, beta, k):
    return g + log(maximum(1, abs(1 - beta * row_sum(k * k))))


def decayed(G):
    return exp(lower(G[:, None] - G[None, :], fill=-inf))


@algorithm(**DIMS)
def other_factors(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Factors and summands in another order."""
    G = cumsum(g)
    D = decayed(G)
    Tinv = unit_lower_inverse(strictly_lower(D * (k @ k.T) * beta[:, None]))
    U = Tinv @ ((v - (k @ S) * exp(G)[:, None]) * beta[:, None])
    o = ((D * (q @ k.T)) @ U + (q @ S) * exp(G)[:, None]) * scale
    S = k.T @ (U * exp(last(G) - G)[:, None]) + S * exp(last(G))
    F = log(maximum(abs(1 - row_sum(k * k) * beta), 1)) + g
    return o, S


@algorithm(**DIMS)
def multiplied_out(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """beta and scale in each term; beta exp(G) is one vector."""
    G = cumsum(g)
    D = decayed(G)
    A = strictly_lower(beta[:, None] * (k @ k.T) * D)
    U = unit_lower_inverse(A) @ (beta[:, None] * v - (beta * exp(G))[:, None] * (k @ S))
    o = scale * exp(G)[:, None] * (q @ S) + scale * (((q @ k.T) * D) @ U)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    F = bound(g, beta, k)
    return o, S


@algorithm(**DIMS)
def scaled_operands(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """What scales rows stands at operands of products."""
    G = cumsum(g)
    D = decayed(G)
    kb, qs = k * beta[:, None], scale * q
    U = unit_lower_inverse(strictly_lower((kb @ k.T) * D)) @ (v * beta[:, None] - (kb * exp(G)[:, None]) @ S)
    o = (qs * exp(G)[:, None]) @ S + ((qs @ k.T) * D) @ U
    S = (k * exp(last(G) - G)[:, None]).T @ U + exp(last(G)) * S
    F = bound(g, beta, k)
    return o, S


@algorithm(**DIMS)
def scaled_inverse(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """beta scales the columns of the inverse, as it does those of what multiplies U."""
    G = cumsum(g)
    D = decayed(G)
    Tb = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T) * D)) * beta[None, :]
    U = Tb @ (v - exp(G)[:, None] * (k @ S))
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    F = bound(g, beta, k)
    return o, S


@algorithm(**DIMS)
def masked_products(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """The decay has no mask; what it multiplies has, before it or after."""
    G = cumsum(g)
    E = exp(G[:, None] - G[None, :])
    U = unit_lower_inverse(strictly_lower(k @ k.T) * E * beta[:, None]) @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
    o = scale * (exp(G)[:, None] * (q @ S) + lower((q @ k.T) * E) @ U)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    F = bound(g, beta, k)
    return o, S


@algorithm(**DIMS)
def masked_twice(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Masks that change nothing; exponentials of columns and of differences from the other side."""
    G = cumsum(g)
    D, E = lower(exp(-(G[None, :] - G[:, None]))), lower(exp(lower(lower(G[:, None] - G[None, :], fill=-inf), fill=-inf)))
    U = unit_lower_inverse(strictly_lower(lower(beta[:, None] * (k @ k.T)) * D)) @ (
        beta[:, None] * (v - exp(G[:, None]) * (k @ S)))
    o = scale * (exp(G[:, None]) * (q @ S) + (lower(q @ k.T) * E) @ U)
    S = last(exp(G)) * S + k.T @ (exp(last(G) - G[:, None]) * U)
    F = bound(g, beta, k)
    return o, S


@algorithm(**DIMS)
def weight_and_offset(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """The products with the inverse apart, as in form wy."""
    G = cumsum(g)
    D = decayed(G)
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T) * D))
    W = Tinv @ ((beta * exp(G))[:, None] * k)
    U = Tinv @ (beta[:, None] * v) - W @ S
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    F = bound(g, beta, k)
    return o, S


@algorithm(**DIMS)
def signs(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Signs that cancel."""
    G = cumsum(g)
    D = decayed(G)
    U = unit_lower_inverse(-strictly_lower(-beta[:, None] * (k @ k.T) * D)) @ (
        -beta[:, None] * (exp(G)[:, None] * (k @ S) + -v))
    o = scale * (exp(G)[:, None] * (q @ S) - ((-q @ k.T) * D) @ U)
    S = exp(last(G)) * S - (-k).T @ (exp(-(G - last(G)))[:, None] * U)
    F = bound(g, beta, k)
    return o, S


@algorithm(queries="C K", keys="C K", values="C V", logs="C", rates="C", memory=carried("K V", forgets="limit"))
def other_names(queries, keys, values, logs, rates, memory, *, factor="K ** -0.5"):
    """All names others, the interface's too; some sort before what they sorted after."""
    total = cumsum(logs)
    Z = exp(lower(total[:, None] - total[None, :], fill=-inf))
    M = strictly_lower(rates[:, None] * (keys @ keys.T) * Z)
    B = unit_lower_inverse(M)
    written = B @ (rates[:, None] * (values - exp(total)[:, None] * (keys @ memory)))
    y = factor * (exp(total)[:, None] * (queries @ memory) + ((queries @ keys.T) * Z) @ written)
    memory = exp(last(total)) * memory + keys.T @ (exp(last(total) - total)[:, None] * written)
    limit = bound(logs, rates, keys)
    return y, memory


@algorithm(**DIMS)
def other_statements(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Statements in another order, each with one op."""
    F = bound(g, beta, k)
    reads, keys = q @ S, k @ S
    P, N = q @ k.T, k @ k.T
    G = cumsum(g)
    end = last(G)
    kept, left = exp(G)[:, None], exp(end - G)[:, None]
    D = decayed(G)
    N = beta[:, None] * N * D
    U = unit_lower_inverse(strictly_lower(N)) @ (beta[:, None] * (v - kept * keys))
    S = exp(end) * S + k.T @ (left * U)
    o = scale * (kept * reads + (P * D) @ U)
    return o, S


PAGES = [other_factors, multiplied_out, scaled_operands, scaled_inverse, masked_products, masked_twice, weight_and_offset, signs,
         other_names, other_statements]
BUILDS = [*((t, "", s) for t in ("triton", "tilelang", "pto") for s in SCHEDULES),
          *(("tilelang", "sm_90a", s) for s in ("walk", "fused_walk"))]


def kernels(page, target, arch, schedule):
    chunk, width = (16, 32) if target == "pto" else (64, 64)  # the smaller, the sooner its kernels are packed
    b = Build(target, chunk, algorithm=page, schedule=schedule, arch=arch, head_dim_k=width, head_dim_v=width)
    return [k.body for k in b.of.emit(lowered(b), b.layout, b.heads)]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, arch, schedule", BUILDS)
def test_ten_spellings_make_the_same_kernels(target, arch, schedule):
    """On Triton all of them; on other targets, whose passes see the same program, three or four in turn."""
    want = kernels("gated_delta_rule", target, arch, schedule)
    for page in PAGES if target == "triton" else PAGES[BUILDS.index((target, arch, schedule)) % 3::3]:
        got = kernels(page, target, arch, schedule)
        assert len(got) == len(want)
        for a, b in zip(want, got, strict=True):
            found = difference(a, b, python=target != "pto")
            assert not found, f"{page.name}: {found}"


def test_what_is_not_gated_delta_rule_makes_other_kernels():
    """The comparison tells a page from one with a sign, a factor or an operand changed."""
    @algorithm(**DIMS)
    def wrong(q, k, v, g, beta, S, *, scale="K ** -0.5"):
        G = cumsum(g)
        D = decayed(G)
        U = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T) * D)) @ (beta[:, None] * (v - exp(G)[:, None] * (q @ S)))
        o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
        S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
        F = bound(g, beta, k)
        return o, S
    (a,), (b,) = (kernels(x, "triton", "", "fused") for x in ("gated_delta_rule", wrong))
    assert difference(a, b)
