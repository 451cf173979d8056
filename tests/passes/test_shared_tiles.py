"""shared_tiles: products of the same tiles of tokens x tokens share one tile, also inside of sums."""
from __future__ import annotations

from collections import Counter

import pytest
import torch

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, lower, row_sum, strictly_lower
from gdn_codegen.ir.core import Op, Program
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.abi.memory import memory
from gdn_codegen.passes.algebra.canonical import canonical
from gdn_codegen.passes.algebra.shared_tiles import shared_tiles
from gdn_codegen.passes.algebra.split_sums import split_sums
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.targets import find as target

SIZES = {"C": 16, "K": 16, "V": 16}
INF = float("inf")


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"))
def gradients(q, k, v, g, beta, S):  # type: ignore[no-untyped-def]
    """Sums and a product of the same tiles, with signs, numbers, columns, rows and masks in several places."""
    G = cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-INF))
    x, y = v @ v.T, q @ k.T
    A = strictly_lower(-(beta[:, None] * x * D))
    rows = row_sum(strictly_lower(-(beta[:, None] * y * x)) * D) + row_sum(strictly_lower(2.0 * x * D * y) * g[None, :])
    more = row_sum(strictly_lower(x * D * (beta[:, None] * y))) - row_sum(strictly_lower(g[None, :] * (x * y * D)))
    o = A @ v + (rows + more)[:, None] * v
    S = S + k.T @ v
    return o, S


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def other_masks(q, k, v, S):  # type: ignore[no-untyped-def]
    """The same tiles with no mask, and with masks that keep the diagonal or not: none may take another one's tile for its own."""
    x, y, z = v @ v.T, q @ k.T, q @ q.T
    s = row_sum(x * y * z) + row_sum(x * y) + 3.0 * row_sum(lower(x * y)) + 5.0 * row_sum(strictly_lower(-(x * y)))
    o = strictly_lower(x) @ v + lower(y * x) @ v + s[:, None] * v
    S = S + k.T @ v
    return o, S


def walk_of(p: Program) -> list[Op]:
    return [o for o in p.walk.body if isinstance(o, Op)]


def kinds(p: Program) -> Counter[str]:
    """How often each op computes a tile of tokens x tokens."""
    return Counter(o.kind for o in walk_of(p) if o.type is not None and o.type.dims == ("C", "C"))


def prepared(page: str | object) -> Program:
    traced = find(page).trace() if isinstance(page, str) else page.trace()  # type: ignore[attr-defined]
    return canonical(memory(traced, SIZES, target("triton").lowering.device, PLAIN), named("fused"))


@pytest.mark.parametrize("page", [gradients, other_masks], ids=lambda x: x.name)
def test_the_values_stay(page: object) -> None:
    p = prepared(page)
    done = shared_tiles(p)
    assert done != p
    gen = torch.Generator().manual_seed(0)
    x = {t.name: torch.randn(20, 1, *((16,) * (len(t.dims) - 1)), generator=gen, dtype=torch.float64)
         for t in p.role("input") if t.index == "token"}
    if "g" in x:
        x["g"] = -x["g"].abs()
    x["initial_state"] = torch.randn(1, 1, 16, 16, generator=gen, dtype=torch.float64)
    want, got = (interpret(y, Problem([20], 1, 1), dict(x), {}) for y in (p, done))
    for name, y in want.items():
        assert (got[name] - y).square().mean().sqrt() < 1e-12 * y.square().mean().sqrt(), name


def test_one_mask_and_one_product_of_what_is_shared() -> None:
    before, after = kinds(prepared(gradients)), kinds(shared_tiles(prepared(gradients)))
    assert before["strictly_lower"] == 5 and after["strictly_lower"] == 1
    assert after["neg"] < before["neg"] and after["mul"] < before["mul"]


def test_a_factor_of_a_row_stands_outside_of_its_sum() -> None:
    """beta leaves the sum of rows, so that this sum is the sum of the tile that others read. It stays in that of columns."""
    done = shared_tiles(split_sums(prepared("gated_delta_rule.solved_gradient"), named("fused_gradient", "sm_90a")))
    defs = {o.out: o for o in walk_of(done)}

    def under(a: str) -> set[str]:
        """The loads that a value depends on through elementwise ops."""
        o = defs.get(a)
        if o is None or o.kind in ("matmul", "exp"):
            return set()
        return {o.attr("tensor")} if o.kind == "load" else {x for y in o.args for x in under(y)}

    tiles = [o for o in defs.values() if o.kind in ("row_sum", "column_sum") and o.args[0] in defs
             and (t := defs[o.args[0]].type) is not None and t.dims == ("C", "C")]
    assert Counter((o.kind, "beta" in under(o.args[0])) for o in tiles) == {
        ("row_sum", False): 2, ("column_sum", False): 1, ("column_sum", True): 1}


@pytest.mark.parametrize("page", ["gated_delta_rule", "kimi_delta_attention", "rwkv7", "mamba2"])
def test_programs_that_sum_no_such_tile_stay(page: str) -> None:
    p = prepared(page)
    assert shared_tiles(p) is p
