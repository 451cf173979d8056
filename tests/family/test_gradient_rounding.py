"""How far rounding to bfloat16 takes gradients with a gate for each channel, by the interpreter, of the builds for
Hopper and of Triton's."""
from __future__ import annotations

import gradients
import pytest
import torch
from members import Case, drawn

from gdn_codegen.algorithms import find
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates

pytestmark = pytest.mark.slow

CASE, SIZES = Case((100, 64, 1), gates="slow"), {"C": 64, "K": 64, "V": 64}
GATES = {"kimi_delta_attention": "g", "gla": "g", "gated_delta_rule_2": "g", "rwkv7": "w"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", [n if n != "rwkv7" else pytest.param(n, marks=pytest.mark.long) for n in GATES])
@pytest.mark.parametrize("target", ["tilelang", "triton"])
@pytest.mark.parametrize("few", [False, True])
def test_errors_are_those_of_operands(few: bool, target: str, page: str) -> None:
    """Also of gates, whose gradient is a running sum of cotangents that nearly cancel. With these rounded its error is 1e-2.
    few: with walks in parts of a chunk."""
    gen = torch.Generator().manual_seed(1)
    x = drawn(page, CASE, find(page).trace(), SIZES)
    x[GATES[page]] = torch.nn.functional.logsigmoid(torch.randn(x[GATES[page]].shape, generator=gen))
    x = {n: (y if n in ("S", "beta", GATES[page]) else y.bfloat16()).double() for n, y in x.items()}
    d_o = torch.randn(x["v"].shape, generator=gen).bfloat16().double()
    x["S"], d_final = torch.zeros_like(x["S"]), torch.zeros_like(x["S"])  # no large terms from outside
    want = gradients.expected(page, CASE, x, d_o, d_final)

    b = asked_of(Build(target, algorithm=page, dtype="bfloat16", head_dim_k=64, head_dim_v=64), True)
    builds = next(y for y in candidates(b, "cuda", "sm_90a", 64, few=few) if not any(map(unfit, y.all)))
    assert builds.states and bool(builds.gradient.plan.partition) == (few and page != "rwkv7")
    problem = Problem(list(CASE.lengths), CASE.heads, CASE.value_heads, span=1)
    numbers = find(page).scalar_defaults(SIZES)
    given = {("initial_state" if n == "S" else n): y for n, y in x.items()}
    made = interpret(lowered(builds.states), problem, given, numbers, False)
    kept = {n: y.double() for n, y in made.items() if "_chunks" in n}
    got = interpret(lowered(builds.gradient), problem, {**given, **kept, "d_o": d_o, "d_final_state": d_final}, numbers, False)
    got = {n: y.double() for n, y in got.items()}
    errors = {n: gradients.relative(gradients.of_input(n, got, y), y) for n, y in want.items()}
    assert all(0 < e < 6e-3 for e in errors.values()), errors
