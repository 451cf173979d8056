"""The short convolution's ops on a CUDA GPU, beside torch's conv1d in float64 on a CPU. Run with: pytest -m device"""
import sys
from pathlib import Path

import pytest
import torch
from reference import TOLERANCE, rms_error

from gdn_codegen import causal_conv1d, causal_conv1d_update
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

sys.path.insert(0, str(Path(__file__).parents[1] / "family"))
import test_convolution as on_cpu

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in OWN if t != "pto" and runs(t, "cuda")]
ENDS = on_cpu.ENDS.cuda() if torch.cuda.is_available() else on_cpu.ENDS


def there(*values):
    return [None if y is None else y.detach().cuda() for y in values]


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("D", [64, 384])
@pytest.mark.parametrize("W, dtype, activation, biased, started", [
    (4, "float32", "silu", True, True), (3, "bfloat16", "swish", False, False), (2, "float16", None, True, True),
    (4, "bfloat16", "silu", False, True)])
def test_packs(target, D, W, dtype, activation, biased, started):
    x, weight, bias, state = on_cpu.drawn(D=D, W=W, dtype=dtype)
    bias, state = bias if biased else None, state if started else None
    a, b, c, d = there(x, weight, bias, state)
    calls = [causal_conv1d(a, b, c, None, d, True, activation, cu_seqlens=ENDS, target=target) for _ in range(2)]
    y, final = calls[0]
    want, last = on_cpu.packed(x, weight, bias, state, activation)
    assert y.dtype == final.dtype == x.dtype and rms_error(y.cpu(), want) < TOLERANCE[dtype]
    assert torch.equal(final.cpu().double(), last) and all(map(torch.equal, *calls))


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("dtype, most", [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("W, activation", [(4, "silu"), (2, None)])
def test_gradients(target, dtype, most, W, activation):
    """By x, weight, bias and the initial state, with gradients of y and of the final state."""
    drawn = on_cpu.drawn(W=W, dtype=dtype)
    leaves, wide = [y.requires_grad_() for y in there(*drawn)], [y.double().requires_grad_() for y in drawn]
    x, weight, bias, state = leaves
    made = causal_conv1d(x, weight, bias, None, state, True, activation, cu_seqlens=ENDS, target=target)
    want = on_cpu.packed(*wide, activation)
    gen = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=gen).to(y.dtype) for y in made]
    for n, (got, exact) in enumerate(zip(torch.autograd.grad(made, leaves, there(*seeds)),
                                         torch.autograd.grad(want, wide, [s.double() for s in seeds]), strict=True)):
        assert rms_error(got.cpu(), exact) < most, n


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("tokens", [1, 3])
def test_steps_in_a_graph(target, tokens):
    """States of a pool are moved on by a graph of the call, which is replayed on other inputs."""
    x, weight, bias, _ = on_cpu.drawn(T=2 * tokens)
    rows, pool = x[0].unflatten(0, (2, -1)).transpose(1, 2), torch.randn(6, 64, 4)
    given, taps, added, state = there(torch.zeros_like(rows), weight, bias, pool)
    slots, graph = torch.tensor([4, 1], device="cuda"), torch.cuda.CUDAGraph()
    call = lambda: causal_conv1d_update(given, state, taps, added, "silu", conv_state_indices=slots, target=target)
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = call()
    given.copy_(rows)
    state.copy_(pool)
    graph.replay()
    for n, at in enumerate((4, 1)):
        want, last = on_cpu.by_torch(rows[n].T, weight, bias, pool[at], "silu")
        assert rms_error(y[n].cpu().T, want) < 1e-5 and torch.equal(state[at].cpu().double(), last)
    assert torch.equal(state[[0, 2, 3, 5]].cpu(), pool[[0, 2, 3, 5]])
