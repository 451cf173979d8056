"""reuse_products: a row sum of a product with a product becomes one of another product that is there."""
from __future__ import annotations

import pytest
import torch

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.builder import algorithm, carried, lower, row_sum
from gdn_codegen.ir.core import Op, Program
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.abi.memory import memory
from gdn_codegen.passes.algebra.canonical import canonical
from gdn_codegen.passes.algebra.reuse_products import reuse_products
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.targets import find as target

SIZES = {"C": 16, "K": 16, "V": 16}


def prepared(name: str) -> Program:
    return canonical(memory(find(name).trace(), SIZES, target("triton").lowering.device, PLAIN), named("fused"))


def products(p: Program) -> int:
    """The products of a walk."""
    return sum(isinstance(o, Op) and o.kind == "matmul" for o in p.walk.body)


@pytest.mark.parametrize(("name", "fewer"), [("gated_delta_rule", 1), ("simple_gla", 1), ("mamba2", 1), ("delta_rule", 0)])
def test_gradients_need_fewer_products(name: str, fewer: int) -> None:
    """q @ S and k @ S are read by row sums; d_o @ S.T and d_U @ S.T are computed anyway."""
    p = prepared(f"{name}.gradient")
    assert products(p) - products(reuse_products(p)) == fewer


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "gated_delta_product"])
def test_forward_pages_stay_as_they_are(name: str) -> None:
    p = prepared(name)
    assert reuse_products(p) is p


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def sums_of_products(q, k, v, S):  # type: ignore[no-untyped-def]
    """Row sums with signs, scales and sums among their factors."""
    x = row_sum(-(2 * (q @ S) * v)) + row_sum((v - q @ S) * v)
    o = x[:, None] * (v @ S.T) + lower(q @ k.T) @ k
    S = S + k.T @ v
    return o, S


def test_signs_and_scales() -> None:
    """The program computes the same before and after the pass."""
    p = canonical(memory(sums_of_products.trace(), SIZES, target("triton").lowering.device, PLAIN), named("fused"))
    done = reuse_products(p)
    assert products(done) < products(p)
    gen = torch.Generator().manual_seed(0)
    x = {n: torch.randn(20, 1, 16, generator=gen, dtype=torch.float64) for n in "qkv"}
    x["initial_state"] = torch.randn(1, 1, 16, 16, generator=gen, dtype=torch.float64)
    want, got = (interpret(y, Problem([20], 1, 1), dict(x), {}) for y in (p, done))
    for name, y in want.items():
        assert (got[name] - y).square().mean().sqrt() < 1e-12 * y.square().mean().sqrt(), name
