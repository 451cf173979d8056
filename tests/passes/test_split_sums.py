"""split_sums: a sum of what depends on a carried value and of what does not becomes two."""
from __future__ import annotations

import pytest
import torch

from gdn_codegen.ir.builder import algorithm, carried, lower, row_sum, strictly_lower
from gdn_codegen.ir.core import Op, Program
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.abi.memory import memory
from gdn_codegen.passes.algebra.canonical import canonical
from gdn_codegen.passes.algebra.split_sums import split_sums
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.targets import find as target

SIZES = {"C": 16, "K": 16, "V": 16}


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def mixed(q, k, v, S):  # type: ignore[no-untyped-def]
    """Sums of tiles of which one depends on the state: signs, masks and scales around them."""
    D = lower(q @ k.T)
    x = row_sum(strictly_lower(-(v @ (q @ S).T + q @ k.T)) * D) + row_sum((k @ q.T - (q @ S) @ v.T) * D)
    o = x[:, None] * v
    S = S + k.T @ v
    return o, S


def sums(p: Program) -> int:
    """The sums of tiles in a walk."""
    return sum(isinstance(o, Op) and o.kind in ("row_sum", "column_sum") for o in p.walk.body)


def prepared() -> Program:
    return canonical(memory(mixed.trace(), SIZES, target("triton").lowering.device, PLAIN), named("operand_gradient"))


def test_split_sums_compute_the_same() -> None:
    p = prepared()
    done = split_sums(p, named("operand_gradient"))
    assert sums(done) == sums(p) + 2
    gen = torch.Generator().manual_seed(0)
    x = {n: torch.randn(20, 1, 16, generator=gen, dtype=torch.float64) for n in "qkv"}
    x["initial_state"] = torch.randn(1, 1, 16, 16, generator=gen, dtype=torch.float64)
    want, got = (interpret(y, Problem([20], 1, 1), dict(x), {}) for y in (p, done))
    for name, y in want.items():
        assert (got[name] - y).square().mean().sqrt() < 1e-12 * y.square().mean().sqrt(), name


@pytest.mark.parametrize("schedule", ["fused", "walk"])
def test_schedules_without_summands_keep_their_sums(schedule: str) -> None:
    p = prepared()
    assert split_sums(p, named(schedule)) is p
