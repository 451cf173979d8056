"""partial_sums: a sum of which some terms are a sum that is there anyway."""
from __future__ import annotations

import torch

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.builder import algorithm, carried, strictly_lower
from gdn_codegen.ir.core import Op, Program
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.page import Algorithm
from gdn_codegen.passes.abi.memory import memory
from gdn_codegen.passes.algebra.partial_sums import partial_sums
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.targets import find as target

SIZES = {"C": 16, "K": 16, "V": 16}


@algorithm(q="C K", k="C K", v="C V", w="C V", S=carried("K V"))
def solved(q, k, v, w, S):  # type: ignore[no-untyped-def]
    """x + L x, where x = v + k S has another reader, and its terms are not beside each other."""
    x = v + k @ S
    o = (v + strictly_lower(q @ k.T) @ x) + k @ S
    S = S + k.T @ w
    return o, S


@algorithm(q="C K", k="C K", v="C V", w="C V", S=carried("K V"))
def others(q, k, v, w, S):  # type: ignore[no-untyped-def]
    """v, q S, w and v: the terms of v + w, and v once more."""
    x = v + w
    o = ((v + q @ S) + w) + v + x * x
    S = S + k.T @ x
    return o, S


def prepared(page: Algorithm) -> Program:
    return memory(page.trace(), SIZES, target("triton").lowering.device, PLAIN)


def sums(p: Program) -> dict[str, tuple[str, ...]]:
    return {o.out: o.args for o in p.walk.body if isinstance(o, Op) and o.kind == "add"}


def results(p: Program) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    x = {t.name: torch.randn(23 if t.index == "token" else 1, 1, *t.tile.shape(SIZES)[t.index == "token":], generator=gen,
                             dtype=torch.float64) for t in p.role("input")}
    return list(interpret(p, Problem([23], 1, 1), x, {}).values())


def test_a_solution_is_added_onto_its_operand() -> None:
    """So that the product with an inverse accumulates onto what it multiplies. The second product of k and S is not needed."""
    p = prepared(solved)
    done = partial_sums(p)
    assert len(sums(p)) == 4 and len(sums(done)) == 3
    x = next(n for n, args in sums(done).items() if "v" in args)
    assert [args[0] for n, args in sums(done).items() if n == "o"] == [x]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(results(p), results(done), strict=True))


def test_terms_count_as_often_as_they_come() -> None:
    p = prepared(others)
    done = partial_sums(p)
    assert done != p and all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(results(p), results(done), strict=True))


def test_other_programs_stay() -> None:
    """A sum that is a partial sum of another as it stands, and sums with nothing in common."""
    for name in ("gated_delta_rule", "kimi_delta_attention", "mamba2"):
        p = prepared(find(name))
        assert partial_sums(p) is p
