"""The program of the gradients of a page, run by the interpreter in float64, against torch.autograd through the recurrence."""
from __future__ import annotations

from dataclasses import replace

import gradients
import pytest
import torch
from members import MEMBERS, Case, drawn
from torch import Tensor

from gdn_codegen.algorithms import names
from gdn_codegen.derived_pages import derived, find
from gdn_codegen.ir.builder import algorithm, apply, carried, exp, last, maximum, row_norm, row_sum, sigmoid, sqrt
from gdn_codegen.ir.core import Op
from gdn_codegen.ir.differentiate import chunk_states, differentiate, saving
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.ops import OPS, TypeRuleError
from gdn_codegen.ir.page import Algorithm
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.stored import Solved, by_token, solutions, stored
from gdn_codegen.ir.verify import verify

SIZES = {"C": 8, "K": 4, "V": 6}


@pytest.mark.parametrize("case", [Case((13, 0, 21, 1), 1, 2, repeat=True), Case((8, 5), 2, 2, gates="slow", strength=2.0)],
                         ids=["mixed", "slow"])
@pytest.mark.parametrize("solved", ["", "solutions", "inverses", "operands", "bounds"])
@pytest.mark.parametrize("name", names())
def test_gradients_of_pages(name: str, solved: Solved, case: Case) -> None:
    """The gradient by every input and by the initial state, with those of outputs and final states given. It reads states before
    chunks, and also what solves the system of each chunk, the inverse, and what else is computed of a chunk's inputs."""
    p = by_token(find(name).trace()) if solved == "bounds" else find(name).trace()
    if solved in ("solutions", "inverses") and not solutions(p):
        return
    read = stored(p, solved)
    programs = saving(p, outputs=False, solved=solved), differentiate(p, solved)
    forward, backward = (verify(replace(x, dims=tuple(SIZES.items()))) for x in programs)
    slots, every = ({t.name for t in x.role(role) if t.index == "slot"} for x, role in ((backward, "input"), (forward, "output")))
    states_before = {chunk_states(c.name) for c in p.walk.carried}
    assert slots == every and slots - states_before <= {chunk_states(n) for n in read.values()}
    operands = solved in ("operands", "bounds")
    assert slots - states_before == {chunk_states(n) for n in read.values()} or operands and slots > states_before
    costly = {solved: {"decayed_product", "unit_lower_inverse"}} if operands else {}
    costly["inverses"] = {"unit_lower_inverse"} if name != "gated_delta_product" else set()  # something else reads its first
    assert not costly.get(solved, set()) & {o.kind for o in backward.walk.body if isinstance(o, Op)}
    assert parse_program(program_text(backward)) == backward
    x, numbers = drawn(name, case, p, SIZES), find(name).scalar_defaults(SIZES)
    gen = torch.Generator().manual_seed(1)
    d_o = torch.randn(sum(case.lengths), case.value_heads, SIZES["V"], generator=gen).double()
    d_final = torch.randn(x["S"].shape, generator=gen).double()
    problem = Problem(list(case.lengths), case.heads, case.value_heads)
    given = {n: y.double() for n, y in x.items() if n != "S"}
    states = Interpreter(forward, problem, numbers).run({**given, "initial_state": x["S"].double()})
    read = {t.name: states[t.name] for t in backward.role("input") if t.index == "slot"}
    got = Interpreter(backward, problem, numbers).run({**given, **read, "d_o": d_o, "d_final_state": d_final})
    for n, want in gradients.expected(name, case, x, d_o, d_final).items():
        assert gradients.relative(gradients.of_input(n, got, want), want) < 1e-12, n


def test_every_member_has_a_recurrence() -> None:
    """A page without one would not be tested above."""
    assert set(names()) == set(MEMBERS)


@algorithm(x="C K", y="C K", a="HV", b="HV K", S=carried("K"))
def odd(x, y, a, b, S):  # type: ignore[no-untyped-def]
    """A page of ops and forms that the pages of the package do not have."""
    z = maximum(x, y) * exp(a) + b[None, :] / (2 + sigmoid(y))
    n = row_norm(z, eps=0.1) - abs(x) / (1 + sqrt(row_sum(y * y) + 1))[:, None]
    t = apply("softplus", z) * apply("minimum", S[None, :], n)
    o = t + last(z * n)[None, :] * n
    S = S * exp(-abs(last(t))) + last(n) + a
    return o, S


@algorithm(x="C K", y="C V", a="HV", b="HV K", c="HV K", S=carried("K V"))
def of_heads(x, y, a, b, c, S):  # type: ignore[no-untyped-def]
    """What is computed of vectors of a value head scales rows of tokens and of a state."""
    s, t = exp(-abs(b)), sigmoid(c) / (1 + abs(a)) + b * c
    o = (t[None, :] * x) @ S + y * row_sum(x * s[None, :] * exp(c[None, :]))[:, None]
    S = s[:, None] * S + (x * t[None, :]).T @ (y - (x * maximum(b, c)[None, :]) @ S)
    return o, S


@algorithm(x="C K", w="C", a="HV", S=carried("K"))
def of_a_number(x, w, a, S):  # type: ignore[no-untyped-def]
    """A number of a head that scales tiles, vectors of tokens, and a state."""
    o = x * a + (w * exp(a))[:, None] + S[None, :] / (2 + a * a)
    S = S * exp(-abs(a)) + last(x) * a
    return o, S


@algorithm(x="C K", y="C V", S=carried("K V"))
def of_norms(x, y, S):  # type: ignore[no-untyped-def]
    """Rows divided by their norms, which scale more than these rows."""
    r, s = apply("rsqrt", row_sum(x * x) + 0.5), apply("rsqrt", row_sum(y * y))
    n, m = r[:, None] * x, y * s[:, None]
    o = n @ S + (r * s)[:, None] * y
    S = exp(-abs(S)) * S + n.T @ (m * r[:, None])
    return o, S


def test_the_derivative_of_a_norm_reads_what_is_stored() -> None:
    """Where the program of the states stores rows divided by their norms, and one divided by the norms, the gradient loads no
    row of the input. Nothing else of the input is left to load."""
    forms = (("k", "l2norm"), ("q", "l2norm"))
    stored_states, gradient = (find(f"kimi_delta_attention.stored_{kind}", forms).trace() for kind in ("states", "gradient"))
    read = {t.name for t in gradient.role("input")}
    assert {"rq_chunks", "rk_chunks", "q_chunks", "k_chunks"} <= read and not {"q", "k"} & read
    assert {"rq_chunks", "rk_chunks"} <= {t.name for t in stored_states.role("output")}
    assert {"q", "k"} <= {t.name for t in find("kimi_delta_attention.gradient", forms).trace().role("input")}


@pytest.mark.parametrize("page", [odd, of_heads, of_a_number, of_norms])
def test_a_page_of_ones_own(page: Algorithm) -> None:
    """Central differences of the page itself, for ops and forms that no page of the package has."""
    p = page.trace()
    backward = verify(replace(differentiate(p), dims=tuple(SIZES.items())))
    forward = verify(replace(saving(p), dims=tuple(SIZES.items())))
    gen = torch.Generator().manual_seed(2)
    T, heads = 16, 2
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)
    leads = {"token": (T, heads), "head": (heads,), "sequence": (1, heads)}
    x, d = ({t.name: normal(*leads[t.index], *[SIZES[n] for n in t.dims if n != "C"]) / (4 if t.name in ("a", "S") else 1)
             for t in p.role(role)} for role in ("input", "output"))
    d = {f"d_{n}": y for n, y in d.items()}
    problem = Problem([T], heads, heads)
    kept = Interpreter(forward, problem, {}).run(dict(x))
    got = Interpreter(backward, problem, {}).run({**x, **d, "S_chunks": kept["S_chunks"]})
    for name, y in x.items():
        found = gradients.of_input(name, got, y) if name in ("a", "b", "c") else got[f"d_{name}"]
        for _ in range(8):  # a central difference along a direction
            along, step = normal(*y.shape), 1e-5
            ends = [Interpreter(forward, problem, {}).run({**x, name: y + s * step * along}) for s in (1, -1)]
            loss = [(e["o"] * d["d_o"]).sum() + (e["final_state"] * d["d_final_state"]).sum() for e in ends]
            want = (loss[0] - loss[1]) / (2 * step)
            assert abs((found * along).sum() - want) < 1e-6 * max(1.0, abs(want)), name


def test_parts_of_what_a_head_has() -> None:
    """Of a vector one for each chunk. Of a number one for each column of a chunk, or for each token where a vector of tokens
    depends on it, too."""
    tensors = {t.name: (t.index, t.dims) for t in differentiate(of_heads.trace()).role("output")}
    assert tensors["d_b"] == tensors["d_c"] == ("slot", ("K",)) and tensors["d_a"] == ("slot", ("K",))
    assert {t.name: (t.index, t.dims) for t in differentiate(of_a_number.trace()).role("output")}["d_a"] == ("token", ("C",))
    mamba = {t.name: (t.index, t.dims) for t in find("mamba2.gradient").trace().role("output")}
    assert mamba["d_A"] == ("token", ("C",)) and mamba["d_D"] == ("slot", ("V",))


def test_an_op_without_a_derivative_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "sigmoid", replace(OPS["sigmoid"], vjp=None))
    with pytest.raises(TypeRuleError, match=r"odd, line \d+: got sigmoid, which has no derivative"):
        differentiate(odd.trace())


def test_a_wrong_derivative_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails for a vjp with a wrong sign."""
    vjp = OPS["exp"].vjp
    assert vjp is not None
    monkeypatch.setitem(OPS, "exp", replace(OPS["exp"], vjp=lambda r, o, ct: vjp(r, o, r.op("neg", ct))))
    with pytest.raises(AssertionError, match=r"\bg\b|\bq\b|\bk\b"):
        test_gradients_of_pages("gla", False, Case((13,), 1, 2))


def test_derived_pages_are_found_by_name() -> None:
    assert find("gated_delta_rule.gradient") is derived(find("gated_delta_rule"), "gradient", ())
    assert find("mamba2.saving").name == "mamba2_saving"
    with pytest.raises(ValueError, match="algorithm: got"):
        find("gated_delta_rule.other")
