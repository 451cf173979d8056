"""decayed_products: levels for gates of any size, and one product for diagonal blocks where gates have a lower bound."""
from dataclasses import replace

import pytest
import torch
from members import Case, drawn, expected
from reference import rms_error
from tiers import every

from gdn_codegen.algorithms import find
from gdn_codegen.host.pto import _mask
from gdn_codegen.ir import ranges
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, maximum, sigmoid, valid
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Problem, const_tile, interpret
from gdn_codegen.ir.types import Tensor
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.algebra import decayed_products
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.schedule.schedule import varied
from gdn_codegen.targets import lower

pytestmark = pytest.mark.slow

CASE = Case((33, 0, 16, 7), gates="slow")
SIZES = {"C": 32, "K": 16, "V": 16}
GATES = {"kimi_delta_attention": "g", "gla": "g", "gated_delta_rule_2": "g", "rwkv7": "w"}
#: Gates of a chunk that forget as fast as they may, and such that keep.
STRONG = torch.tensor([-5.0, -5.0, -5.0, -2.0, -0.01, 0.0])


def lowered(page, dtype, accept="", target="triton", sizes=SIZES, upto=""):
    return lower(page.trace(), target, varied("fused"), sizes, dtype, contract=Contract.parse(accept), upto=upto)


def products(p):
    """Of a program in which decayed products are computed: how many products, and the sizes of masks."""
    ops = [o for k in p.kernels for o in walk(k.body)]
    between = [o for o in ops if o.kind == "matmul" and o.type.dims == ("C", "C")]
    return len(between), sorted({(o.kind, o.attr("size")) for o in ops if o.kind in ("pairs", "diagonal_blocks")})


def given(name, p, sizes, gates):
    """Inputs of a member with these gates in random places, of which half the channels' forget at each token."""
    x = drawn(name, CASE, p, sizes)
    gen = torch.Generator().manual_seed(1)
    g = gates[torch.randint(len(gates), x[GATES[name]].shape, generator=gen)]
    g[..., ::2] = gates[0]
    return {**x, GATES[name]: g.to(x[GATES[name]].dtype)}


def run(p, x, exact=True):
    inputs = {("initial_state" if n == "S" else n): y.double() for n, y in x.items()}
    numbers = find(p.name).scalar_defaults(SIZES)
    return interpret(p, Problem(list(CASE.lengths), CASE.heads, CASE.value_heads), inputs, numbers, exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_bound_saves_products(dtype):
    """But for float16."""
    sizes = {"C": 64, "K": 64, "V": 64}
    masks = [("diagonal_blocks", 16), *(("pairs", n) for n in (16, 32))]
    for name, at_once in (("kimi_delta_attention", 2), ("gla", 1)):
        page, plain = find(name), products(lowered(find(name), dtype, "", sizes=sizes, upto="decayed_products"))
        found = products(lowered(page, dtype, "g=safe", sizes=sizes, upto="decayed_products"))
        assert found == (plain if dtype == "float16" else (at_once * 3 + 1, masks))
        assert plain == (at_once * 6 + 1, [("pairs", n) for n in (1, 2, 4, 8, 16, 32)])


@algorithm(q="C K", k="C K", v="C V", g="C K", h="C K", S=carried("K V"))
def floored_by_page(q, k, v, g, h, S):
    """Gates that the page bounds, as a sum of two running sums."""
    G = cumsum(valid(maximum(g, -2.0))) + cumsum(valid(maximum(h, -3.0)))
    o = (exp(G) * q) @ S + decayed_product(q, k, G) @ v
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
    return o, S


@pytest.mark.parametrize("block, chunk", [(16, 64), (16, 32), (16, 16)])
def test_the_bound_follows_from_the_page(block, chunk):
    found = products(lowered(floored_by_page, "bfloat16", sizes={"C": chunk, "K": 32, "V": 32}, upto="decayed_products"))
    levels = [n for n in (16, 32) if n < chunk]
    blocks = [("diagonal_blocks", block)] if levels else []
    assert found == (len(levels) + 2, [*blocks, *(("pairs", n) for n in levels)])


@pytest.mark.parametrize("target, name, dtype", every(2, ["triton", "tilelang", "pto"], GATES, ["bfloat16", "float32"]))
def test_after_every_pass_it_is_the_recurrence(name, target, dtype):
    page, seen = find(name), []
    x = given(name, page.trace(), SIZES, STRONG)
    want = expected(name, CASE, x)
    pipelines.observers.append(lambda done, before, p, c: seen.append((done, p)) if p != before else None)
    try:
        lowered(page, dtype, f"{GATES[name]}=floored", target)
    finally:
        pipelines.observers.pop()
    after = [done for done, _ in seen].index("decayed_products")
    for done, p in seen[after:]:
        got = run(p, x)
        assert max(rms_error(got[n], y) for n, y in zip(("o", "final_state"), want, strict=True)) < 1e-9, done


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype, most", [("bfloat16", 8e-3), ("float16", 1e-3)])
def test_rounding_is_that_of_levels(name, dtype, most):
    """Scaled operands are rounded as those of levels are."""
    page = find(name)
    x = given(name, page.trace(), SIZES, STRONG)
    x = {n: y.to(getattr(torch, dtype)) if n not in (GATES[name], "S", "beta") else y for n, y in x.items()}
    want = expected(name, CASE, x)
    errors = {}
    for form in ("", f"{GATES[name]}=floored"):
        got = run(lowered(page, dtype, form), x, exact=False)
        errors[form] = [rms_error(got[n], y) for n, y in zip(("o", "final_state"), want, strict=True)]
    levels, blocks = errors.values()
    assert max(blocks) < most and all(b < 1.25 * a for a, b in zip(levels, blocks, strict=True)), errors


def test_why_float16_keeps_levels(monkeypatch):
    """With blocks of 16 rows operands overflow. With 4 rows small ones lose their digits, which exp(10) makes visible."""
    page, errors = find("gla"), []
    x = given("gla", page.trace(), SIZES, STRONG)
    for limit, size in ((decayed_products.LIMITS["float16"], 1000), (10.0, 1000), (40.0, 1)):
        monkeypatch.setitem(decayed_products.LIMITS, "float16", limit)
        small = {**x, "q": x["q"] / size, "S": 0 * x["S"]}
        got = run(lowered(page, "float16", "g=floored"), small, exact=False)["o"]
        errors.append(rms_error(got, expected("gla", CASE, small)[0]))
    assert errors[0] < 1e-3 and errors[1] > 3 * errors[0] and not errors[2] < 1, errors


def test_sums_of_other_terms_have_no_bound():
    """The sums without the token have to be those of the same gates."""
    @algorithm(q="C K", k="C K", v="C V", g="C K", h="C K", S=carried("K V"))
    def other(q, k, v, g, h, S):
        G, H = cumsum(valid(maximum(g, -5.0))), cumsum(h)
        o = (exp(G + H) * q) @ S + decayed_product(q, k, G, G - valid(maximum(g, -5.0)) + H) @ v
        return o, S

    _, masks = products(lowered(other, "bfloat16", upto="decayed_products"))
    assert masks == [("pairs", n) for n in (1, 2, 4, 8, 16)]


def test_ranges_of_values():
    """Each value that the interpreter finds is in its range."""
    @algorithm(x="C K", y="C", S=carried("K V"))
    def page(x, y, S):
        a, b = maximum(x, -3.0), -maximum(-x, -2.0)
        c = (a + 1.5) * sigmoid(x) - sigmoid(y)[:, None]
        o = valid(c) * -2.0 + exp(b - 1.0) + exp(-sigmoid(x)) - b
        return o, S

    p = replace(page.trace(), dims=(("C", 4), ("K", 4), ("V", 4)))
    found = ranges.ranges(p.walk.ops)
    named = {o.out: (o.kind, found[o.out]) for o in p.walk.ops if o.out}
    assert named["a"][1] == (-3.0, float("inf")) and named["b"][1] == (-float("inf"), 2.0)
    assert [r for kind, r in named.values() if kind == "sigmoid"] == [(0.0, 1.0)] * 2
    assert found["c"] == (-2.5, float("inf"))
    assert ranges.steps(p) == {}


@pytest.mark.parametrize("fill", [f"from_middle:{size} of {n}" for size in (1, 2, 8) for n in ("0/1", "0/2", "1/2")]
                         + ["diagonal_blocks:4 1 0"])
def test_launcher_and_interpreter_fill_a_constant_tile_alike(fill):
    t = Tensor("t", "workspace", "const", "HV", ("C", "C"), fill=fill)
    assert torch.equal(_mask(fill, (16, 16), "float32"), const_tile(t, {"C": 16}).float())
