"""The self-check of modules of derived pages: it accepts what is right and refuses what is broken."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import module

from gdn_codegen.algorithms import names
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import PLAIN, Contract
from gdn_codegen.targets import OWN

#: One of each kind: gates of tokens and of channels, numbers of heads, several steps a token.
ONES = ("gated_delta_rule", "kimi_delta_attention", "mamba2", "gated_delta_product")
SMALL: dict[str, Any] = {"chunk": 16, "head_dim_k": 16, "head_dim_v": 32}


def found(text: str) -> dict[str, tuple[float, float]]:
    """What the check of a module says on the CPU: (error, accepted error) by output."""
    return module(text).check.errors(torch.device("cpu"))  # type: ignore[no-any-return]


def passes(target: str, **options: Any) -> dict[str, tuple[float, float]]:
    """`found`, of which all must be right. No error of an output is 0, so that something was compared."""
    errors = found(render(Build(target, **{**SMALL, **options})))
    off = {n: e for n, e in errors.items() if not n.startswith("memory beside")}
    assert all(e <= accepted for e, accepted in errors.values()), errors
    assert all(0 < e for e, _ in off.values()), errors
    return off


@pytest.mark.parametrize("kind", ["saving", "states", "gradient", "solved_states", "solved_gradient", "inverse_states",
                                  "inverse_gradient", "stored_states", "stored_gradient"])
def test_what_derived_pages_compute_is_compared(kind: str) -> None:
    """What is stored of chunks also has fewer columns than its tiles, and fewer rows in a last chunk."""
    dims = {"head_dim_v": 36} if kind.startswith(("solved", "inverse", "stored")) else {"head_dim_v": 16}
    off = set(passes("triton", algorithm=f"gated_delta_rule.{kind}", dtype="float32", **dims))
    inputs = ["q", "k", "v", "g", "beta", "initial_state"]
    assert off == {"saving": {"o", "final_state", "S_chunks"}, "states": {"final_state", "S_chunks"},
                   "solved_states": {"final_state", "S_chunks", "U_chunks"}, "gradient": {f"d_{n}" for n in inputs},
                   "inverse_states": {"final_state", "S_chunks", "U_chunks", "Tinv_below_chunks"},
                   "stored_states": {"final_state", "S_chunks", "U_chunks", "G_chunks", "exp_G_chunks", "q_kT_D_chunks",
                                     "decay_to_end_chunks", "Tinv_below_chunks"},
                   "stored_gradient": {f"d_{n}" for n in inputs},
                   "solved_gradient": {f"d_{n}" for n in inputs}, "inverse_gradient": {f"d_{n}" for n in inputs}}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("target", ["triton", pytest.param("tilelang", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [n if n in ONES else pytest.param(n, marks=pytest.mark.long) for n in names()])
def test_gradients_of_each_page_pass(name: str, target: str, dtype: str) -> None:
    passes(target, algorithm=f"{name}.gradient", dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("target", OWN)
def test_gradients_by_vectors_of_value_heads_pass(target: str) -> None:
    """Of a page of one's own that computes with them."""
    passes(target, algorithm=f"{Path(__file__).with_name('test_differentiate.py')}:of_heads.gradient", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("name, accept", [
    ("gated_delta_rule", "beta=sigmoid,g=raw,k=l2norm,q=l2norm,state=vk"),
    ("gated_delta_rule", "beta=twice_sigmoid/bfloat16,g=linear/float16,k=unit,strided"),
    ("gated_delta_rule", "g=safe"), ("kimi_delta_attention", "g=bounded"), ("mamba2", "dt=softplus"),
    pytest.param("gated_delta_rule", "g=floored", marks=pytest.mark.long),
    pytest.param("kimi_delta_attention", "beta=sigmoid,g=raw,k=l2norm", marks=pytest.mark.long)])
def test_gradients_of_callers_forms_pass(name: str, accept: str) -> None:
    """Inputs in callers' forms are drawn as of the page, which reads them in these forms."""
    passes("triton", algorithm=f"{name}.gradient", contract=Contract.parse(accept), layout="bhtd", dtype="float32")


@algorithm(r="C K", s="C K", x="C V", y="C V", w="HV C K", P=carried("K V", forgets="w"), Q=carried("K V"))
def two_states(r, s, x, y, w, P, Q):  # type: ignore[no-untyped-def]
    """Two states with one gate for each channel, and names that no member has."""
    W = cumsum(w)
    ahead, to_end = exp(W) * r, exp(last(W)[None, :] - W) * s
    scores = decayed_product(r, s, W)
    o = (ahead @ P + scores @ x) * (ahead @ Q + scores @ y)
    P = exp(last(W))[:, None] * P + to_end.T @ x
    Q = exp(last(W))[:, None] * Q + to_end.T @ y
    return o, P, Q


@pytest.mark.slow
@pytest.mark.parametrize("name, accept", [
    ("kimi_delta_attention", ""), ("gla", ""), (f"{__file__}:two_states", ""), ("kimi_delta_attention", "g=floored"),
    ("kimi_delta_attention", "beta=sigmoid/bfloat16,g=safe,k=l2norm,q=l2norm"),
    *(pytest.param(n, "", marks=pytest.mark.long) for n in ("gated_delta_rule_2", "rwkv7")),
    pytest.param("gla", "g=safe", marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype, few", [
    ("bfloat16", True), ("float32", False),
    *(pytest.param(*x, marks=pytest.mark.long) for x in (("bfloat16", False), ("float32", True))),
    *(pytest.param("float16", x, marks=pytest.mark.long) for x in (False, True))])
def test_what_modules_on_a_gpu_store_for_a_gradient_passes(few: bool, dtype: str, name: str, accept: str) -> None:
    """Triton's text is that of the interpreter. Here K and V differ, and chunks are shorter. few: walks in parts."""
    b = asked_of(Build("triton", algorithm=name, dtype=dtype, head_dim_k=32, head_dim_v=64,
                       contract=Contract.parse(accept) if accept else PLAIN), True)
    x = next(x for x in candidates(b, "cuda", "sm_90", 32, few=few) if not any(map(unfit, x.all)))
    assert bool(x.gradient.plan.partition) == (few and not name.endswith(("rwkv7", "two_states")))
    assert x.states and str(x.gradient.algorithm) == f"{name}.stored_gradient"
    for y in x.all:
        errors = found(render(y))
        assert len(errors) > 3 and all(e <= accepted for e, accepted in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "gradient"])
def test_states_with_their_dims_in_the_other_order_pass(kind: str) -> None:
    """K and V differ, so that nothing fits by chance."""
    text = render(Build("triton", algorithm=f"gated_delta_rule.{kind}", schedule="gradient", **SMALL))
    assert "S_chunks_vk" in text
    assert all(e <= accepted for e, accepted in found(text).values())


#: Of each: the kind of page, what is found in the text of a module and what is put there.
BROKEN = {
    "the order of chunks": ("gradient", r"t = tl\.cdiv\(length, C\) \* C - C - passed", "t = passed"),
    "a slot": ("gradient", r"slot = start // C \+ n \+ t // C", "slot = start // C + n"),
    "a sign": ("gradient", r"-\(beta\[:, None\] \* Tinv_strictly_lower\)", "(beta[:, None] * Tinv_strictly_lower)"),
    "a mask": ("gradient", r"tl\.where\(i_C\[:, None\] > i_C\[None, :\], (Tinv_product_UT \* D), 0\.0\)", r"\1"),
    "a saved state": ("saving", r"(S_chunks_ptr .*), S\)", r"\1, 0 * S)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_refused(what: str) -> None:
    if not runs("triton", "cpu"):
        pytest.skip("triton does not run here")
    kind, find, put = BROKEN[what]
    bad, n = re.subn(find, put, render(Build("triton", algorithm=f"gated_delta_rule.{kind}", **{**SMALL, "head_dim_v": 16})))
    assert n, "nothing to break"
    assert any(not e <= accepted for e, accepted in found(bad).values())


@pytest.mark.slow
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("find, put", [
    (r"(d_S = tl\.load\(d_S_ws_ptr[^\n]*)", r"\1\n    d_S = d_S * (t == 0)"),
    (r"(G_decayed_blocks = [^\n]*)", r"\1\n    G_decayed_blocks = G_decayed_blocks * (t == 0)")])
def test_later_chunks_of_stored_operands_are_compared(find: str, put: str, few: bool) -> None:
    """What is drawn of chunks does not make derivatives by the state grow from chunk to chunk: beside these others are lost."""
    b = asked_of(Build("triton", algorithm="kimi_delta_attention", dtype="bfloat16", head_dim_k=32, head_dim_v=32), True)
    x = next(x for x in candidates(b, "cuda", "sm_90", 32, few=few) if not any(map(unfit, x.all)))
    bad, n = re.subn(find, put, render(x.gradient))
    assert n, "nothing to break"
    assert any(not e <= accepted for e, accepted in found(bad).values())


@pytest.mark.slow
def test_a_walk_back_in_parts_is_compared_in_parts() -> None:
    """A derivative by the final state that only the first part would see, not a warm-up that begins where it does, is refused."""
    if not runs("triton", "cpu"):
        pytest.skip("triton does not run here")
    text = render(Build("triton", algorithm="gated_delta_rule.gradient", schedule=varied("gradient", partition="decay"), **SMALL))
    assert all(e <= accepted for e, accepted in found(text).values())
    bad = text.replace("if begin == 0:", "if first == 0:")
    assert bad != text and any(not e <= accepted for e, accepted in found(bad).values())
