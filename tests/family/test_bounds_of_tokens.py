"""What bounds how much a token forgets comes from memory: parts of a walk back read what the walk of the states computed."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradients
import problems
import pytest
import torch
from members import Case, drawn
from test_autograd import errors as errors_of
from test_autograd import right
from test_gradient_checks import found

from gdn_codegen.algorithms import find as page_of
from gdn_codegen.derived_pages import find
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, row_sum
from gdn_codegen.ir.core import Program
from gdn_codegen.ir.dataflow import ops_of
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.stored import by_token
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.build import lowered as built
from gdn_codegen.runtime.call import gradient_builds
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import find as find_target
from gdn_codegen.targets import lower
from gdn_codegen.targets.gradient_plans import BY_CHANNELS, OF_SOLUTIONS, GradientPlan

SIZES = {"C": 8, "K": 16, "V": 16}
#: What heads forget: within a chunk, in three, never.
GATES = (-3.0, -0.9, 0.0)
CASE = Case((5 * 8 + 3, 0, 8, 2 * 8, 1), len(GATES), len(GATES), repeat=True)
#: Pages with a gate for each channel whose states lead from channel to channel.
PAGES = "kimi_delta_attention", "gated_delta_rule_2"


@pytest.fixture(autouse=True)
def short_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups are two parts long at most, on any device, so that short sequences have summaries."""
    monkeypatch.setattr("gdn_codegen.passes.cut.partition.longest_warm_up", lambda device: 2)


def lowered(name: str, kind: str, target: str = "triton", arch: str = "", **fields: Any) -> Program:
    """A gradient in parts."""
    plan = varied(BY_CHANNELS, arch, partition="decay", kernels=OF_SOLUTIONS, **fields)
    return lower(find(f"{name}.{kind}_gradient").trace(), target, plan, SIZES, "float32", arch)


def ran(name: str, kind: str, change: float = 1.0) -> tuple[torch.Tensor, float]:
    """The lengths of warm-ups of parts of a chunk, and the largest error of a gradient. change: a factor of stored bounds."""
    x, numbers = drawn(name, CASE, page_of(name).trace(), SIZES), page_of(name).scalar_defaults(SIZES)
    for head, gate in enumerate(GATES):
        x["g"][:, head] = gate
    gen = torch.Generator().manual_seed(1)
    d_o = torch.randn(sum(CASE.lengths), CASE.value_heads, SIZES["V"], generator=gen).double()
    d_final = torch.randn(x["S"].shape, generator=gen).double()
    given = {n: y.double() for n, y in x.items() if n != "S"}
    states = replace(find(f"{name}.{kind}_states").trace(), dims=tuple(SIZES.items()))
    problem = Problem(list(CASE.lengths), CASE.heads, CASE.value_heads, 1)
    stored = Interpreter(states, replace(problem, span=0), numbers).run({**given, "initial_state": x["S"].double()})
    for n, y in stored.items():
        given |= {n: y * change if n.startswith("F_of") else y, f"{n}_vk": y.mT}
    p = lowered(name, kind)
    i = Interpreter(p, problem, numbers)
    got = i.run({t.name: {**given, "d_o": d_o, "d_final_state": d_final}[t.name] for t in p.role("input")})
    want = gradients.expected(name, CASE, x, d_o, d_final)
    return i.memory["d_S_warm_up"], max(gradients.relative(gradients.of_input(n, got, y), y) for n, y in want.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_parts_have_the_warm_ups_of_bounds_that_kernels_compute(name: str) -> None:
    """And the gradients of torch.autograd, with gates that forget at once, slowly, and never."""
    (read, error), (computed, _) = ran(name, "bounded"), ran(name, "stored")
    assert torch.equal(read.nan_to_num(-9), computed.nan_to_num(-9)) and error < 1e-7
    assert {1.0, -1.0} <= set(read[:6].flatten().tolist())


@pytest.mark.slow
def test_bounds_of_memory_are_what_counts() -> None:
    """The test above fails where a part leaves out chunks that it needs."""
    assert ran("kimi_delta_attention", "bounded", 3.0)[1] > 1e-6


def test_channels_that_keep_apart_have_no_bound_of_a_token() -> None:
    """Of these the slowest sum counts. A page with one gate a token has its bound already."""
    for name in ("gla", "gated_delta_rule"):
        p = page_of(name).trace()
        assert by_token(p) == p
    p = by_token(page_of("kimi_delta_attention").trace())
    assert (p.forgets, ops_of(p)[p.forgets].kind) == ("F_of_tokens", "valid")


@pytest.mark.parametrize("forms", [(), (("beta", "sigmoid"), ("g", "safe"), ("k", "l2norm"), ("q", "l2norm"))])
def test_no_kernel_of_a_walk_back_computes_gates_for_its_bound(forms: tuple[tuple[str, str], ...]) -> None:
    """On Hopper the kernel over chunks before it reads numbers, and that of the states has the gates in any case."""
    b = asked_of(Build("tilelang", algorithm="kimi_delta_attention", dtype="bfloat16", contract=Contract(inputs=forms)), True)
    x = next(x for x in candidates(b, "cuda", "sm_90a", 64, few=True) if not any(map(unfit, x.all)))
    assert x.states and str(x.gradient.algorithm) == "kimi_delta_attention.bounded_gradient"

    def storing(b: Build) -> set[str]:
        """The tiles that the kernel loads which stores bounds of chunks."""
        p = built(b)
        k = next(k for k in p.kernels if any(o.kind == "store" and o.attr("tensor") == "F_of_tokens_chunk_ws" for o in k.ops))
        return {o.attr("tensor") for o in k.ops if o.kind == "load" and len(p.tensor(o.attr("tensor")).dims) == 2}
    assert storing(x.gradient) == {"operand_of_o_chunks", "d_o"}
    assert "g" in storing(x.states) and not (forms and {"k", "q"} & storing(x.states))


@algorithm(q="C K", k="C K", v="C V", g="C K", S=carried("K V", forgets="F"))
def scaled_by_its_bound(q, k, v, g, S):  # type: ignore[no-untyped-def]
    """A page that also multiplies by what bounds how much its tokens forget."""
    G = cumsum(g)
    F = row_sum(g)
    o = ((exp(G) * q) @ S) * F[:, None]
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
    return o, S


@pytest.mark.slow
def test_checks_of_a_page_that_multiplies_by_its_bound_compare_something() -> None:
    """With a bound of 0 all its gradients would be 0."""
    errors = found(render(Build("triton", 16, algorithm=f"{__file__}:scaled_by_its_bound.stored_gradient", dtype="float32",
                                head_dim_k=16, head_dim_v=16, schedule=varied(BY_CHANNELS, partition="decay"))))
    assert all(0 < e <= accepted for n, (e, accepted) in errors.items() if n.startswith("d_")), errors


@pytest.mark.slow
@pytest.mark.parametrize("K, V, dtype", [(36, 16, torch.float32), (16, 36, torch.bfloat16)])
def test_calls_of_layers_in_parts(K: int, V: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All forms at once, padded columns of K or V, sequences without tokens."""
    fields = {"partition": "decay", "part_chunks": 1}
    plan = GradientPlan((BY_CHANNELS, {"kernels": OF_SOLUTIONS, **fields}), (("operand_walk", fields),), True, solved="bounds")
    monkeypatch.setitem(find_target("triton").gradients, "cpu", (plan,))
    monkeypatch.setattr(gradient_builds, "_fitting", gradient_builds._fitting.__wrapped__)
    monkeypatch.setattr(gradient_builds, "few_walks", lambda *about: True)
    for n, size in (("K", K), ("V", V)):
        monkeypatch.setitem(problems.SIZES, n, size)
    p, gen = problems.Problem("kimi_delta_attention", "triton", (0, 70, 0, 33), dtype=dtype), torch.Generator().manual_seed(1)
    shape = p.x["g"].shape
    g, A, bias = (torch.randn(s, generator=gen) for s in (shape, shape[1:2], shape[1:]))
    forms = {"g": gradients.raw_gate, "beta": lambda y: y["beta"].sigmoid(), **{n: gradients.norm(n) for n in ("q", "k")}}
    x = {"g": g.bfloat16(), "A_log": A, "dt_bias": bias, "beta": torch.randn(p.x["beta"].shape, generator=gen).bfloat16(),
         **{n: 3 * p.x[n] for n in ("q", "k")}}
    errors = errors_of(p, x, forms, gate="raw", beta_form="sigmoid", use_qk_l2norm_in_kernel=True)
    right({n: e for n, e in errors.items() if n not in ("g", "beta")}, dtype)
    right({n: errors[n] for n in ("g", "beta")}, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_checks_of_modules_draw_tokens_that_forget_nothing(name: str) -> None:
    """Bounds that have nothing to do with the gates of a check would leave out chunks that count."""
    for kind, schedule in (("states", varied("operand_walk", partition="decay")),
                           ("gradient", varied(BY_CHANNELS, partition="decay", kernels=OF_SOLUTIONS))):
        errors = found(render(Build("triton", 16, algorithm=f"{name}.bounded_{kind}", dtype="float32", head_dim_k=16,
                                    head_dim_v=16, schedule=schedule)))
        assert len(errors) > 3 and all(e <= accepted for e, accepted in errors.values()), errors
