"""Gradients of the ops under torch's tools: torch.compile, opcheck, checkpointing, autocast, transforms, second derivatives."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Problem
from tiers import every
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_codegen import chunk_gated_delta_rule, chunk_simple_gla, mamba_chunk_scan_combined, selective_state_update
from gdn_codegen.runtime.member_library import member
from gdn_codegen.runtime.targets import runs
from gdn_codegen.runtime.torch_library import gated_delta_rule
from gdn_codegen.targets import OWN

TARGET = next(t for t in OWN if runs(t, "cpu"))
NAMES = ("q", "k", "v", "g", "beta")


def given(tokens: int = 21, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, g, beta of one row, which require grad."""
    p = Problem("gated_delta_rule", TARGET, (tokens,), dtype=dtype)
    return [p.x[n][None].clone().requires_grad_() for n in NAMES]


def model(*a: Tensor, save: str = "nothing") -> Tensor:
    o, final = chunk_gated_delta_rule(*a, target=TARGET, chunk_size=16, output_final_state=True, save=save)
    assert final is not None
    return o.square().sum() + final.sum()


def simple(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, save: str = "nothing") -> Tensor:
    """Another member, with q as a leaf that the loss also reads."""
    o, _ = chunk_simple_gla(2 * q, k, v, g, target=TARGET, chunk_size=16, save=save)
    return (o.square() * beta[..., None]).sum() + q.sum()


def found(fn: Any, a: list[Tensor], **more: Any) -> list[Tensor]:
    return list(torch.autograd.grad(fn(*a, **more), a))


@pytest.mark.slow
@pytest.mark.parametrize("fn, save, dynamic", every(2, [model, simple], ["nothing", "states", "rounded_states"], [False, True]))
def test_compiled_whole(fn: Any, save: str, dynamic: bool) -> None:
    """The gradients of a graph without breaks are those of eager calls, bit by bit."""
    graph = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (21, 35):
        want, got = found(fn, given(tokens), save=save), found(graph, given(tokens), save=save)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake results, registration and gradients of the ops, with static and dynamic shapes."""
    seen: list[Any] = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "gdn_codegen":
                seen.append((func, args))
            return func(*args, **kwargs or {})
    with Record():
        for fn in (model, simple):
            for save in ("nothing", "rounded_states"):
                fn(*given(), save=save).backward()
    assert len(seen) == 8
    for func, args in seen:
        leaf = [y.detach().requires_grad_(y.is_floating_point()) if isinstance(y, Tensor) else
                [z.detach().requires_grad_() for z in y] if isinstance(y, list) and y and isinstance(y[0], Tensor) else y
                for y in args]
        only = [x for x in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
                if x != "test_aot_dispatch_dynamic" or "gradient" not in str(func)]  # which has no derivative
        torch.library.opcheck(func, tuple(leaf), test_utils=only)
    assert {f.name() for f, _ in seen} == {"gdn_codegen::gated_delta_rule", "gdn_codegen::member", "gdn_codegen::gradient"}
    assert gated_delta_rule is not None and member is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    a = given()
    want = found(model, a)
    loss = checkpoint(model, *a, use_reentrant=reentrant)
    loss.backward()
    assert all(torch.equal(y.grad, z) for y, z in zip(a, want, strict=True))


def test_autocast() -> None:
    """The op computes in the dtypes that it is given, as FLA's does. q and k in float32 are rounded to v's."""
    a = given()
    want = found(model, a)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(y, z) for y, z in zip(found(model, a), want, strict=True))
        v = a[2] @ torch.eye(a[2].shape[-1])
        assert v.dtype == torch.bfloat16
        got = found(lambda *a: model(a[0], a[1], a[2] @ torch.eye(a[2].shape[-1]), *a[3:]), a)
    assert all(y.dtype == torch.float32 for y in got)
    assert all((y - z).norm() < 0.03 * z.norm() for y, z in zip(got, want, strict=True))


def test_second_derivatives_are_refused() -> None:
    a = given()
    first = torch.autograd.grad(model(*a), a, create_graph=True)
    with pytest.raises(RuntimeError, match="gdn_codegen computes no second derivatives"):
        first[0].sum().backward()


@pytest.mark.parametrize("fn", [model, simple])
def test_transforms_are_refused(fn: Any) -> None:
    a = [y.detach() for y in given()]
    with pytest.raises(ValueError, match=r"q: got a tensor of vmap, grad, jvp .*backward\(\)"):
        torch.func.grad(fn)(*a)


def test_a_second_backward_and_freed_arguments() -> None:
    """retain_graph=True gives the same again; an argument that was written to meanwhile is seen."""
    a = given()
    loss = model(*a)
    once, twice = (torch.autograd.grad(loss, a, retain_graph=True) for _ in range(2))
    assert all(torch.equal(y, z) for y, z in zip(once, twice, strict=True))
    with torch.no_grad():
        a[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_some_arguments() -> None:
    """Only what is asked for, also of one argument alone."""
    a = given()
    want = found(model, a)
    for n, y in enumerate(a):
        alone = [z.detach() for z in a]
        alone[n] = y
        assert torch.equal(torch.autograd.grad(model(*alone), y)[0], want[n])


@pytest.mark.parametrize("name, said", [
    ("out", dict(out=torch.zeros(1, 21, 2, 32))), ("final_state", dict(final_state=torch.zeros(1, 2, 16, 32))),
    ("initial_state", dict(initial_state=torch.zeros(1, 2, 16, 32), inplace_final_state=True)),
    ("state_indices", dict(initial_state=torch.zeros(1, 2, 16, 32), state_indices=torch.zeros(1).int())),
    ("checkpoint_chunks", dict(checkpoint_chunks=1)), ("save", dict(save=True))])
def test_what_has_no_gradient_is_refused(name: str, said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got .*; accepted: "):
        chunk_gated_delta_rule(*given(), target=TARGET, **said)


def test_a_step_of_mamba_that_overwrites_its_state() -> None:
    x, B, S = torch.zeros(1, 2, 32), torch.zeros(1, 1, 16), torch.zeros(1, 2, 32, 16)
    with pytest.raises(ValueError, match=r"^state: got a tensor that the call overwrites"):
        selective_state_update(S, x.requires_grad_(), torch.zeros(1, 2), -torch.ones(2), B, B, target=TARGET)


def test_the_gate_and_dt_of_mamba() -> None:
    """z, dt_bias and the softplus of dt."""
    gen = torch.Generator().manual_seed(0)
    x, z, dt, B, C, bias = (torch.randn(s, generator=gen).requires_grad_() for s in (
        (1, 9, 2, 32), (1, 9, 2, 32), (1, 9, 2), (1, 9, 1, 16), (1, 9, 1, 16), (2,)))
    A = (-torch.rand(2, generator=gen)).requires_grad_()
    leaves = (x, z, dt, B, C, bias, A)
    o = mamba_chunk_scan_combined(x, dt, A, B, C, 16, None, z, bias, dt_softplus=True, target=TARGET)
    got = torch.autograd.grad(o.square().sum(), leaves)
    y = [t.double().detach().requires_grad_() for t in leaves]
    rows, step, state = [], torch.nn.functional.softplus(y[2] + y[5]), torch.zeros(2, 16, 32).double()
    for t in range(9):
        added = (step[0, t, :, None] * y[0][0, t])[:, None] * y[3][0, t, 0, :, None]
        state = (step[0, t] * y[6]).exp()[:, None, None] * state + added
        rows.append((y[4][0, t, 0, :, None] * state).sum(1) * torch.nn.functional.silu(y[1][0, t]))
    want = torch.autograd.grad(torch.stack(rows).square().sum(), y)
    assert all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(got, want, strict=True))
