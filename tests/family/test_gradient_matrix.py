"""Gradients of all pages: what schedules, sizes, layouts, lengths and gates may do to them."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import gradients
import pytest
import torch
from members import Case as Tokens
from members import drawn
from torch import Tensor

from gdn_codegen.algorithms import find, names
from gdn_codegen.derived_pages import find as derived
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import SCHEDULES
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.schedule.schedule import ScheduleError
from gdn_codegen.tools.cases import Case, inputs
from gdn_codegen.tools.verify_backward import accepted, compare, run

CHUNK = 16
#: One of each kind: gates of tokens and of channels, numbers of heads.
ONES = ("gated_delta_rule", "kimi_delta_attention", "mamba2")
LENGTHS = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


def build(name: str, K: int = 16, V: int = 16, **options: Any) -> Build:
    """The gradient of a page on Triton."""
    return Build("triton", CHUNK, algorithm=f"{name}.gradient", head_dim_k=K, head_dim_v=V, **{"dtype": "float32", **options})


def right(b: Build, case: Case) -> None:
    """All gradients are near torch.autograd's."""
    errors = compare(b, case)
    assert errors and all(e <= accepted(b, case) for e in errors.values()), errors


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", names())
def test_schedules_that_serve_a_page_serve_its_gradient(name: str, schedule: str) -> None:
    """Each pass is compared with the interpreter in float64 (tests/conftest.py)."""
    try:
        lowered(replace(build(name), algorithm=name, schedule=schedule))
    except ScheduleError:
        pytest.skip("it does not serve the page")
    lowered(build(name, schedule=schedule))


@pytest.mark.long
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "fused"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "mamba2"])
def test_kernels_of_schedules(name: str, schedule: str) -> None:
    right(build(name, schedule=schedule), Case((5, 0, 35), gate=None))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in ONES else pytest.param(n, marks=pytest.mark.long) for n in names()])
def test_lengths_and_grouped_heads(name: str) -> None:
    """Sequences without tokens, of one token, and about a chunk; two value heads of each of two key heads; equal keys."""
    right(build(name), Case(LENGTHS, 2, 4))
    right(build(name, layout="bhtd"), Case((0, 0), 1, 1))
    right(build(name, dtype="bfloat16"), Case((CHUNK + 1, 2 * CHUNK), 1, 2, alike=True))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("K, V", [(16, 36), (36, 64), (64, 16), (36, 36)])
@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "rwkv7"])
def test_dims_and_dtypes(name: str, K: int, V: int, dtype: str) -> None:
    right(build(name, K, V, dtype=dtype, layout="bhtd" if K > V else "bthd"), Case((CHUNK + 3,), 1, 1))


@pytest.mark.long
@pytest.mark.parametrize("accept", ["", "strided", "g=float16"])
@pytest.mark.parametrize("name", [n for n in names() if "g" in find(n).inputs and find(n).inputs["g"][1][:1] == ("C",)])
def test_gates_that_forget_all(name: str, accept: str) -> None:
    """Gates of -inf have the gradients that gates have at which nothing is left, and none is NaN."""
    b, case = build(name, contract=Contract.parse(accept)), Case((CHUNK + 5, 3), 1, 2)
    p = find(name).trace()
    x = inputs(replace(b, algorithm=name), p, case)
    gen = torch.Generator().manual_seed(1)
    weights = {"o": torch.randn(sum(case.lengths), 2, 16, generator=gen), "final_state": torch.randn(2, 2, 16, 16, generator=gen)}
    where = torch.rand(x["g"].shape, generator=gen) < 0.2
    got, want = (run(b, case, {**x, "g": x["g"].masked_fill(where, gate)}, weights) for gate in (-math.inf, -200.0))
    assert all(gradients.relative(got[n], want[n]) < 1e-6 for n in want), {n: gradients.relative(got[n], want[n]) for n in want}


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla"])
def test_gradients_are_the_same_bits_in_any_batch_position(name: str) -> None:
    b, case = build(name, dtype="float16"), Case((CHUNK + 5,), 1, 2)
    x = inputs(replace(b, algorithm=name), find(name).trace(), case)
    gen = torch.Generator().manual_seed(1)
    weights = {"o": torch.randn(CHUNK + 5, 2, 16, generator=gen).half(), "final_state": torch.randn(1, 2, 16, 16, generator=gen)}
    alone = run(b, case, x, weights)
    more, first = replace(case, lengths=(7, *case.lengths, 3)), slice(7, 7 + CHUNK + 5)
    others = inputs(replace(b, algorithm=name), find(name).trace(), replace(more, seed=1))

    def among(y: Tensor, rest: Tensor) -> Tensor:
        rest = rest.clone()
        rest[first if len(rest) == sum(more.lengths) else slice(1, 2)] = y
        return rest
    spread = {"o": torch.ones(sum(more.lengths), 2, 16).half(), "final_state": torch.ones(3, 2, 16, 16)}
    again = run(b, more, {n: among(y, others[n]) for n, y in x.items()}, {n: among(y, spread[n]) for n, y in weights.items()})
    for n, y in alone.items():
        assert torch.equal(y, again[n][first if len(again[n]) == sum(more.lengths) else slice(1, 2)]), n


SIZES = {"C": 4, "K": 2, "V": 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in ONES else pytest.param(n, marks=pytest.mark.long) for n in names()])
def test_gradcheck(name: str) -> None:
    """torch.autograd.gradcheck of the page's program in float64, whose backward is the program of its gradients."""
    forward, backward = (replace(derived(f"{name}.{kind}").trace(), dims=tuple(SIZES.items())) for kind in ("saving", "gradient"))
    tokens = Tokens((5,), 1, 2, gates="slow", strength=0.9)
    problem, numbers = Problem([5], 1, 2), find(name).scalar_defaults(SIZES)
    x = {n if n != "S" else "initial_state": y.double() for n, y in drawn(name, tokens, find(name).trace(), SIZES).items()}

    class Page(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
            found = Interpreter(forward, problem, numbers).run(dict(zip(x, given, strict=True)))
            ctx.save_for_backward(*given, found["S_chunks"])
            return found["o"], found["final_state"]

        @staticmethod
        def backward(ctx: Any, *d: Tensor) -> Any:
            *given, chunks = ctx.saved_tensors
            read = {n: y for n, y in zip(x, given, strict=True) if n != "initial_state"}
            got = Interpreter(backward, problem, numbers).run({**read, "S_chunks": chunks, "d_o": d[0], "d_final_state": d[1]})
            return tuple(gradients.of_input("S" if n == "initial_state" else n, got, y).view_as(y)
                         for n, y in zip(x, given, strict=True))
    assert torch.autograd.gradcheck(Page.apply, tuple(y.requires_grad_() for y in x.values()), eps=1e-5, atol=1e-7)
