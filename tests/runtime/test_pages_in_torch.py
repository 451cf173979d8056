"""Ops of pages of one's own beside what torch does with functions: each is right, or refused by a ValueError that says why."""
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gdn_codegen import pages
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower
from gdn_codegen.runtime.call.gradient_builds import TARGETS
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


def op(target):
    return pages.compile(decaying, target=target, chunk=16, head_dim_k=16, head_dim_v=16, dtype="float32")


def drawn(seed=0):
    """q, k, v and g of two rows with nine tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(2, 9, 1, 16, generator=generator) / 4 for _ in range(3)]
    return *rows, -torch.rand(2, 9, 1, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("target", [t for t in HERE if t in TARGETS])
def test_activation_checkpointing_of_both_kinds(target, reentrant):
    fn, made = op(target), []
    for call in (lambda *x: fn(*x)[0], lambda *x: checkpoint(lambda *x: fn(*x)[0], *x, use_reentrant=reentrant)):
        x = [y.requires_grad_() for y in drawn()]
        call(*x).square().sum().backward()
        made.append([y.grad for y in x])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*made, strict=True))
