"""decayed_pairs: what it computes, which builds have it, and where its operands lie."""
from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from gdn_codegen.emit.base import EmitError
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, lower, strictly_lower
from gdn_codegen.ir.core import Kernel, Op
from gdn_codegen.ir.ops import BESIDE, OPS
from gdn_codegen.passes.storage import padded_tiles
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import PLAIN, Contract
from gdn_codegen.targets import find


@algorithm(q="C K", k="C K", e="C K", v="C V", g="C K", S=carried("K V", forgets="g"))
def two_firsts(q, k, e, v, g, S):  # type: ignore[no-untyped-def]
    """Two decayed products with one second operand, and a product that reads it and one of the first ones."""
    G = cumsum(g)
    both = strictly_lower(decayed_product(q, k, G)) + strictly_lower(decayed_product(e, k, G))
    o = (exp(G) * q) @ S + (both + lower(q @ k.T)) @ v
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
    return o, S


def build(page: str, chunk: int = 64, dtype: str = "bfloat16", K: int = 128, arch: str = "sm_90a", accept: str = "") -> Build:
    """A forward pass whose first kernel has what depends on no state."""
    return Build("tilelang", chunk, algorithm=page, dtype=dtype, head_dim_k=K, head_dim_v=K, arch=arch,
                 schedule=varied("operand_walk", arch, v_block=64), contract=Contract.parse(accept) if accept else PLAIN)


def found(b: Build) -> list[Op]:
    """These ops of a build."""
    return [o for k in lowered(b).kernels for o in k.ops if o.kind == "decayed_pairs"]


@pytest.mark.parametrize("exclusive", [False, True])
def test_it_has_the_entries_of_decayed_product_below_the_diagonal(exclusive: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    a, b, g = (torch.randn(12, 5, generator=gen, dtype=torch.float64) for _ in range(3))
    G = -g.abs().cumsum(0)
    sums = (G, G + g.abs()) if exclusive else (G,)
    product, pairs = (OPS[n].evaluate for n in ("decayed_product", "decayed_pairs"))
    assert product and pairs
    want = product({}, a, b, *sums).tril(-1)
    assert want.abs().max() > 0.1 and torch.equal(pairs({"limit": 0.0}, a, b, *sums), want)
    assert pairs({"limit": 0.0}, a.bfloat16(), b.bfloat16(), *sums).dtype == torch.float64


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page, sums", [
    ("kimi_delta_attention", [1, 1]), ("gla", [1]), ("gated_delta_rule_2", [1, 1]), ("rwkv7", [1, 1, 2, 2])])
def test_warps_compute_decayed_products(page: str, sums: list[int]) -> None:
    """With sums of each token or before it. There is no level. GDN-2 has a computed tile."""
    ops = found(build(page))
    assert sorted(len(o.args) - 2 for o in ops) == sums and {o.attr("limit") for o in ops} == {40.0}
    assert not any(o.kind in ("pairs", "halves", "to_middle") for k in lowered(build(page)).kernels for o in k.ops)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("changes, limits", [
    ({"dtype": "float16"}, []), ({"accept": "g=safe"}, [math.inf] * 2), ({"chunk": 32}, []), ({"arch": ""}, [])])
def test_limits_of_exponents(changes: dict[str, str], limits: list[float]) -> None:
    """Gates of -5 or more keep bfloat16 in its range within 16 rows. Device code has chunks of 64 rows, and warp groups. In
    float16 ordinary products take less time."""
    assert [o.attr("limit") for o in found(build("kimi_delta_attention", **changes))] == limits  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("partition", [None, "decay"])
def test_two_products_share_what_scales_their_operands(partition: str | None) -> None:
    """They have one second operand and the same sums. In parts a norm reads k before, and q arrives later."""
    b = build("kimi_delta_attention")
    b = replace(b, schedule=replace(b.plan, partition=partition))
    assert [o.attr(BESIDE) for o in found(b)] == [2, 2]
    assert len(re.findall(r"t\.decayed_pairs\(\(\w+, \w+\), k, G, \(\w+, \w+\), K, limit=40\.0\)", render(b))) == 1
    assert [o.attr(BESIDE) for o in found(build("gla"))] == [None]
    text = render(build("rwkv7"))
    assert text.count("before=W0, limit=40.0)") == 2 and text.count("t.decayed_pairs((") == 4


@pytest.mark.parametrize("gates", ["raw", "safe"])
def test_norms_scale_the_products(gates: str) -> None:
    """These read rows as callers give them, together."""
    b = build("kimi_delta_attention", K=64, accept=f"g={gates},beta=sigmoid,q=l2norm,k=l2norm")
    given = {o.out for k in lowered(b).kernels for o in k.ops if o.kind == "load" and o.attr("tensor") in ("q", "k")}
    assert [o.attr(BESIDE) for o in found(b)] == [2, 2] and all(set(o.args[:2]) <= given for o in found(b))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", ["kimi_delta_attention", "gla", "rwkv7", f"{__file__}:two_firsts"])
@pytest.mark.parametrize("K", [64, 128])
def test_operands_lie_as_device_code_expects(page: str, K: int) -> None:
    """Tiles in rows with padding, or swizzled; sums in rows that begin in different banks. Two blocks share a multiprocessor if
    they have 256 threads."""
    assert found(build(page, K=K))
    for k in lowered(build(page, K=K)).kernels:
        home, buffers = {o.out: o.buffer for o in k.ops}, {b.name: b for b in k.buffers}
        for a, b, *sums in (o.args for o in k.ops if o.kind == "decayed_pairs"):
            assert all(buffers[home[x]].pad or buffers[home[x]].layout == "swizzled" for x in (a, b))
            assert len({buffers[home[x]].pad for x in sums}) == 1 and buffers[home[sums[0]]].pad == 8
            assert k.threads % 128 == 0 and (k.threads != 256 or k.blocks_per_sm == 2)
        together = [buffers[home[o.args[0]]] for o in k.ops if o.kind == "decayed_pairs" and o.attr(BESIDE)]
        assert len({(b.pad, b.layout) for b in together}) <= 1


@pytest.mark.usefixtures("unchecked")
def test_first_operands_of_one_call_lie_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product reads q as a whole, and none reads e. With other rows than device code expects it reads wrong numbers: GDN-2 did
    so once, with a computed tile, and its self-check refused it."""
    b = build(f"{__file__}:two_firsts")
    assert [o.attr(BESIDE) for o in found(b)] == [2, 2] and "t.decayed_pairs((" in render(b)
    monkeypatch.setattr(padded_tiles, "BESIDE", "nothing")
    lowered.cache_clear()
    with pytest.raises(EmitError, match=r"beside another one, and their tiles have shapes and padding .*accepted: equal ones"):
        render(b)
    lowered.cache_clear()


@pytest.mark.usefixtures("unchecked")
def test_other_tiles_are_refused() -> None:
    p = lowered(build("gla"))
    def narrow(k: Kernel) -> Kernel:
        sums = {o.args[2] for o in k.ops if o.kind == "decayed_pairs"}
        home = {o.buffer for o in k.ops if o.out in sums}
        return replace(k, buffers=tuple(replace(b, dtype="bfloat16") if b.name in home else b for b in k.buffers))
    with pytest.raises(EmitError, match=r"decayed_pairs .* has 128 threads, and tiles .*accepted: .* one dtype of 16 bits"):
        find("tilelang").emit(p.map_kernels(narrow), "bthd", 0)
