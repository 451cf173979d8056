"""Two decayed products, or two derivatives of one, by one product for each level."""
from __future__ import annotations

import pytest
import torch

from gdn_codegen.algorithms import find
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last
from gdn_codegen.ir.core import Op, Program, walk
from gdn_codegen.ir.differentiate import differentiate
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.passes.abi.memory import memory
from gdn_codegen.passes.algebra.decayed_products import decayed_products
from gdn_codegen.passes.algebra.joint_levels import partners
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.targets import find as target

SIZES = {"C": 16, "K": 16, "V": 16}
PAGES = ("gla", "kimi_delta_attention", "gated_delta_rule_2", "rwkv7")


def both(p: Program, sizes: dict[str, int] = SIZES) -> list[Program]:
    """A traced program with its levels apart, and with joint ones."""
    p = memory(p, sizes, target("triton").lowering.device, PLAIN)
    return [decayed_products(p, "bfloat16", joint) for joint in (False, True)]


def products(p: Program) -> int:
    return sum(isinstance(o, Op) and o.kind == "matmul" for o in walk(p.walk.body))


def results(p: Program) -> dict[str, torch.Tensor]:
    """Of three chunks, of which the last one is ragged, in float64, with gates that forget nothing to nearly all."""
    gen, rows = torch.Generator().manual_seed(0), {"token": (40,), "slot": (3,), "sequence": (1,)}
    inputs = {t.name: torch.randn(*rows[t.index], 1, *(SIZES[d] for d in t.dims if d != "C"), generator=gen, dtype=torch.float64)
              for t in p.role("input")}
    gates = torch.tensor([-50.0, -3.0, -0.05, 0.0], dtype=torch.float64)
    for n in {"w"} if p.name.startswith("rwkv7") else {"g"}:
        inputs[n] = gates[torch.randint(4, inputs[n].shape, generator=gen)]
    return Interpreter(p, Problem([40], 1, 1), {"scale": 0.5}).run(inputs)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("backward", [False, True])
def test_they_compute_the_same_with_fewer_products(page: str, backward: bool) -> None:
    p = find(page).trace()
    apart, joint = both(differentiate(p) if backward else p)
    assert products(joint) < products(apart) or (page == "gla" and not backward and joint == apart)
    want, got = results(apart), results(joint)
    for n, x in want.items():
        assert x.isfinite().all() and (got[n] - x).norm() <= 1e-10 * x.norm(), n


def test_a_product_less_for_each_level_and_one_transposition() -> None:
    apart, joint = both(find("kimi_delta_attention").trace())
    assert products(apart) - products(joint) == 4 - 1
    apart, joint = both(differentiate(find("kimi_delta_attention").trace()))
    assert products(apart) - products(joint) == 3 * (4 - 1)
    apart, joint = both(find("kimi_delta_attention").trace(), {**SIZES, "C": 4})  # two levels
    assert joint == apart


@algorithm(q="C K", k="C K", v="C V", g="C K", S=carried("K V"))
def read_otherwise(q, k, v, g, S):
    """Neither product is an operand alone, so that neither may be rounded."""
    G = cumsum(g)
    P, A = decayed_product(q, k, G), decayed_product(k, k, G)
    o = (exp(G) * q) @ S + (P * A) @ v
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
    return o, S


def test_what_is_no_operand_is_not_transposed() -> None:
    ops = [o for o in read_otherwise.trace().walk.body if isinstance(o, Op)]
    assert partners([o for o in ops if o.kind == "decayed_product"], ops, ()) == []
    ops = [o for o in find("kimi_delta_attention").trace().walk.body if isinstance(o, Op)]
    ((first, second),) = partners([o for o in ops if o.kind == "decayed_product"], ops, ())
    assert first.args[:2] == ("k", "k") and second.args[:2] == ("q", "k")
