"""Ops of pages of one's own beside what torch does with functions: each is right, or refused by a ValueError that says why."""
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gdn_codegen import pages
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def decaying(q, k, v, g, S):
    """Token t: S <- exp(g) S + k v^T; o = S^T q."""
    G = cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-float("inf")))
    o = exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ v
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    return o, S


OPTIONS = dict(chunk=16, head_dim_k=16, head_dim_v=16, dtype="float32")
BUILD = {t: Build(t, algorithm=decaying, **OPTIONS) for t in HERE}


def op(target):
    return pages.compile(decaying, target=target, **OPTIONS)


def drawn(seed=0):
    """q, k, v and g of two rows with nine tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, 9, 1, 16, generator=generator) / 4 for _ in range(3)]
    return *rows, -torch.rand(2, 9, 1, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("target", HERE)
def test_activation_checkpointing_of_both_kinds(target, reentrant):
    fn, made = op(target), []
    for call in (lambda *x: fn(*x)[0], lambda *x: checkpoint(lambda *x: fn(*x)[0], *x, use_reentrant=reentrant)):
        x = [y.requires_grad_() for y in drawn()]
        call(*x).square().sum().backward()
        made.append([y.grad for y in x])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*made, strict=True))


def refusal(call):
    with pytest.raises(ValueError) as e:
        call()
    return str(e.value)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_what_does_not_see_kernels_is_refused_for_ops_and_generated_functions(target):
    x, func = drawn(), torch.func
    for fn in (op(target), function(BUILD[target])):
        assert "q: got a tensor of vmap" in refusal(lambda: torch.vmap(lambda *y: fn(*(z[None] for z in y))[0])(*x))
        assert "q: got a tensor of vmap" in refusal(lambda: func.functionalize(lambda q: fn(q, *x[1:])[0])(x[0]))
        assert "g: got a tensor of vmap" in refusal(lambda: func.jvp(lambda g: fn(*x[:3], g)[0], x[3:], x[3:]))
        assert "q: got a tensor of torch.jit.trace" in refusal(lambda: torch.jit.trace(lambda q: fn(q, *x[1:])[0], x[0]))
        assert "v: got a view with torch's negative bit" in refusal(lambda: fn(*x[:2], torch._neg_view(x[2]), x[3]))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x[1], x[1])
            assert "k: got a dual tensor" in refusal(lambda: fn(x[0], dual, *x[2:]))
    assert "q: got device meta" in refusal(lambda: op(target)(*(y.to("meta") for y in x)))


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_memory_for_results_is_no_memory_of_other_arguments(target):
    fn, x, S = op(target), drawn(), torch.zeros(2, 1, 16, 16)
    want = fn(*x, output_final_state=True)
    assert refusal(lambda: fn(*x, out=x[2])) == "out: got memory of v; accepted: memory of its own"
    assert refusal(lambda: fn(*x, initial_state=S, final_state=S)) == (
        "final_state: got memory of initial_state; accepted: memory of its own")
    got = fn(*x, out=torch.empty_like(x[2]), final_state=S)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and got[1] is S


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_fake_tensors_and_export_see_one_op(target):
    fn, x = op(target), drawn()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(y) for y in x]
        assert [y.shape for y in fn(*fake, output_final_state=True)] == [(2, 9, 1, 16), (2, 1, 16, 16)]
    assert fn(*fake)[0].shape == (2, 9, 1, 16)

    class Layer(torch.nn.Module):
        def forward(self, *x):
            return fn(*x)[0]
    for strict in (False, True):
        assert torch.equal(torch.export.export(Layer(), x, strict=strict).module()(*x), fn(*x)[0])
