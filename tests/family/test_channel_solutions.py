"""Gradients of pages with a gate for each channel that read what the states' module stored, on warp groups: stage by stage,
against torch.autograd in float64."""
from __future__ import annotations

from typing import Any

import pytest
from test_gradients_in_parts import OF_GROUPS, Given

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.core import Program
from gdn_codegen.passes import pipelines
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower
from gdn_codegen.targets.gradient_plans import OF_SOLUTIONS

SIZES = {"C": 64, "K": 128, "V": 64}


@pytest.mark.parametrize("page", [pytest.param("kimi_delta_attention", marks=pytest.mark.slow),
                                  *(pytest.param(n, marks=pytest.mark.long) for n in ("gated_delta_rule_2", "rwkv7"))])
def test_they_are_the_gradients(page: str) -> None:
    """After each pass, with decayed products by warps, or one product of a level for two values. No kernel computes what solves a
    system, or reads v and a state for it."""
    traced = find(f"{page}.solved_gradient").trace()
    (solution,) = [t.name for t in traced.role("input") if t.index == "slot" and "C" in t.dims]
    p, seen = lowered(traced)
    assert [k.grid for k in p.kernels] == ["chunks", "sequences", "chunks", "chunks", "chunks"]
    loads = [{o.attr("tensor") for o in k.ops if o.kind == "load"} for k in p.kernels]
    assert not loads[0] & {"v", "S_chunks_vk"} and all(f"{solution}_vk" in loads[n] for n in (2, 3, 4))
    assert any(o.kind in ("decayed_blocks", "halves") for o in seen["decayed_products"].walk.body)
    near(page, seen)


@pytest.mark.parametrize("page", [pytest.param("kimi_delta_attention", marks=pytest.mark.slow),
                                  *(pytest.param(n, marks=pytest.mark.long) for n in ("gla", "gated_delta_rule_2", "rwkv7"))])
def test_they_are_the_gradients_with_operands(page: str) -> None:
    """Of what the program of the states stores, after each pass."""
    near(page, lowered(find(f"{page}.stored_gradient").trace())[1])


def lowered(traced: Program) -> tuple[Program, dict[str, Program]]:
    """A gradient as training calls lower it, and the program after each pass. What comes from memory is rounded."""
    seen: dict[str, Program] = {}

    def see(name: str, before: Program, p: Program, c: Any) -> None:
        seen[name] = p
    names = sorted(t.name for t in traced.role("input") if t.index == "slot" and not t.wide)
    rounded = Contract(dtypes=tuple((n, "bfloat16") for n in names))
    pipelines.observers.append(see)
    try:
        plan = varied("channel_gradient", "sm_90a", v_block=64, kernels=OF_SOLUTIONS)
        return lower(traced, "tilelang", plan, SIZES, "bfloat16", "sm_90a", rounded), seen
    finally:
        pipelines.observers.remove(see)


def near(page: str, seen: dict[str, Program]) -> None:
    """Assert that programs after passes give the gradients."""
    given = Given(page, OF_GROUPS, SIZES, (-3.0, -0.2))
    errors = {name: given.run(seen[name], 0)[1] for name in ("decayed_products", "cut", "place", "overlapping")}
    assert all(e < 1e-7 for e in errors.values()), errors
