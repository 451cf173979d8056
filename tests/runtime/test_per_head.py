"""Numbers for each value head: how pages declare them, and what generated functions take."""
import inspect
from math import inf

import pytest
import torch

from gdn_codegen import pages
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, per_head, per_token
from gdn_codegen.ir.decays import log_decays
from gdn_codegen.ir.ops import TypeRuleError
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract, ContractError
from gdn_codegen.targets import OWN
from gdn_codegen.tools.cases import Case, inputs

HERE = [t for t in OWN if runs(t, "cpu")]
K = V = 32


@algorithm(q="C K", k="C K", v="C V", rate="C", skip=per_head(0.5), bend="HV", S=carried("K V", forgets="g"))
def bent(q, k, v, rate, skip, bend, S):
    """Token t: S <- exp(bend (1 + rate)) S + k v^T; o = S^T q + skip v."""
    g = per_token(bend) + rate * bend
    G = cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))
    o = exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ v + skip * v
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C", u="HV K", D=per_head(0.25, "HV V"), S=carried("K V", forgets="g"))
def vectors(q, k, v, g, u, D, S):
    """Token t: S <- exp(g) S + (u k) v^T; o = S^T q + D v."""
    G = cumsum(g)
    L = exp(lower(G[:, None] - G[None, :], fill=-inf))
    w = u[None, :] * k
    o = exp(G)[:, None] * (q @ S) + ((q @ w.T) * L) @ v + D[None, :] * v
    S = exp(last(G)) * S + w.T @ (exp(last(G) - G)[:, None] * v)
    return o, S


def of_vectors(q, k, v, g, u, D, S):
    o = torch.zeros_like(v)
    for t in range(len(v)):
        S = torch.exp(g[t]) * S + torch.outer(u * k[t], v[t])
        o[t] = S.T @ q[t] + D * v[t]
    return o, S


def given(**more):
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 21, 1, K, generator=gen).half() / K ** 0.5 for _ in range(2))
    v = torch.randn(1, 21, 2, V, generator=gen).half()
    return {"q": q, "k": k, "v": v, "rate": torch.rand(1, 21, 2, generator=gen), "bend": torch.tensor([-0.1, -50.0]), **more}


def recurrence(q, k, v, rate, bend, skip, S):
    o = torch.zeros_like(v)
    for t in range(len(v)):
        S = torch.exp(bend * (1 + rate[t])) * S + torch.outer(k[t], v[t])
        o[t] = S.T @ q[t] + skip * v[t]
    return o, S


@pytest.mark.parametrize("target", HERE)
def test_numbers_of_heads_agree_with_a_recurrence(target):
    pages.verify(bent, cases=(Case((17, 0, 70)), Case((65,), gate=-50.0)), target=target, reference=recurrence, head_dim_k=K,
                 head_dim_v=V)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"schedule": "walk", "head_dim_k": 36, "head_dim_v": 100}])
@pytest.mark.parametrize("target", HERE)
def test_vectors_of_heads_agree_with_a_recurrence(target, plan):
    pages.verify(vectors, cases=(Case((17, 0, 70), heads=2, value_heads=4), Case((65,), gate=-50.0)), target=target,
                 reference=of_vectors, **{"head_dim_k": 64, "head_dim_v": 64, **plan})


def test_what_a_function_says_of_vectors():
    op = pages.compile(vectors, head_dim_k=K, head_dim_v=V)
    assert "u: [HV, 32] float32, one vector for each value head.\n" in op.__doc__
    x = given()
    x = {"g": -x.pop("rate"), **{n: x[n] for n in "qkv"}, "u": torch.ones(2, K)}
    assert torch.equal(op(**x)[0], op(**x, D=torch.full((2, V), 0.25))[0])
    with pytest.raises(ValueError, match=r"u: got shape \(2,\); accepted: shape \(2, 32\), one vector for each value head"):
        op(**{**x, "u": torch.ones(2)})


def test_a_function_takes_required_numbers_after_inputs_and_then_optional_ones():
    op = pages.compile(bent, head_dim_k=K, head_dim_v=V)
    found = inspect.signature(op).parameters
    assert list(found)[:6] == ["q", "k", "v", "rate", "bend", "skip"]
    assert found["bend"].default is inspect.Parameter.empty and found["skip"].default is None
    assert "skip: [HV] float32, one number for each value head; 0.5 where None." in op.__doc__


def test_a_number_that_is_left_out_has_the_declared_value():
    op = pages.compile(bent, head_dim_k=K, head_dim_v=V)
    assert torch.equal(op(**given())[0], op(**given(skip=torch.tensor([0.5, 0.5])))[0])
    assert not torch.equal(op(**given())[0], op(**given(skip=torch.tensor([0.5, 0.0])))[0])


def test_numbers_stay_float32_in_builds_of_16_bits():
    b = Build("triton", algorithm=bent, head_dim_k=K, head_dim_v=V)
    assert {t.name: t.dtype for t in lowered(b).role("input") if t.index == "head"} == {"bend": "float32", "skip": "float32"}
    op = pages.compile(bent, head_dim_k=K, head_dim_v=V)
    fine = torch.tensor([1 + 2 ** -12, -2 ** -12])  # neither is a number of 16 bits
    assert not torch.equal(op(**given(bend=-fine.abs()))[0], op(**given(bend=-fine.abs().half().float()))[0])


WRONG = {
    "a list": ([-1.0, -1.0], "bend: got list; accepted: a torch.Tensor"),
    "a number": (-1.0, "bend: got float; accepted: a torch.Tensor"),
    "nothing": (None, "bend: got NoneType; accepted: a torch.Tensor"),
    "heads of keys": (torch.zeros(1), r"bend: got shape \(1,\); accepted: shape \(2,\), one number for each value head"),
    "a number for each token": (torch.zeros(1, 21, 2), r"bend: got shape .*; accepted: shape \(2,\)"),
    "integers": (torch.zeros(2, dtype=torch.int32), "bend: got torch.int32; accepted: torch.float16"),
    "another device": (torch.zeros(2, device="meta"), "bend: got device meta; accepted: device cpu")}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_numbers_are_refused(what):
    x, said = WRONG[what]
    with pytest.raises(ValueError, match=said):
        pages.compile(bent, head_dim_k=K, head_dim_v=V)(**given(bend=x))


def test_numbers_may_have_strides():
    op = pages.compile(bent, head_dim_k=K, head_dim_v=V)
    apart = torch.tensor([[-0.1, 9.0], [-50.0, 9.0]])[:, 0]
    assert torch.equal(op(**given())[0], op(**given(bend=apart))[0])


@pytest.mark.parametrize(("dims", "said"), [
    ({"a": "H"}, "a='H'; dims are C, K and V, after H or HV if given, or HV alone"),
    ({"a": "HV K C"}, "a='HV K C'; an input has C first, or it is HV, HV K or HV V"),
    ({"a": "H K"}, "a='H K'; an input has C first, or it is HV, HV K or HV V"),
    ({"a": per_head(0.0, "C")}, r"a='C'; accepted with a default: HV, HV K and HV V"),
    ({"a": per_head(inf)}, r"a=per_head\(inf\); accepted: a finite number"),
    ({"a": per_head("0")}, r"a=per_head\('0'\); accepted: a finite number")])
def test_a_wrong_declaration_is_refused(dims, said):
    with pytest.raises(TypeRuleError, match=said):
        @algorithm(q="C K", S=carried("K V"), **dims)
        def wrong(q, a, S):
            return q @ S, S


def test_a_use_that_does_not_fit_names_the_line():
    @algorithm(q="C K", a="HV", S=carried("K V"))
    def wrong(q, a, S):
        return cumsum(a)[:, None] * (q @ S), S
    with pytest.raises(TypeRuleError, match=r"wrong \(test_per_head.py, line \d+\): cumsum takes "):
        wrong.trace()


def test_no_form_is_for_numbers_of_heads():
    with pytest.raises(ContractError, match="inputs: got 'bend'; accepted: q, k, v, rate, the inputs of bent"):
        pages.source(bent, head_dim_k=K, head_dim_v=V, contract=Contract.parse("bend=linear"))


@pytest.mark.parametrize("target", HERE)
def test_numbers_of_16_bits(target):
    """A contract for them loads them as they are, any other build widens them."""
    bend = torch.tensor([-0.1, -3.0]).bfloat16()
    narrow = pages.compile(bent, target=target, head_dim_k=K, head_dim_v=V, contract=Contract.parse("bend=bfloat16"))
    wide = pages.compile(bent, target=target, head_dim_k=K, head_dim_v=V)
    want = wide(**given(bend=bend.float()))[0]
    assert torch.equal(wide(**given(bend=bend))[0], want) and torch.equal(narrow(**given(bend=bend))[0], want)


def test_a_program_with_numbers_of_heads_is_read_back():
    p = lowered(Build("triton", algorithm=bent, head_dim_k=K, head_dim_v=V))
    assert parse_program(program_text(p)) == p
    assert parse_program(program_text(bent.trace())) == bent.trace()


def test_the_number_of_a_product_is_its_log_decay():
    """`rate` is then not below 0."""
    assert log_decays(bent.trace()) == {"bend"}
    b = Build("triton", algorithm=bent, head_dim_k=K, head_dim_v=V)
    x = inputs(b, bent.trace(), Case((20,)))
    assert (x["bend"] < 0).all() and (x["rate"] > 0).all()
