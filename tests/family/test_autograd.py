"""Gradients of the package's ops by backward(), beside torch.autograd through the token recurrences in float64.

torch.autograd.gradcheck is of no use here: kernels compute in float32, whose differences along a direction have no digits. The
programs of the gradients are compared in float64 in test_differentiate.py.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradients
import pytest
import torch
from problems import CALLS, SIZES, Problem
from torch import Tensor

from gdn_codegen.algorithms import find
from gdn_codegen.runtime.call import gradient_builds
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN
from gdn_codegen.targets import find as find_target
from gdn_codegen.targets.gradient_plans import ONE, STATE_WALKS, THREE, GradientPlan
from gdn_codegen.targets.triton import FIVE

HERE = [t for t in OWN if runs(t, "cpu")]
ACCEPTED = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
#: Pages that all targets run in every run of the suite; on targets after the first, others are run by hand (`-m long`).
OFTEN = ("gated_delta_rule", "mamba2")
Forms = dict[str, Callable[[dict[str, Tensor]], Tensor]]


def loss_of(o: Any, final: Any, seed: int = 1) -> Any:
    """A loss of both results with random cotangents. None counts as nothing."""
    gen = torch.Generator().manual_seed(seed)
    terms = [(y * torch.randn(y.shape, generator=gen).to(y.dtype)).sum() for y in (o, final) if y is not None]
    return sum(terms)


def expected(p: Problem, x: dict[str, Tensor], forms: Forms, ends: tuple[bool, bool]) -> dict[str, Tensor]:
    """Gradients of `loss_of` by callers' inputs x. forms: what the page reads of them. ends: whether o and final states count."""
    leaves = {n: y.double().detach().requires_grad_() for n, y in x.items()}
    page = {n: forms[n](leaves) if n in forms else leaves[n] for n in (*find(p.page).inputs, "S")}
    o, final = gradients.outputs(p.page, p.case, page)
    loss_of(o[None] if ends[0] else None, final if ends[1] else None).backward()
    return {n: torch.zeros_like(y) if y.grad is None else y.grad for n, y in leaves.items()}


def errors(p: Problem, x: dict[str, Tensor] | None = None, forms: Forms | None = None, ends: tuple[bool, bool] = (True, True),
           **said: Any) -> dict[str, float]:
    """RMSE over RMS of each gradient. x: callers' inputs, where they are not those of the page; said: of the call."""
    x = {n: y.clone() for n, y in {**p.x, **(x or {}), "S": p.S}.items()}
    leaves = {n: y.requires_grad_() for n, y in x.items()}
    own = {n: leaves[n] for n in ("A_log", "dt_bias") if n in leaves}
    o, final = p.call({n: y for n, y in leaves.items() if n in p.x}, initial_state=leaves["S"], output_final_state=True,
                      chunk_size=16, **own, **said)
    loss_of(o if ends[0] else None, final if ends[1] else None).backward()
    want = expected(p, x, forms or {}, ends)
    for n, y in leaves.items():
        got = torch.zeros_like(y) if y.grad is None else y.grad
        assert (got.dtype, got.shape) == (y.dtype, y.shape), n
    return {n: gradients.relative((torch.zeros_like(y) if y.grad is None else y.grad).double(), want[n])
            for n, y in leaves.items() if want[n].any() or y.grad is not None and y.grad.any()}


def right(found: dict[str, float], dtype: torch.dtype = torch.float32) -> None:
    assert found and all(e < ACCEPTED[dtype] for e in found.values()), found


@pytest.mark.parametrize("page, target", [
    pytest.param(p, t, marks=[] if (p in OFTEN) and t == HERE[0] else
                 pytest.mark.slow if p in OFTEN or t == HERE[0] else pytest.mark.long) for p in CALLS for t in HERE])
def test_every_member(page: str, target: str) -> None:
    """Every input and the initial states, with both results used: packs with a sequence without tokens and ragged tails."""
    right(errors(Problem(page, target, (17, 0, 5), dtype=torch.float32)))


@pytest.mark.parametrize("save", ["nothing", "states"])
@pytest.mark.parametrize("ends", [(True, False), (False, True)], ids=["only o", "only the final state"])
def test_one_result_of_two(ends: tuple[bool, bool], save: str) -> None:
    right(errors(Problem("gated_delta_rule", HERE[0], (17, 0, 5), dtype=torch.float32), ends=ends, save=save))


@pytest.mark.parametrize("page", ["gated_delta_rule", "kimi_delta_attention"])
@pytest.mark.parametrize("save, kept", [("nothing", None), ("states", torch.float32), ("rounded_states", torch.bfloat16)])
def test_what_is_kept(page: str, save: str, kept: torch.dtype | None) -> None:
    """States before chunks of 16 tokens: three slots of (21, 11) tokens, and one more."""
    p, packed = Problem(page, HERE[0], (21, 11), dtype=torch.bfloat16), []
    def pack(y: Tensor) -> Tensor:
        packed.append((tuple(y.shape), y.dtype))
        return y
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        x = {n: y.clone().requires_grad_() for n, y in p.x.items()}
        p.call(x, chunk_size=16, save=save)
    states = [dtype for shape, dtype in packed if shape == (4, 2, *p.S.shape[2:])]
    assert states == ([] if kept is None else [kept])
    right(errors(p, save=save), torch.bfloat16)


@pytest.mark.parametrize("page, dtype", [("gated_delta_rule", torch.float16), ("gated_delta_rule", torch.bfloat16),
                                         ("gla", torch.bfloat16)])
def test_inputs_of_16_bits(page: str, dtype: torch.dtype) -> None:
    """Gates, of heads or of channels, and beta in 16 bits get gradients in their dtype."""
    p = Problem(page, HERE[0], (21, 11), dtype=dtype)
    right(errors(p), dtype)
    p.x = {n: y.to(dtype) for n, y in p.x.items()}
    right(errors(p), dtype)


def test_queries_and_keys_in_float32_beside_16_bits() -> None:
    p = Problem("gated_delta_rule", HERE[0], (21, 11), dtype=torch.bfloat16)
    right(errors(p, {n: p.x[n].float() for n in ("q", "k")}), torch.bfloat16)


def logit(most: float) -> Callable[[Tensor], Tensor]:
    return lambda y: torch.log(y / (most - y))


def test_raw_gates_and_sigmoid_beta() -> None:
    """The gradients by A_log, dt_bias, and what comes before the sigmoid, once and twice."""
    p, gen = Problem("gated_delta_rule", HERE[0], (17, 0, 5), dtype=torch.float32), torch.Generator().manual_seed(1)
    x, A, bias = (torch.randn(s, generator=gen) for s in (p.x["g"].shape, (2,), (2,)))
    gate = {"g": gradients.raw_gate}
    for form, most in (("sigmoid", 1.0), ("twice_sigmoid", 2.0)):
        beta = {"beta": lambda y, most=most: most * y["beta"].sigmoid()}
        right(errors(p, {"g": x, "A_log": A, "dt_bias": bias, "beta": logit(most)(p.x["beta"])}, {**gate, **beta}, gate="raw",
                     beta_form=form))


def test_norms_of_rows() -> None:
    p = Problem("gated_delta_rule", HERE[0], (17, 5), dtype=torch.float32)
    norm = {n: gradients.norm(n) for n in ("q", "k")}
    x = {n: 3 * p.x[n] for n in ("q", "k")}
    right(errors(p, x, norm, use_qk_l2norm_in_kernel=True))
    for y in x.values():  # as a projection with weights of zero gives it
        y[4] = 0
    right(errors(p, x, norm, use_qk_l2norm_in_kernel=True))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["simple_gla", "kimi_delta_attention", "gla"])
def test_forms_of_other_members(page: str) -> None:
    p, gen = Problem(page, HERE[0], (17, 5), dtype=torch.float32), torch.Generator().manual_seed(1)
    right(errors(p, {"g": p.x["g"].exp()}, {"g": lambda y: y["g"].log()}, gate="linear"))
    shape = p.x["g"].shape
    x, A, bias = (torch.randn(s, generator=gen) for s in (shape, shape[1:2], shape[1:]))
    right(errors(p, {"g": x, "A_log": A, "dt_bias": bias}, {"g": gradients.raw_gate}, gate="raw"))


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("page", ["kimi_delta_attention", "mamba2"])
def test_what_a_head_has_where_columns_are_padded(page: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of K = 36 and V = 44 have more columns than the gradients by dt_bias and D, and these columns count for nothing."""
    monkeypatch.setitem(SIZES, "K", 36)
    monkeypatch.setitem(SIZES, "V", 44)
    p, gen = Problem(page, target, (17, 0, 5), dtype=torch.float32), torch.Generator().manual_seed(1)
    if page == "mamba2":
        return right(errors(p))
    x, A, bias = (torch.randn(s, generator=gen) for s in (p.x["g"].shape, p.x["g"].shape[1:2], p.x["g"].shape[1:]))
    right(errors(p, {"g": x, "A_log": A, "dt_bias": bias}, {"g": gradients.raw_gate}, gate="raw"))


def test_layouts_and_views() -> None:
    """Heads first; slices of a projection; states [V, K]; a gradient by o whose strides are zero."""
    p = Problem("gated_delta_rule", HERE[0], (17, 5), dtype=torch.float32)
    leaves = {n: y.clone().requires_grad_() for n, y in p.x.items()}
    p.call(leaves)[0].sum().backward()
    want = {n: y.grad for n, y in leaves.items()}
    for lie, layout in ((lambda y: y.transpose(1, 2).contiguous(), "bhtd"), (lambda y: y.transpose(1, 2), "bhtd"),
                        (lambda y: torch.stack((y, y), 2)[:, :, 1], "bthd")):
        again = {n: y.clone().requires_grad_() for n, y in p.x.items()}
        p.call(again, lie=lie, layout=layout)[0].sum().backward()
        assert all(torch.equal(y.grad, want[n]) for n, y in again.items()), layout


def test_states_in_another_order() -> None:
    p = Problem("gated_delta_rule", HERE[0], (17, 5), dtype=torch.float32)
    found = []
    for turned in (False, True):
        S = (p.S.mT.contiguous() if turned else p.S.clone()).requires_grad_()
        q = p.x["q"].clone().requires_grad_()
        final = p.call({"q": q}, initial_state=S, output_final_state=True, state_v_first=turned)[1]
        ((final.mT if turned else final) ** 2).sum().backward()
        found.append((S.grad.mT if turned else S.grad, q.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("lengths", [(0,), (0, 0)])
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    """The gradient passes from the final states to the initial ones."""
    p = Problem("gated_delta_rule", HERE[0], lengths, dtype=torch.float32)
    S, q = p.S.clone().requires_grad_(), p.x["q"].clone().requires_grad_()
    _, final = p.call({"q": q}, initial_state=S, output_final_state=True)
    (3 * final).sum().backward()
    assert (S.grad == 3).all() and q.grad.shape == q.shape


def test_the_same_bits_in_any_batch_position() -> None:
    """Twice the same bits, and those of a sequence do not depend on its neighbours."""
    def found(case: tuple[int, ...], rows: slice) -> dict[str, Tensor]:
        whole = Problem("gated_delta_rule", HERE[0], (17, 5, 9), dtype=torch.float32)
        p = Problem("gated_delta_rule", HERE[0], case, dtype=torch.float32)
        leaves = {n: y[rows].clone().requires_grad_() for n, y in whole.x.items()}
        p.call(leaves)[0].square().sum().backward()
        return {n: y.grad for n, y in leaves.items()}
    all_of, again, last = found((17, 5, 9), slice(31)), found((17, 5, 9), slice(31)), found((9,), slice(22, 31))
    assert all(torch.equal(y, again[n]) and torch.equal(y[22:], last[n]) for n, y in all_of.items())


def test_decoding_steps() -> None:
    right(errors(Problem("delta_rule", HERE[0], (9, 4), dtype=torch.float32, few=True)))


def test_a_case_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of a value head taken for that of its key head is seen."""
    from gdn_codegen.runtime.call import gradient
    monkeypatch.setattr(gradient, "reduce", lambda add, parts: parts[0])
    with pytest.raises(AssertionError, match=r"'[qk]'"):
        right(errors(Problem("gated_delta_rule", HERE[0], (17, 5), dtype=torch.float32)))


def test_nothing_changes_where_nothing_requires_grad() -> None:
    p = Problem("gated_delta_rule", HERE[0], (17, 5))
    o, final = p.call(initial_state=p.S, output_final_state=True)
    leaves = {n: y.clone().requires_grad_() for n, y in p.x.items()}
    got = p.call(leaves, initial_state=p.S, output_final_state=True)
    assert torch.equal(got[0], o) and torch.equal(got[1], final) and got[0].requires_grad and got[1].requires_grad
    with torch.no_grad():
        assert not p.call(leaves, initial_state=p.S)[0].requires_grad




def _with_walks(schedule: str, **fields: Any) -> GradientPlan:
    return GradientPlan((schedule, fields), STATE_WALKS, True)


@pytest.mark.parametrize("plan", [ONE, THREE, _with_walks("gradient", kernels=FIVE), _with_walks("fused_gradient")],
                         ids=["one", "three", "five", "one_walk"])
@pytest.mark.parametrize("page", ["gated_delta_rule", "simple_gla"])
@pytest.mark.parametrize("gate", [-5.0, -10.0])
def test_a_gradient_by_gates_that_is_tiny_keeps_its_digits(gate: float, page: str, plan: GradientPlan,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all tokens forget much, d_g has a factor of exp(g), 4.5e-5 for -10. Larger terms that cancel leave nothing, as
    they are rounded to float32 at most: in 16 bits they would leave 1e-3."""
    monkeypatch.setitem(find_target("triton").gradients, "cpu", (plan,))
    gradient_builds._fitting.cache_clear()
    p = Problem(page, "triton", (70, 33), dtype=torch.bfloat16)
    g = torch.full_like(p.x["g"], gate)
    found = errors(p, {"g": g})
    gradient_builds._fitting.cache_clear()
    assert found["g"] < 1e-2, found


@pytest.mark.parametrize("plan", [THREE, _with_walks("gradient", kernels=FIVE), _with_walks("fused_gradient"),
                                  _with_walks("channel_gradient")],
                         ids=["three", "five", "one_walk", "by_channels"])
@pytest.mark.parametrize("page", ["gated_delta_rule", pytest.param("kimi_delta_attention", marks=pytest.mark.slow)])
def test_forms_with_kernels_of_their_own(page: str, plan: GradientPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """All forms at once, as layers have them, with gates in 16 bits."""
    monkeypatch.setitem(find_target("triton").gradients, "cpu", (plan,))
    monkeypatch.setattr(gradient_builds, "_fitting", gradient_builds._fitting.__wrapped__)
    p, gen = Problem(page, "triton", (17, 0, 5), dtype=torch.bfloat16), torch.Generator().manual_seed(1)
    shape = p.x["g"].shape
    g, A, bias = (torch.randn(s, generator=gen) for s in (shape, shape[1:2], shape[1:]))
    forms = {"g": gradients.raw_gate, "beta": lambda y: y["beta"].sigmoid(), **{n: gradients.norm(n) for n in ("q", "k")}}
    x = {"g": g.bfloat16(), "A_log": A, "dt_bias": bias, "beta": torch.randn(p.x["beta"].shape, generator=gen),
         **{n: 3 * p.x[n] for n in ("q", "k")}}
    right(errors(p, x, forms, gate="raw", beta_form="sigmoid", use_qk_l2norm_in_kernel=True), torch.bfloat16)
