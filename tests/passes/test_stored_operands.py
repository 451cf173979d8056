"""Values of a chunk that the module of the states stores for a gradient, so that this does not compute them again."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gdn_codegen.derived_pages import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last
from gdn_codegen.ir.core import Kernel, Op, Program
from gdn_codegen.ir.stored import operands, stored, wide
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.algebra import decayed_products
from gdn_codegen.passes.cut.kernels import cut
from gdn_codegen.passes.storage.live_bytes import two_fit
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.gradient_builds import Builds, _apart, asked_of, candidates
from gdn_codegen.schedule import Schedule, ScheduleError
from gdn_codegen.schedule.contract import PLAIN, Contract

CHANNELS = ("kimi_delta_attention", "gla", "gated_delta_rule_2", "rwkv7")


def builds(page: str, accept: str = "", K: int = 128, dtype: str = "bfloat16", target: str = "tilelang", few: bool = False
           ) -> Builds:
    """What a call on a Hopper GPU gets."""
    b = Build(target, algorithm=page, dtype=dtype, head_dim_k=K, head_dim_v=K,
              contract=Contract.parse(accept) if accept else PLAIN)
    return next(x for x in candidates(asked_of(b, True), "cuda", "sm_90a", 64, few=few) if not any(map(unfit, x.all)))


def count(k: Kernel, kind: str) -> int:
    return sum(o.kind == kind for o in k.ops)


def loads(k: Kernel) -> set[str]:
    return {str(o.attr("tensor")) for o in k.ops if o.kind == "load"}


def test_what_is_stored() -> None:
    """Operands of products, running sums, decayed products, vectors that scale what depends on a state. Of what is read below its
    diagonal alone, that part."""
    assert stored(find("kimi_delta_attention").trace(), "operands") == {
        **{n: n for n in ("U", "G", "exp_G_k", "exp_G_q", "operand_of_o", "chunk_decay", "k_decay_to_end")},
        "Tinv": "Tinv_below", "A_decayed_product": "A_decayed_product_below"}
    assert stored(find("gated_delta_rule").trace(), "operands") == {
        **{n: n for n in ("U", "G", "exp_G", "q_kT_D", "decay_to_end")}, "Tinv": "Tinv_below"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", CHANNELS)
def test_gradients_of_channels_read_operands(page: str) -> None:
    """The kernel before the walk back has products with d_o alone, and no kernel has an inverse or a running sum of gates. The
    states' module has the only kernel that computes them. What it stores for the gradient serves its own walk, too."""
    x = builds(page)
    assert x.states and str(x.gradient.algorithm) == f"{page}.stored_gradient" and not _apart(x)
    before, back = lowered(x.states), lowered(x.gradient)
    first = back.kernels[0]
    assert not count(first, "exp") and count(first, "matmul") == (2 if page == "rwkv7" else 1)
    assert not any(o.kind == "diag_inverse" for k in back.kernels for o in k.ops)
    read, made = stored(find(page).trace(), "operands"), {o.out for k in back.kernels for o in k.ops if o.kind != "load"}
    assert not made & set(read)
    assert not {f"{n}_ws" for x in read.items() for n in x} & {t.name for t in (*before.tensors, *back.tensors)}
    stores = {str(o.attr("tensor")) for o in before.kernels[0].ops if o.kind == "store"}
    assert {"chunk_decay_chunks"} <= loads(before.kernels[-1]) & stores <= {"beta_ws", *(f"{n}_chunks" for n in read.values())}
    exponents = {t.name: t.dtype for t in back.role("input") if t.name in ("G_chunks", "W_chunks", "chunk_decay_chunks")}
    assert len(exponents) == 2 and set(exponents.values()) == {"float32"}


@pytest.mark.usefixtures("unchecked")
def test_one_product_of_a_level_gives_both_decayed_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the forward pass, though no product of the states' program reads the scores: what is stored for products is rounded
    as their operands are. So where warps do not compute them."""
    x = builds("kimi_delta_attention")
    assert x.states
    assert not count(lowered(x.states).kernels[0], "halves")
    monkeypatch.setattr(decayed_products, "by_op", lambda *args: (0, None))
    lowered.cache_clear()
    first = lowered(x.states).kernels[0]
    lowered.cache_clear()
    assert count(first, "halves") == count(first, "pairs") == 6 and count(first, "matmul") == 8


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("accept, dtype, least, limit", [
    ("g=floored", "bfloat16", -5.0, math.inf), ("g=safe", "bfloat16", -5.0, math.inf), ("g=safe", "float16", -5.0, None),
    ("", "bfloat16", -math.inf, 40.0)])
def test_stored_sums_keep_the_bound_of_their_gates(accept: str, dtype: str, least: float, limit: float | None) -> None:
    """So one product serves diagonal blocks of 16 rows in the gradient, as in the forward pass, without a look at the gates. In
    float16 there are levels."""
    p = lowered(builds("kimi_delta_attention", accept, dtype=dtype, target="triton").gradient)
    assert p.tensor("G_chunks").least_step == least
    levels = [k for k in p.kernels if count(k, "to_middle")]
    assert len(levels) == 2
    for k in levels:
        blocks = [(o.attr("size"), o.attr("limit")) for o in k.ops if o.kind == "decayed_blocks"]
        assert blocks == ([] if limit is None else [(16, limit)] * 2)
        assert min(o.attr("size") for o in k.ops if o.kind == "pairs") == (1 if limit is None else 16)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page, dtype, limit", [
    ("kimi_delta_attention", "bfloat16", 40.0), ("kimi_delta_attention", "float16", 0.0), ("gla", "bfloat16", 40.0),
    ("gated_delta_rule_2", "bfloat16", 40.0), ("rwkv7", "bfloat16", 40.0), (f"{__file__}:scaled_rows", "bfloat16", 40.0)])
def test_warps_compute_decayed_products(page: str, dtype: str, limit: float) -> None:
    """All levels of derivatives by loaded tiles and by computed ones."""
    kernels = lowered(builds(page, dtype=dtype).gradient).kernels
    blocks = [o for k in kernels for o in k.ops if o.kind == "decayed_blocks"]
    assert {(o.attr("size"), o.attr("limit")) for o in blocks} == {(64, limit)}
    assert {o.attr("transposed", False) for o in blocks} == {False, True}
    if page == "kimi_delta_attention":
        both = [k for k in kernels if count(k, "decayed_blocks")]
        assert len(both) == 2 and not any(count(k, "pairs") for k in kernels)
        assert all(k.threads == 256 and two_fit(k, SM_90A) for k in both)


@pytest.mark.usefixtures("unchecked")
def test_products_of_the_walk_back_accumulate() -> None:
    """A scaled copy of d_o is an operand, so that no product has a number before it, and x + L x is a product onto x."""
    walk = lowered(builds("kimi_delta_attention").gradient).kernels[1]
    assert count(walk, "matmul") == 4 and not count(walk, "add")
    assert sum(len(o.args) == 3 for o in walk.ops if o.kind == "matmul") == 4
    assert "scale_d_o_ws" in loads(walk)


@pytest.mark.usefixtures("unchecked")
def test_elementwise_forms_have_no_kernel() -> None:
    """A bound of g is in the kernel over chunks, and its derivative in that of d_g. A norm has a kernel of its own."""
    x = builds("kimi_delta_attention", "g=floored")
    assert x.states and len(lowered(x.states).kernels) == 2
    last = lowered(x.gradient).kernels[-1]
    assert "g" in loads(last) and {"d_k", "d_g"} <= {str(o.attr("tensor")) for o in last.ops if o.kind == "store"}
    layer = builds("kimi_delta_attention", "beta=sigmoid,g=raw,k=l2norm,q=l2norm").states
    assert layer
    assert [("g" in loads(k), "k" in loads(k)) for k in lowered(layer).kernels[:-1]] == [(False, True), (True, False)]


@pytest.mark.usefixtures("unchecked")
def test_converted_inputs_are_stored() -> None:
    """Rows after their norm in 16 bits, and numbers a token in float32. The gradient reads raw gates for their derivative alone,
    in the kernel that computes their cotangent, and beta in that of its own. Derivatives of norms have kernels of their own,
    which read what is stored, and no row of the caller's."""
    x = builds("kimi_delta_attention", "beta=sigmoid,g=raw,k=l2norm,q=l2norm")
    assert x.states
    dtypes = {t.name: t.dtype for t in lowered(x.states).role("output")}
    assert dtypes["q_chunks"] == dtypes["k_chunks"] == "bfloat16" and dtypes["beta_chunks"] == "float32"
    assert "g_chunks" not in dtypes
    kernels = lowered(x.gradient).kernels
    assert [loads(k) & {"g", "rq_chunks", "rk_chunks"} for k in kernels] == [set()] * (len(kernels) - 3) + [
        {"g"}, {"rq_chunks"}, {"rk_chunks"}]
    assert not any({"q", "k"} & loads(k) for k in kernels) and "beta" in loads(kernels[-4])


@algorithm(q="C K", k="C K", v="C V", g="C K", x="C K", S=carried("K V", forgets="g"))
def scaled_rows(q, k, v, g, x, S):  # type: ignore[no-untyped-def]
    """The second tile of the decayed product is computed."""
    G = cumsum(g)
    o = (exp(G) * q) @ S + decayed_product(x * q, x * k, G) @ v
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
    return o, S


@algorithm(q="C K", k="C K", v="C V", g="C K", S=carried("K V", forgets="g"))
def ones_beyond(q, k, v, g, S):  # type: ignore[no-untyped-def]
    """exp(G), an operand, is 1 in columns beyond the caller's."""
    G = cumsum(g)
    o = exp(G) @ S + decayed_product(q, k, G) @ v
    S = exp(last(G))[:, None] * S + k.T @ v
    return o, S


def test_tiles_that_are_not_zero_beyond_the_callers_are_not_stored() -> None:
    """Readers assume that they are. What stays in float32 is an exponent or a vector, of which they assume nothing."""
    assert operands(ones_beyond.trace()) == ["G", "operand_of_o", "chunk_decay"]


@algorithm(q="C K", k="C K", v="C V", g="HV C K", beta="C", x="C K", a="HV K", S=carried("K V", forgets="g"))
def of_others(q, k, v, g, beta, x, a, S):  # type: ignore[no-untyped-def]
    """An operand with the dim V, an exponent that is no running sum and an operand as well, and a vector of the head."""
    G = cumsum(g)
    H = G + x
    u = beta[:, None] * v
    s = exp(a)
    o = (exp(H) * q) @ S + H @ S + (s[None, :] * x) @ S + decayed_product(q, k, G) @ u
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ u
    return o, S


def test_exponents_stay_in_float32_and_what_depends_on_no_token_is_not_stored() -> None:
    p = of_others.trace()
    assert {"G", "H", "u"} <= set(operands(p)) and not {"s", "a"} & set(operands(p))
    assert {"G", "H"} <= wide(p) and "u" not in wide(p)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, gpu", [("tilelang", "sm_90a"), ("triton", "sm_90")])
def test_operands_with_the_dim_V_lie_as_the_gradient_reads_them(target: str, gpu: str) -> None:
    """The kernel over chunks before the walk stores them. Of KDA, v divided by its norms."""
    contract = Contract.parse("v=l2norm")
    b = asked_of(Build(target, algorithm="kimi_delta_attention", dtype="bfloat16", contract=contract), True)
    x = next(x for x in candidates(b, "cuda", gpu, 64) if not any(map(unfit, x.all)))
    assert x.states and not _apart(x)
    p = lowered(x.states)
    assert p.tensor("v_chunks_vk").dims == ("V", "C") and "v_chunks_vk" in loads(p.kernels[-1])


@pytest.mark.parametrize("page", ["kimi_delta_attention", "gla", "gated_delta_rule_2"])
@pytest.mark.parametrize("few", [False, True])
def test_only_parts_read_gates_beside_their_stored_sums(few: bool, page: str) -> None:
    """A bound on what tokens forget follows from the gates. Nothing else of the gradient depends on them. Where products lead
    from channel to channel, on Hopper the states' module stores a bound for each token."""
    for target in ("tilelang", "triton"):
        x = builds(page, few=few, target=target)
        stores = few and page != "gla" and target == "tilelang"
        kernels = {k.name for k in lowered(x.gradient).kernels if "g" in loads(k)}
        assert len(kernels) == (few and not stores) and bool(x.gradient.plan.partition) == few
        assert stores == ("F_of_tokens_chunks" in {t.name for t in lowered(x.gradient).role("input")})


def test_an_output_of_chunks_is_read_after_it_was_written() -> None:
    """Another output never is."""
    plan = Schedule("own", (("@gate_sum", "@operand", "@stateless"), ("@output", "@state")))
    p = verify(cut(find("simple_gla.stored_states").trace(), plan, {"C": 16, "K": 16, "V": 16}))
    assert loads(p.kernels[1]) == {"initial_state", "k", "G_chunks", "v_decay_to_end_chunks"}
    with pytest.raises(VerifyError, match="loads G_chunks before any kernel wrote it"):
        verify(replace(p, kernels=p.kernels[::-1]))
    def wrong(q: Program) -> Program:
        walk = q.kernels[1]
        return replace(q, kernels=(q.kernels[0], replace(walk, body=tuple(
            replace(lp, body=(Op("load", "x", (), (("tensor", "final_state"),), q.tensor("final_state").tile), *lp.body))
            if hasattr(lp, "body") else lp for lp in walk.body))))
    with pytest.raises(VerifyError, match="loads the output final_state"):
        verify(wrong(p))


def test_a_role_with_a_plus_stands_alone() -> None:
    with pytest.raises(ScheduleError, match=r"@output\+, which is no role"):
        Schedule("own", (("@gate_sum", "@output+"), ("@state",)))
