"""Numbers of numpy, and arrays and tensors of rank 0 on the CPU, are taken where a number of Python is."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import Unsupported

from gdn_codegen import (
    causal_conv1d,
    chunk_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_lightning_attn,
    mamba_chunk_scan_combined,
)
from gdn_codegen.host import tensors
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
T, K = 20, 32
SCALES = [np.float32(0.3), np.float64(0.3), np.float16(0.3), np.longdouble(0.3), np.int64(2), np.uint8(2), np.array(0.3),
          np.array(2), torch.tensor(0.3), torch.tensor(0.3, dtype=torch.bfloat16), torch.tensor(2)]
REFUSED = [True, np.True_, np.complex64(1), np.timedelta64(5, "ns"), np.str_("1"), np.array([0.3]), np.array(True),
           np.float32("nan"), np.float64("inf"), torch.tensor(True), torch.tensor(1j), torch.tensor([0.3]),
           torch.tensor(math.nan), torch.tensor(0.3, requires_grad=True), torch.tensor(0.3, device="meta"),
           torch.nn.Parameter(torch.tensor(0.3), requires_grad=False)]
TAKEN = dict(target=HERE[0], chunk_size=16)


def drawn(*more, steps=1):
    gen = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=gen)
    x = dict(q=rand(1, T, 1, K).half(), k=F.normalize(rand(1, T * steps, 1, K), dim=-1).half(), v=rand(1, T * steps, 1, K).half(),
             beta=torch.rand(1, T * steps, 1, generator=gen))
    return x | ({"g": -torch.rand(1, T, *more, generator=gen)} if more else {})


GATED, PLAIN = drawn(1), drawn()
CALLS = {"gated_delta_rule": lambda scale: chunk_gated_delta_rule(**GATED, scale=scale, **TAKEN)[0],
         "delta_rule": lambda scale: chunk_delta_rule(**PLAIN, scale=scale, **TAKEN)[0]}


@pytest.mark.parametrize("scale", SCALES, ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_scales(name, scale):
    want = CALLS[name](float(scale))
    assert all(torch.equal(CALLS[name](scale), want) for _ in range(3)), "also of a call that came before"


def test_a_tensor_is_read_in_each_call():
    scale = torch.tensor(0.3)
    for new in (0.3, 0.7):
        scale.fill_(new)
        for call in CALLS.values():
            assert torch.equal(call(scale), call(scale.item()))


@pytest.mark.parametrize("scale", REFUSED, ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_number_is_refused(name, scale):
    with pytest.raises(ValueError, match=r"scale: got .*; accepted: a number"):
        CALLS[name](scale)


def test_gradients():
    def grads(scale):
        x = {n: y.requires_grad_() for n, y in drawn().items()}
        chunk_delta_rule(**x, scale=scale, **TAKEN)[0].sum().backward()
        return [y.grad for y in x.values()]
    want = grads(0.25)
    for scale in (np.float32(0.25), torch.tensor(0.25)):
        assert all(torch.equal(a, b) for a, b in zip(grads(scale), want, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_under_compile(name):
    """Numbers of Python as before, in one graph. Those of numpy break the graph, since torch takes them for arrays. A tensor's
    value is not known there."""
    def compiled(scale, whole):
        torch._dynamo.reset()
        return torch.compile(lambda: CALLS[name](scale), backend="eager", fullgraph=whole)()
    for scale in (2, 0.3):
        assert torch.equal(compiled(scale, True), CALLS[name](scale))
    for scale in (np.float32(0.3), np.float64(0.3), np.int64(2)):
        assert torch.equal(compiled(scale, False), CALLS[name](scale))
        with pytest.raises(Unsupported):
            compiled(scale, True)
    with pytest.raises(ValueError, match=r"scale: got Tensor; accepted: a number"):
        compiled(torch.tensor(0.3), False)


def test_tensors_that_a_transform_or_a_mode_sees_are_not_read():
    seen = []

    def look(x):
        seen.append(tensors._python_number(x))
        return x
    torch.func.vmap(look)(torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        seen.append(tensors._python_number(torch.tensor(0.3)))
    assert len(seen) == 2 and all(isinstance(y, torch.Tensor) for y in seen)


def test_sizes():
    """Integers of numpy. Arrays and tensors are no options: what a call decides by them is kept, and they may change."""
    x = drawn(1)
    want = chunk_gated_delta_rule(**x, **TAKEN, checkpoint_chunks=1)
    for n in (np.int64, np.int32, np.uint8):
        for _ in range(3):
            got = chunk_gated_delta_rule(**x, target=HERE[0], chunk_size=n(16), checkpoint_chunks=n(1))
            assert len(got) == len(want) == 3 and torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    for bad in (np.array(16), torch.tensor(16), np.float64(16), np.int64(17), np.True_):
        with pytest.raises(ValueError, match=r"chunk_size: got .*; accepted: 1, 16"):
            chunk_gated_delta_rule(**x, target=HERE[0], chunk_size=bad)
    for bad in (np.array(1), torch.tensor(1), np.float64(1), np.int64(-1), np.True_):
        with pytest.raises(ValueError, match=r"checkpoint_chunks: got .*; accepted: a number of chunks"):
            chunk_gated_delta_rule(**x, **TAKEN, checkpoint_chunks=bad)


def test_numbers_of_other_ops():
    x = drawn(1)
    del x["beta"], x["g"]
    assert torch.equal(*(chunk_lightning_attn(**x, layer_idx=n(2), num_layers=n(4), **TAKEN)[0] for n in (int, np.int64)))
    y = drawn(1, steps=2)
    assert torch.equal(*(chunk_gated_delta_product(**y, num_householder=n, **TAKEN)[0] for n in (2, np.int64(2))))
    z = drawn(1, K)
    gates = dict(use_gate_in_kernel=True, A_log=torch.zeros(1), dt_bias=torch.zeros(K))
    for bound in (-4.0, -5.0):
        o, *others = (chunk_kda(**z, **gates, lower_bound=n(bound), **TAKEN)[0]
                      for n in (float, np.float32, np.float64, np.int64, torch.tensor))
        assert all(torch.equal(o, other) for other in others)
    for bad in (np.float32(1), np.True_, torch.tensor([-4.0]), torch.tensor(-4.0, requires_grad=True), np.float32("nan")):
        with pytest.raises(ValueError, match=r"lower_bound: got .*; accepted: a number below 0"):
            chunk_kda(**z, **gates, lower_bound=bad, **TAKEN)


def test_numbers_of_mamba_and_the_convolution():
    gen = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=gen)
    x, dt, A, B, C = rand(1, T, 2, K), torch.rand(1, T, 2, generator=gen), -torch.rand(2, generator=gen), *rand(2, 1, T, 1, K)
    outs = [mamba_chunk_scan_combined(x, dt, A, B, C, n(16), dt_limit=(f(0.1), f(0.5)), target=HERE[0])
            for n, f in ((int, float), (np.int64, np.float64), (np.int32, np.float64))]
    assert all(torch.equal(outs[0], o) for o in outs)
    rows, weight = rand(1, T, K), rand(K, 4)
    a, b = (causal_conv1d(rows, weight, target=HERE[0], chunk_size=n(16))[0] for n in (int, np.int64))
    assert torch.equal(a, b)
