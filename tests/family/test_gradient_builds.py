"""Which builds a gradient takes: the largest chunk that fits, another target where one has none, and never a refused one."""
from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from choices import a_call
from problems import Problem

from gdn_codegen.algorithms import names
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, row_norm, strictly_lower, unit_lower_inverse
from gdn_codegen.runtime.admit import Refused
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import choose, gradient_builds
from gdn_codegen.runtime.call.device import gpu
from gdn_codegen.runtime.call.gradient_builds import asked_of, builds_for, candidates, modules_for
from gdn_codegen.runtime.call.request import Call
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN

pytestmark = pytest.mark.skipif(not runs("triton", "cpu"), reason="Triton does not run here")


PAGE = "gated_delta_rule"


def call(dims: tuple[int, int] = (32, 32), **asked: Any) -> Call:
    return a_call(Extent(1, 2, 1, 64), torch.bfloat16, dims=dims, **asked)


@pytest.fixture(autouse=True)
def anew() -> Any:
    """Nothing is kept from before or for later."""
    gradient_builds._fitting.cache_clear()
    before = dict(choose._refused)
    yield
    choose._refused.clear()
    choose._refused.update(before)
    gradient_builds._fitting.cache_clear()


def without(monkeypatch: pytest.MonkeyPatch, against: Any) -> None:
    """Builds for which `against` is true do not fit."""
    monkeypatch.setattr(gradient_builds, "unfit", lambda b: "too large" if against(b) else "")


@pytest.mark.parametrize("asked, chunk", [({}, 64), ({"chunk_size": 32}, 32), ({"chunk_size": 128}, 128), ({"decode": True}, 16)])
def test_the_chunk_of_the_call(asked: dict[str, Any], chunk: int) -> None:
    b = builds_for(PAGE, call(target="triton", **asked))
    assert (b.states.chunk, b.gradient.chunk, b.states.dtype) == (chunk, chunk, "bfloat16")
    assert (b.states.algorithm, b.gradient.algorithm) == ("gated_delta_rule.states", "gated_delta_rule.gradient")


def test_a_smaller_chunk_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both builds have one chunk, also where only one of them does not fit."""
    without(monkeypatch, lambda b: b.chunk > 32 and b.algorithm.endswith("gradient"))
    b = builds_for(PAGE, call(target="triton"))
    assert b.states.chunk == b.gradient.chunk == 32


def test_another_target_where_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first = builds_for(PAGE, call()).gradient.target
    gradient_builds._fitting.cache_clear()
    without(monkeypatch, lambda b: b.target == first)
    others = [t for t in OWN if t != first and runs(t, "cpu")]
    if others:
        assert builds_for(PAGE, call()).gradient.target in others
    with pytest.raises(ValueError, match=rf"target: got '{first}'; accepted: .*K = 32, V = 32 in bfloat16 \(too large\)"):
        builds_for(PAGE, call(target=first))


@pytest.mark.slow
@pytest.mark.parametrize("dims, states", [((256, 128), "fused_walk"), ((128, 256), "walk")])
def test_sizes_that_one_kernel_does_not_take(dims: tuple[int, int], states: str) -> None:
    b = builds_for(PAGE, call(dims, target="triton"))
    assert (b.gradient.plan.name, b.gradient.chunk, b.states.plan.name) == ("gradient", 64, states)


@pytest.mark.slow
@pytest.mark.parametrize("target, page", [
    ("triton", "gated_delta_rule"), ("triton", "simple_gla"), ("tilelang", "simple_gla"),
    *(pytest.param(*x, marks=pytest.mark.long) for x in (("triton", "kimi_delta_attention"), ("tilelang", "gated_delta_rule"),
                                                         ("tilelang", "kimi_delta_attention")))])
def test_the_widest_state_has_a_gradient_on_a_gpu(target: str, page: str) -> None:
    """Kernels over chunks hold a quarter of the columns of the states at a time, so that they fit."""
    b = asked_of(Build(target, algorithm=page, dtype="bfloat16", head_dim_k=256, head_dim_v=256), True)
    found = next(x for x in candidates(b, "cuda", "sm_90a", 32) if not any(map(choose.unfit, x.all)))
    assert page != "gated_delta_rule" or any(o.attr("piece") for k in lowered(found.gradient).kernels for o in k.ops)


@pytest.mark.slow
def test_builds_that_take_minutes_to_compile_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels in pieces, on a GPU. The caller may name their target. It serves where no other does, too."""
    monkeypatch.setattr(gradient_builds, "choose", lambda device, target: target)
    monkeypatch.setattr(gradient_builds, "runs", lambda target, device: target in ("triton", "tilelang"))

    def chosen(size: int, asked: str = "auto") -> str:
        b = asked_of(Build("triton", algorithm=PAGE, dtype="bfloat16", head_dim_k=size, head_dim_v=size), True)
        gradient_builds._fitting.cache_clear()
        found = gradient_builds._fitting(b, asked, gpu("", "sm_90", 132), 32, torch.device("cuda"), (0,) * 3, False, False)
        return found.gradient.target
    assert (chosen(128), chosen(256), chosen(256, "tilelang")) == ("tilelang", "triton", "tilelang")
    monkeypatch.setattr(gradient_builds, "unfit", lambda b: "too large" if b.target == "triton" else choose.unfit(b))
    assert chosen(256) == "tilelang"


@pytest.mark.slow
@pytest.mark.parametrize("page, dims, piece", [
    pytest.param(n, dims, piece, marks=() if (n, dims) == ("gated_delta_rule", (256, 256)) else pytest.mark.long)
    for n in names() for dims, piece in (((256, 256), 64), ((252, 252), 64), ((256, 200), 16))])
def test_wide_states_have_gradients_on_an_npu(page: str, dims: tuple[int, int], piece: int) -> None:
    """Kernels over chunks hold some columns of V of each state at a time. Pieces divide the tiles, which may have padding."""
    b = asked_of(Build("pto", algorithm=page, dtype="bfloat16", head_dim_k=dims[0], head_dim_v=dims[1]), True)
    found = next(x for x in candidates(b, "npu", "", 64) if not any(map(choose.unfit, x.all)))
    assert found.gradient.plan.v_piece == piece and found.gradient.chunk >= (16 if page == "rwkv7" else 32)  # it has most tiles


@pytest.mark.long
@pytest.mark.parametrize("target, page, dtype, size", [
    ("tilelang", "rwkv7", "bfloat16", 256), ("tilelang", "gated_delta_product", "bfloat16", 256),
    ("tilelang", "kimi_delta_attention", "float32", 252), ("triton", "gated_delta_rule", "float32", 132),
    ("triton", "gated_delta_product", "bfloat16", 256)])
def test_wide_states_for_which_other_plans_do_not_fit(target: str, page: str, dtype: str, size: int) -> None:
    """More kernels, a walk without solutions that no state needs, and pieces of tiles with padding come after all other plans."""
    b = asked_of(Build(target, algorithm=page, dtype=dtype, head_dim_k=size, head_dim_v=size), True)
    assert any(not any(map(choose.unfit, x.all)) for x in candidates(b, "cuda", "sm_90a", 64))


@pytest.mark.parametrize("target, page, dims, limit", [
    pytest.param("tilelang", "rwkv7", (144, 240), "shared of hopper has 232448 bytes", marks=pytest.mark.slow),
    pytest.param("pto", "rwkv7", (256, 132), "UB has 188416 bytes", marks=pytest.mark.long)])
def test_sizes_for_which_nothing_fits(target: str, page: str, dims: tuple[int, int], limit: str) -> None:
    """The error has the limit of the smallest chunk."""
    if runs(target, "cpu"):
        said = "K = {}, V = {} in float32".format(*dims)
        with pytest.raises(ValueError, match=rf"{said} \(.*{limit}.*\), or smaller K or V"):
            builds_for(page, a_call(Extent(1, 2, 1, 64), torch.float32, dims=dims, target=target, chunk_size=16))


def test_a_refused_build_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(b: Build, *rest: Any) -> None:
        if b.chunk > 16:
            raise Refused(f"{b.name} gives wrong results")
    monkeypatch.setattr(gradient_builds, "admit", admit)
    with pytest.warns(RuntimeWarning, match="Gradients take another build"):
        before, back = modules_for(PAGE, call(target="triton", chunk_size=32))
    assert before.HOST.tables.chunk == back.HOST.tables.chunk == 16


def test_states_of_another_chunk_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (32, 16):
        gradient_builds._fitting.cache_clear()
        without(monkeypatch, lambda b, most=most: b.chunk > most)
        p = Problem("gated_delta_rule", "triton", (37, 5), dtype=torch.float32)
        q = p.x["q"].clone().requires_grad_()
        p.call({"q": q}, chunk_size=32, save="states")[0].square().sum().backward()
        found.append(q.grad)
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm() and not torch.equal(*found)


RAW = (("beta", "sigmoid"), ("g", "raw"), ("k", "l2norm"), ("q", "l2norm"))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page, forms, schedule", [
    ("gated_delta_rule", (), "fused_gradient"), ("gated_delta_rule", RAW, "fused_gradient"), ("gla", (), "channel_gradient"),
    ("lightning_attention", (), "fused_gradient"),
    pytest.param("kimi_delta_attention", RAW, "channel_gradient", marks=pytest.mark.slow)])
def test_builds_of_a_hopper(page: str, forms: tuple[tuple[str, str], ...], schedule: str) -> None:
    """With as many value heads as key heads no sum follows, so that the gradients of q and k have their dtype. Both builds have
    the states before chunks in one orientation, in 16 bits. A walk back on warp groups sums no rows and multiplies no tiles that
    do not depend on a state, so another kernel does."""
    contract = Contract(inputs=forms, dtypes=(("d_k", "bfloat16"), ("d_q", "bfloat16")))
    b = Build("tilelang", algorithm=page, dtype="bfloat16", contract=contract)
    found = next(x for x in gradient_builds.candidates(b, "cuda", "sm_90a", 64)
                 if not (choose.unfit(x.states) or choose.unfit(x.gradient) or gradient_builds._apart(x)))
    assert (found.gradient.chunk, found.gradient.arch, found.gradient.plan.name) == (64, "sm_90a", schedule)
    of = {t.name: t.dtype for x in (found.states, found.gradient) for t in lowered(x).tensors}
    assert of["S_chunks_vk"] == of["d_q"] == of["d_k"] == "bfloat16"


@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V", forgets="g"))
def normed(q, k, v, g, beta, S):  # type: ignore[no-untyped-def]
    """Gated DeltaNet that divides keys by their norms itself."""
    n, G = row_norm(k), cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-inf))
    T = unit_lower_inverse(strictly_lower(beta[:, None] * (n @ n.T) * D))
    U = T @ (beta[:, None] * (v - exp(G)[:, None] * (n @ S)))
    o = exp(G)[:, None] * (q @ S) + ((q @ n.T) * D) @ U
    S = exp(last(G)) * S + n.T @ (exp(last(G) - G)[:, None] * U)
    return o, S


@pytest.mark.usefixtures("unchecked")
def test_a_page_that_divides_rows_by_their_norms_itself_takes_operand_gradient() -> None:
    """On Hopper's warp groups, which sum no rows that depend on no state: a kernel before the walk back computes its operands."""
    b = asked_of(Build("tilelang", algorithm=f"{__file__}:normed", dtype="bfloat16"), True)
    found = next(x for x in candidates(b, "cuda", "sm_90a", 64) if not any(map(choose.unfit, x.all)))
    assert (found.gradient.plan.name, found.gradient.arch) == ("operand_gradient", "sm_90a")


def test_rows_measured_with_gates_in_float32_serve_gates_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tune --backward` measures these alone. The build reads the caller's gates."""
    asked: list[Contract] = []

    def row(b: Build) -> Any:
        return SimpleNamespace(about=replace(b, schedule="fused"), ms=1.0, far=lambda shape_class: 0,
                               serves=lambda x, contract: asked.append(contract) or x.algorithm == b.algorithm)
    b = asked_of(Build("triton", algorithm="gla", dtype="bfloat16", contract=Contract(dtypes=(("g", "bfloat16"),))), True)
    monkeypatch.setattr(gradient_builds.tables, "rows", lambda *about: [row(x) for x in gradient_builds.undecided(b, True).all])
    (found,) = gradient_builds.measured(b, ("a GPU",), (0, 0, 0), 64)
    assert not any({"g", "d_g"} & dict(c.dtypes).keys() for c in asked)
    assert all(dict(x.contract.dtypes)["g"] == "bfloat16" for x in found.all)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_16_bits_are_read_and_given_as_they_are() -> None:
    """So no cast runs beside the kernels. On cores the host casts: a vector of a short chunk is less than a copy there. It also
    does for heads with one gate, whose walks read numbers themselves."""
    contract = Contract(inputs=(("beta", "sigmoid"),), dtypes=(("beta", "bfloat16"),))
    for target, page in product(OWN, ("kimi_delta_attention", "gated_delta_rule")):
        b = asked_of(Build(target, algorithm=page, dtype="bfloat16", contract=contract), True)
        found = candidates(b, "npu" if target == "pto" else "cuda", "", 16)
        p = lowered(next(x for x in found if not any(map(choose.unfit, x.all))).gradient)
        wanted = "float32" if target == "pto" or page == "gated_delta_rule" else "bfloat16"
        assert (p.tensor("beta").dtype, p.tensor("d_beta").dtype) == (wanted, wanted), (target, page)


@pytest.mark.parametrize("page", names())
def test_each_page_has_candidates_for_each_device(page: str) -> None:
    """Several Householder steps a token give several solutions, whose names may come in any order."""
    for target, device, arch in ((t, *x) for t in OWN for x in (("cuda", "sm_90a"), ("cuda", ""), ("cpu", ""), ("npu", ""))):
        b = asked_of(Build(target, algorithm=page, dtype="bfloat16"), True)
        assert all(x.gradient.algorithm.startswith(f"{page}.") for x in candidates(b, device, arch, 64)), target


@pytest.mark.usefixtures("unchecked")
def test_a_gradient_reads_solutions_unless_the_call_saved_its_states() -> None:
    """On Hopper's warp groups the walk of the states stores what solves the system of each chunk, and its inverse, in 16 bits.
    The kernel before the walk back then reads gates alone. A page without an inverse has no such builds, and pages with a gate
    for each channel read operands, too (tests/passes/test_stored_operands.py)."""
    b = gradient_builds.asked_of(Build("tilelang", algorithm="gated_delta_rule", dtype="bfloat16"), True)
    first = next(gradient_builds.candidates(b, "cuda", "sm_90a", 64))
    assert (first.states.algorithm, first.gradient.algorithm) == (
        "gated_delta_rule.inverse_states", "gated_delta_rule.inverse_gradient")
    assert not choose.unfit(first.states) and not choose.unfit(first.gradient) and not gradient_builds._apart(first)
    p = lowered(first.gradient)
    assert p.tensor("U_chunks_vk").dtype == p.tensor("Tinv_below_chunks").dtype == "bfloat16"
    assert {o.attr("tensor") for o in p.kernels[0].ops if o.kind == "load"} == {"g"}
    saved = next(gradient_builds.candidates(b, "cuda", "sm_90a", 64, saved=True))
    assert saved.gradient.algorithm == "gated_delta_rule.gradient"
    other = next(gradient_builds.candidates(replace(b, algorithm="simple_gla"), "cuda", "sm_90a", 64))
    assert other.gradient.algorithm == "simple_gla.gradient"
    channels = gradient_builds.candidates(replace(b, algorithm="kimi_delta_attention"), "cuda", "sm_90a", 64)
    assert {x.gradient.algorithm.rpartition(".")[2] for x in channels if x.gradient.plan.name == "channel_gradient"} == {
        "stored_gradient", "gradient"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, chunk", [("tilelang", 64), ("triton", 32)])
def test_few_walks_come_in_parts_with_a_gate_for_each_channel(target: str, chunk: int) -> None:
    """Not where the bits may depend on the sequence alone, nor of a page that bounds no token's factor, nor back from saved
    states, where the kernel over chunks computes the operands again."""
    def partition(page: str, **more: bool) -> tuple[str | None, str | None]:
        b = gradient_builds.asked_of(Build(target, algorithm=page, dtype="bfloat16"), True)
        x = next(x for x in gradient_builds.candidates(b, "cuda", "sm_90a", 64, **more) if x.gradient.chunk == chunk)
        return x.states.plan.partition, x.gradient.plan.partition
    assert partition("kimi_delta_attention", few=True) == partition("gla", few=True) == ("decay", "decay")
    assert partition("kimi_delta_attention") == partition("kimi_delta_attention", few=True, in_parts=False) == (None, None)
    assert partition("kimi_delta_attention", few=True, saved=True)[1] is partition("rwkv7", few=True)[1] is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, tokens, heads, split", [
    ("tilelang", 1448, 2, False), ("tilelang", 1449, 2, True), ("tilelang", 4096, 22, True), ("tilelang", 4096, 23, False),
    ("triton", 300, 2, True), ("triton", 4096, 64, True), ("triton", 4096, 128, False)])
def test_which_walks_are_few(target: str, tokens: int, heads: int, split: bool) -> None:
    """By classes of walks and tokens (Splits.channels), and on Triton by the multiprocessors, here 132."""
    b = gradient_builds.asked_of(Build(target, algorithm="kimi_delta_attention", dtype="bfloat16"), True)
    on = gpu("", "sm_90", 132)
    found = gradient_builds._fitting(b, target, on, 64, torch.device("cuda"), Extent(heads, heads, 1, tokens).shape_class, True,
                                     False)
    assert bool(found.gradient.plan.partition) == split


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page, schedule, chunk", [("gla", "channel_gradient", 32), ("simple_gla", "gradient", 64)])
def test_builds_of_triton_on_a_gpu(page: str, schedule: str, chunk: int) -> None:
    """A gate for each channel has the schedule for that, in the chunks with which its kernels have room in registers."""
    b = Build("triton", algorithm=page, dtype="bfloat16")
    x = next(x for x in gradient_builds.candidates(b, "cuda", "sm_90", 64) if not any(map(choose.unfit, x.all)))
    assert (x.gradient.plan.name, x.gradient.chunk, x.states.chunk) == (schedule, chunk, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("target, arch", [("tilelang", "sm_90a"), pytest.param("tilelang", "", marks=pytest.mark.long),
                                          pytest.param("triton", "", marks=pytest.mark.long)])
def test_walks_come_in_parts(target: str, arch: str) -> None:
    """Where the page bounds what tokens forget, by a number. Not where the bits of a sequence may depend on
    that sequence alone."""
    def first(page: str, in_parts: bool = True) -> list[str | None]:
        b = Build(target, algorithm=page, dtype="bfloat16")
        found = next(x for x in gradient_builds.candidates(b, "cuda", arch, 64, in_parts)
                     if not (choose.unfit(x.gradient) or choose.unfit(x.states) or gradient_builds._apart(x)))
        return [found.states.plan.partition, found.gradient.plan.partition]
    assert first("gated_delta_rule") == ["decay", "decay"]
    assert first("gated_delta_rule", in_parts=False) == [None, None] and first("rwkv7") == [None, None]
    assert first("kimi_delta_attention") == [None, None]


def test_a_batch_invariant_call_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    of = gradient_builds.candidates
    monkeypatch.setattr(gradient_builds, "candidates", lambda *x: (seen.append(x[4]), of(*x))[1])
    for wanted in (False, True):
        builds_for(PAGE, call(target="triton", batch_invariant=wanted))
    assert seen == [True, False]


def test_states_of_another_orientation_are_passed_over() -> None:
    b = Build("triton", 64, algorithm="gla.gradient", schedule="gradient")
    apart = gradient_builds.Builds(replace(b, algorithm="gla.states", schedule="fused"), b)
    assert gradient_builds._apart(apart) == "schedule fused stores S_chunks, not S_chunks_vk"
    assert not gradient_builds._apart(replace(apart, states=replace(b, algorithm="gla.states", schedule="fused_walk")))
