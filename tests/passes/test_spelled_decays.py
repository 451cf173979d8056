"""Pages that spell decays as papers do: exp(G) at one operand and exp(-G) at the other. They become safe, or they are refused."""
from dataclasses import replace
from math import inf

import pytest
import torch
from reference import rms_error
from tiers import every
from up_to_names import difference

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import (
    TypeRuleError,
    algorithm,
    carried,
    cumsum,
    decayed_product,
    exp,
    last,
    lower,
    maximum,
    strictly_lower,
    unit_lower_inverse,
    valid,
)
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.algebra.canonical import canonical
from gdn_codegen.passes.algebra.check_exponents import check_exponents
from gdn_codegen.passes.algebra.exponents import Sum, falls
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import named
from gdn_codegen.schedule.schedule import varied
from gdn_codegen.targets import lower as lower_program

KDA = dict(q="C K", k="C K", v="C V", g="HV C K", beta="C", S=carried("K V"))
GLA = dict(q="C K", k="C K", v="C V", g="HV C K", S=carried("K V"))
RWKV = dict(r="HV C K", w="HV C K", k="HV C K", v="C V", a="HV C K", b="HV C K", S=carried("K V"))
GDN = dict(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))


@algorithm(**KDA)
def scaled_operands(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """As papers have it: what falls at one operand, what grows at the other."""
    G = cumsum(g)
    kb, qd, kd = k * exp(G), q * exp(G), k * exp(-G)
    A = strictly_lower((beta[:, None] * kb) @ kd.T)
    u = unit_lower_inverse(A) @ (beta[:, None] * (v - kb @ S))
    o = scale * (qd @ S + lower(qd @ kd.T) @ u)
    S = exp(last(G))[:, None] * (S + kd.T @ u)
    return o, S


@algorithm(**KDA)
def quotients(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Quotients; the decay to the chunk's end as a product of two."""
    G = cumsum(g)
    kd = k / exp(G)
    A = strictly_lower(beta[:, None] * ((k * exp(G)) @ kd.T))
    u = unit_lower_inverse(A) @ (beta[:, None] * v - beta[:, None] * ((k * exp(G)) @ S))
    o = (scale * q * exp(G)) @ S + lower((scale * q * exp(G)) @ kd.T) @ u
    S = S * exp(last(G))[:, None] + (exp(last(G))[None, :] * kd).T @ u
    return o, S


@algorithm(**KDA)
def middle_rows(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Both operands relative to a row, which cancels."""
    G = cumsum(g)
    n = last(G)[None, :]
    up, down = exp(G - n), exp(-(G - n))
    A = strictly_lower(beta[:, None] * ((k * up) @ (k * down).T))
    u = unit_lower_inverse(A) @ (beta[:, None] * (v - (exp(G) * k) @ S))
    o = scale * ((exp(G) * q) @ S + lower((q * up) @ (k * down).T) @ u)
    S = exp(last(G))[:, None] * S + (k * exp(n - G)).T @ u
    return o, S


@algorithm(**RWKV)
def less_the_token(r, w, k, v, a, b, S, *, scale=1.0):
    """RWKV-7; sums without the token as differences, in any order."""
    W = cumsum(w)
    ahead, kd, bd = a * exp(-w + W), k * exp(-W), b * exp(-W)
    Z = unit_lower_inverse(-strictly_lower(ahead @ bd.T)) @ (
        (exp(W - w) * a) @ S + strictly_lower((a * exp(W - w)) @ kd.T) @ v)
    o = scale * ((exp(W) * r) @ S + lower((r * exp(W)) @ bd.T) @ Z + lower((r * exp(W)) @ kd.T) @ v)
    S = exp(last(W))[:, None] * (S + bd.T @ Z + kd.T @ v)
    return o, S


@algorithm(**RWKV)
def named_before(r, w, k, v, a, b, S, *, scale=1.0):
    """RWKV-7 with the package's ops, and the sums without the token as a difference with a name."""
    W = cumsum(w)
    before = W - w
    Z = unit_lower_inverse(-decayed_product(a, b, W, before)) @ (
        (exp(before) * a) @ S + decayed_product(a, k, W, before) @ v)
    o = scale * ((exp(W) * r) @ S + decayed_product(r, b, W) @ Z + decayed_product(r, k, W) @ v)
    to_end = exp(last(W)[None, :] - W)
    S = exp(last(W))[:, None] * S + (to_end * b).T @ Z + (to_end * k).T @ v
    return o, S


@algorithm(**GDN)
def numbers_of_tokens(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """Gated DeltaNet, a gate for each token, with the decays at the operands."""
    G = cumsum(g)
    kd, qd = k * exp(-G)[:, None], q * exp(G)[:, None]
    Tinv = unit_lower_inverse(strictly_lower(beta[:, None] * ((k * exp(G)[:, None]) @ kd.T)))
    U = Tinv @ (beta[:, None] * (v - (k * exp(G)[:, None]) @ S))
    o = scale * (qd @ S + lower(qd @ kd.T) @ U)
    S = exp(last(G)) * (S + kd.T @ U)
    return o, S


@algorithm(**GDN)
def plain_gdn(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """The package's page, which is safe, without `forgets`."""
    G = cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))
    U = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T) * D)) @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
    o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    return o, S


@algorithm(**GDN)
def vectors_before(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """A token reads the state before it decays: sums of a vector without the token."""
    G, before = cumsum(g), cumsum(g, exclusive=True)
    D = exp(strictly_lower(before[:, None] - G[None, :], fill=-inf))
    o = scale * (exp(before)[:, None] * (q @ S) + ((q @ k.T) * D) @ (beta[:, None] * v))
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * (beta[:, None] * v))
    return o, S


@algorithm(**GDN)
def vectors_less_the_token(q, k, v, g, beta, S, *, scale="K ** -0.5"):
    """The same as a difference, at the operands and at the columns."""
    G = cumsum(g)
    P = strictly_lower((q * exp(G - g)[:, None]) @ (k * exp(-G)[:, None]).T)
    o = scale * ((q * exp(-g + G)[:, None]) @ S + P @ (beta[:, None] * v))
    S = exp(last(G)) * (S + (k / exp(G)[:, None]).T @ (beta[:, None] * v))
    return o, S


SAME = [(scaled_operands, find("kimi_delta_attention")), (quotients, find("kimi_delta_attention")),
        (middle_rows, find("kimi_delta_attention")), (less_the_token, find("rwkv7")), (named_before, find("rwkv7")),
        (numbers_of_tokens, plain_gdn), (vectors_less_the_token, vectors_before)]
IDS = [page.name for page, _ in SAME]


def kernels(page, target):
    b = Build(target, 16, algorithm=page, schedule="fused", head_dim_k=32, head_dim_v=32)
    return [k.body for k in b.of.emit(lowered(b), b.layout, b.heads)]


@pytest.mark.slow
@pytest.mark.parametrize("page, want, target", every(2, SAME, ["triton", "tilelang", "pto"]), ids=lambda x: getattr(x, "name", x))
def test_the_same_kernels_up_to_names(page, want, target):
    for a, b in zip(kernels(want, target), kernels(page, target), strict=True):
        assert not (found := difference(a, b, python=target != "pto")), found


SIZES, LENGTHS = {"C": 16, "K": 8, "V": 8}, [33, 0, 16, 5]


def drawn(page, least):
    """Inputs, with gates from 0 to `least` mixed in one chunk."""
    gen, x = torch.Generator().manual_seed(0), {}
    gates = torch.tensor([0.0, -0.05, -3.0, -50.0, least, -inf if least < -1e3 else least]).double()
    for t in page.trace().role("input"):
        if t.index == "token":
            x[t.name] = torch.randn(sum(LENGTHS), 1, *(SIZES[d] for d in t.dims[1:]), generator=gen, dtype=torch.float64) / 2
    gate = "w" if "w" in x else "g"
    x[gate] = gates[torch.randint(len(gates), x[gate].shape, generator=gen)]
    if gate == "g" and "beta" in x:
        x["beta"] = x["beta"].sigmoid()
    return {**x, "initial_state": torch.randn(len(LENGTHS), 1, 8, 8, generator=gen, dtype=torch.float64)}


def run(p, x):
    return interpret(p, Problem(LENGTHS, 1, 1), {t.name: x[t.name] for t in p.role("input")}, dict.fromkeys(p.scalars, 0.5))


@pytest.mark.parametrize("least", [-50.0, -120.0, -200.0, -1e4])
@pytest.mark.parametrize("page, want", SAME, ids=IDS)
def test_no_gate_is_too_strong(page, want, least):
    """Beside the recurrence: the page that writes the ops itself, in chunks of one token."""
    x = drawn(page, least)
    bounded = {n: y.clamp(min=-300) if n in ("g", "w") else y for n, y in x.items()}
    by_token = run(replace(want.trace(), dims=(("C", 1), ("K", 8), ("V", 8))), bounded)
    got = run(lower_program(page.trace(), "triton", varied("fused"), SIZES, "float32"), x)
    assert all(rms_error(got[n], by_token[n]) < 1e-9 for n in by_token)
    if least == -50:  # where also the page as it is written means this, with weak gates
        weak = {**x, **{n: x[n] / 50 for n in ("g", "w") if n in x}}
        kept = run(replace(page.trace(), dims=tuple(SIZES.items())), weak)
        done = run(lower_program(page.trace(), "triton", varied("fused"), SIZES, "float32"), weak)
        assert all(rms_error(done[n], kept[n]) < 1e-9 for n in kept)


def test_what_is_known_of_two_sums():
    """The entries of a running sum of negative numbers, compared one by one."""
    G = -torch.arange(1.0, 9).cumsum(0)
    before = G + torch.arange(1.0, 9)
    def tile(s):
        rows = (G if s.own else before)
        return {"": rows[:, None].expand(8, 8), "row": rows[None, :].expand(8, 8), "last": rows[-1].expand(8, 8)}[s.at]
    sums = [Sum(("g",), at, own) for at in ("", "row", "last") for own in (0, 1)]
    for mask, kept in (("", torch.ones(8, 8)), ("lower", torch.ones(8, 8).tril()), ("strictly_lower", torch.ones(8, 8).tril(-1))):
        for later in sums:
            for earlier in sums:
                true = bool(((tile(later) - tile(earlier))[kept > 0] <= 0).all())
                assert falls(later, earlier, mask) == true, (later, earlier, mask)
    assert not falls(Sum(("g",), "last", 1), Sum(("h",), "", 1), "")


# --- what is refused, and what is not ------------------------------------------------------------------------------------
def exponent_of(what):
    """A page with a value of this function of (q, k, v, g, G) beside a state that decays."""
    @algorithm(**GLA)
    def page(q, k, v, g, S):
        G = cumsum(g)
        o = (exp(G) * q) @ S + what(q, k, v, g, G)
        S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
        return o, S
    return page


REFUSED = {
    "unmasked": lambda q, k, v, g, G: (q * exp(G)) @ ((k * exp(-G)).T @ v),
    "alone": lambda q, k, v, g, G: (exp(-G) * k) @ (k.T @ v),
    "a gate": lambda q, k, v, g, G: (exp(-g) * k) @ (k.T @ v),
    "diagonal": lambda q, k, v, g, G: lower((q * exp(G - g)) @ (k * exp(-G)).T) @ v,
    "twice": lambda q, k, v, g, G: lower((q * exp(G)) @ (k * exp(-G - G)).T) @ v,
    "one less two": lambda q, k, v, g, G: (exp(last(G)[None, :] - G - G) * k) @ (k.T @ v),
    "turned": lambda q, k, v, g, G: decayed_product(q, k, last(G)[None, :] - G) @ v,
    "of others": lambda q, k, v, g, G: decayed_product(q, k, G, cumsum(k * k, exclusive=True)) @ v,
    "too late": lambda q, k, v, g, G: decayed_product(q, k, G, G - g - g) @ v,
    "to the start": lambda q, k, v, g, G: (exp(G - last(G)[None, :]) * q) @ (k.T @ v),
    "in a maximum": lambda q, k, v, g, G: (exp(maximum(-G, G)) * k) @ (k.T @ v),
    "of padding": lambda q, k, v, g, G: (exp(valid(-G)) * k) @ (k.T @ v),
    "half": lambda q, k, v, g, G: (exp(-0.5 * G) * k) @ (k.T @ v)}
ACCEPTED = {
    "bounded": lambda q, k, v, g, G: (exp(-maximum(G, -80.0)) * k) @ (k.T @ v),
    "a gate": lambda q, k, v, g, G: (exp(g) * k) @ (k.T @ v),
    "half": lambda q, k, v, g, G: (exp(0.5 * G) * k) @ (k.T @ v),
    "to the end": lambda q, k, v, g, G: (exp(last(G)[None, :] - (G - g)) * k) @ (k.T @ v),
    "later": lambda q, k, v, g, G: decayed_product(q, k, G - last(G)[None, :]) @ v,
    "other sums": lambda q, k, v, g, G: (exp(-cumsum(k * k)) * k) @ (k.T @ v),
    "none": lambda q, k, v, g, G: (exp(-q) * k) @ (k.T @ v)}


@pytest.mark.parametrize("what", REFUSED)
def test_an_exponent_that_may_grow_is_refused(what):
    page = exponent_of(REFUSED[what])
    with pytest.raises(TypeRuleError, match=r"^page, line \d+ \(.+\): got exp of a sum that grows where the running sum of "
                                            r"g falls; it overflows .*; for products of two tokens decayed_product"):
        lower_program(page.trace(), "triton", varied("fused"), SIZES, "float32")


@pytest.mark.parametrize("what", ACCEPTED)
def test_other_exponents_are_not(what):
    check_exponents(canonical(exponent_of(ACCEPTED[what]).trace(), named("fused")))


def test_rates_above_zero():
    """A page whose sums only occur with a minus sign."""
    def page(sign):
        @algorithm(**GLA)
        def rates(q, k, v, g, S):
            G = cumsum(g)
            o = (exp(-G) * q) @ S + lower((q * exp(-G)) @ (k * exp(G)).T) @ v
            S = exp(-last(G))[:, None] * S + (exp(sign * (last(G)[None, :] - G)) * k).T @ v
            return o, S
        return rates.trace()

    done = canonical(page(-1.0), named("fused"))
    check_exponents(done)
    assert "decayed_product" in {o.kind for o in walk(done.kernels[0].body)}
    with pytest.raises(TypeRuleError, match="grows where"):
        check_exponents(canonical(page(1.0), named("fused")))
