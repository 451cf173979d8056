"""causal_conv1d of FLA, and the functions of causal-conv1d, beside torch's conv1d in float64."""
import ast
import importlib.util
import inspect
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from reference import TOLERANCE, rms_error
from torch.nn.functional import conv1d, silu

import gdn_codegen
from gdn_codegen import causal_conv1d, causal_conv1d_fn, causal_conv1d_update, convolution
from gdn_codegen.ir.interpret import TORCH
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
LENGTHS = (1, 0, 3, 66, 0, 17)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)


def by_torch(x, weight, bias, before, activation):
    """y [T, D] and the last inputs [D, W] of one sequence x [T, D], float64. before: [D, W] or None."""
    D, W = weight.shape
    before = torch.zeros(D, W, dtype=torch.float64) if before is None else before.double()
    row = torch.cat([before, x.double().T], -1)
    if not len(x):
        return x.double(), row
    y = conv1d(row[None, :, 1:], weight.double()[:, None], None if bias is None else bias.double(), groups=D)[0].T
    return y if activation is None else silu(y), row[:, len(x):]


TOTAL, COUNT = sum(LENGTHS), len(LENGTHS)


def drawn(T=TOTAL, N=COUNT, D=64, W=4, dtype="float32"):
    gen = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=gen).to(TORCH[dtype])
    return draw(1, T, D), draw(D, W), draw(D), draw(N, D, W)


def packed(x, weight, bias, before, activation):
    made = [by_torch(x[0, a:b], weight, bias, None if before is None else before[n], activation)
            for n, (a, b) in enumerate(pairwise(ENDS))]
    return torch.cat([y for y, _ in made])[None], torch.stack([s for _, s in made])


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("W, dtype, activation, biased, started", [
    (4, "float32", "silu", True, True), (3, "bfloat16", "swish", False, False), (2, "float16", None, True, True)])
def test_packs(target, W, dtype, activation, biased, started):
    x, weight, bias, state = drawn(W=W, dtype=dtype)
    bias, state = bias if biased else None, state if started else None
    y, final = causal_conv1d(x, weight, bias, None, state, True, activation, cu_seqlens=ENDS, target=target)
    want, last = packed(x, weight, bias, state, activation)
    assert y.dtype == final.dtype == x.dtype and rms_error(y, want) < TOLERANCE[dtype]
    assert torch.equal(final.double(), last)


@pytest.mark.parametrize("change", ["rows", "view", "heads", "residual", "wide", "float64 weight"])
def test_forms_of_arguments(change):
    x, weight, bias, _ = drawn(T=40, D=160 if change == "wide" else 64)
    if change == "float64 weight":
        weight = weight.double()
    want, _ = by_torch(x[0], weight, bias, None, "silu")
    more = {"residual": x.flip(1)} if change == "residual" else {}
    given = torch.cat([x, x], -1)[..., :64] if change == "view" else x.unflatten(2, (4, 16)) if change == "heads" else x
    given = given.expand(3, -1, -1) if change == "rows" else given
    y, final = causal_conv1d(given, weight, bias, activation="silu", target="triton", **more)
    assert final is None and y.shape == given.shape
    for row in y.flatten(2):
        assert rms_error(row, want + (x.flip(1)[0] if more else 0)) < 1e-5


def test_channels_first():
    """causal-conv1d's functions have x as [B, D, T], and states of W - 1 inputs."""
    x, weight, bias, state = drawn(T=40, N=2)
    x = torch.cat([x, x.flip(1)]).transpose(1, 2)
    out = torch.empty(2, 64, 3)
    y, final = causal_conv1d_fn(x, weight, bias, None, state[..., 1:], True, out, "silu", target="triton")
    assert final is out
    for n in range(2):
        want, last = by_torch(x[n].T, weight, bias, state[n], "silu")
        assert rms_error(y[n].T, want) < 1e-5 and torch.equal(final[n].double(), last[:, 1:])
    assert torch.equal(causal_conv1d_fn(x, weight, bias, None, state[..., 1:], activation="silu", target="triton"), y)


def test_numbers_of_sequences():
    """A sequence ends where the number changes, and at the end of a row."""
    x, weight, bias, _ = drawn(T=40)
    x = torch.cat([x, x.flip(1)]).transpose(1, 2)
    numbers = torch.tensor([[0] * 5 + [1] * 35, [1] * 3 + [0] * 30 + [4] * 7], dtype=torch.int32)
    y = causal_conv1d_fn(x, weight, bias, numbers, target="triton")
    parts = {0: (0, 5, 40), 1: (0, 3, 33, 40)}
    for n, ends in parts.items():
        for a, b in pairwise(ends):
            assert rms_error(y[n, :, a:b].T, by_torch(x[n, :, a:b].T, weight, bias, None, None)[0]) < 1e-5


def test_numbers_below_0_are_padding():
    """causal-conv1d's kernel leaves 0 there, whatever x has."""
    x, weight, bias, _ = drawn(T=12)
    x[0, 8:] = float("nan")
    y = causal_conv1d_fn(x.transpose(1, 2), weight, bias, torch.tensor([[-1] * 3 + [0] * 5 + [-1] * 4]), target="triton")
    assert (y[..., :3] == 0).all() and (y[..., 8:] == 0).all()
    assert rms_error(y[0, :, 3:8].T, by_torch(x[0, 3:8], weight, bias, None, None)[0]) < 1e-5


def test_a_residual_of_another_dtype_leaves_that_of_x():
    x, weight, bias, _ = drawn(T=12, dtype="float16")
    residual = x.flip(1).float() / 3
    y, _ = causal_conv1d(x, weight, bias, residual, target="triton")
    assert y.dtype == x.dtype and rms_error(y[0], by_torch(x[0], weight, bias, None, None)[0] + residual[0]) < 5e-3


@pytest.mark.parametrize("slots", [None, torch.tensor([2, 0])])
def test_states_that_share_elements_are_refused(slots):
    x, weight, bias, state = drawn(T=2, N=1)
    state = state.expand(2 if slots is None else 3, -1, -1)
    was = state.clone()
    with pytest.raises(ValueError, match=r"conv_state: got strides .*; accepted: elements that do not overlap"):
        causal_conv1d_update(x[0], state, weight, bias, conv_state_indices=slots, target="triton")
    assert torch.equal(state, was)


@pytest.mark.parametrize("device, target, has, want", [
    ("cuda", "auto", ("triton", "tilelang"), "triton"), ("cuda", "auto", ("tilelang",), "tilelang"),
    ("cuda", "tilelang", ("triton", "tilelang"), "tilelang"), ("cpu", "auto", ("triton", "tilelang"), "tilelang")])
def test_on_a_gpu_triton_comes_first(monkeypatch, device, target, has, want):
    monkeypatch.setattr(convolution, "runs", lambda target, device: target in has)
    monkeypatch.setattr(convolution, "choose", lambda device, target: "tilelang")
    assert convolution._target(device, target) == want


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_steps(tokens, pool):
    """tokens: 0 for x without an axis of them."""
    x, weight, bias, _ = drawn(T=2 * max(tokens, 1))
    state = torch.randn(6 if pool else 2, 64, 5)
    slots, before = (torch.tensor([4, 1]), state.clone()) if pool else (None, state.clone())
    rows = x[0].unflatten(0, (2, -1)).transpose(1, 2)
    given = rows if tokens else rows[..., 0]
    y = causal_conv1d_update(given, state, weight, bias, "silu", conv_state_indices=slots, target="triton")
    assert y.shape == given.shape
    for n in range(2):
        at = slots[n] if pool else n
        want, _ = by_torch(rows[n].T, weight, bias, before[at, :, 1:], "silu")
        assert rms_error(y[n].reshape(64, -1).T, want) < 1e-5
        assert torch.equal(state[at], torch.cat([before[at], rows[n]], -1)[:, -5:])
    if pool:
        assert torch.equal(state[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@pytest.mark.parametrize("slots", [[4, -1, 0], [-1, -1, 5], [-1, -1, -1]])
def test_steps_of_sequences_that_are_skipped(slots):
    """-1 pads a batch, as in causal-conv1d: nothing is written, not to the last slot either, and y is 0."""
    x, weight, bias, _ = drawn(T=3)
    state = torch.randn(6, 64, 4)
    before = state.clone()
    y = causal_conv1d_update(x[0], state, weight, bias, "silu", conv_state_indices=torch.tensor(slots), target="triton")
    for n, at in enumerate(slots):
        if at < 0:
            assert not y[n].any()
            continue
        assert rms_error(y[n:n + 1], by_torch(x[0, n:n + 1], weight, bias, before[at], "silu")[0]) < 1e-5
        assert torch.equal(state[at], torch.cat([before[at, :, 1:], x[0, n, :, None]], -1))
    rest = [n for n in range(6) if n not in slots]
    assert torch.equal(state[rest], before[rest])


@pytest.mark.parametrize("pool", [False, True])
def test_gradients_of_a_step(pool):
    """The state is overwritten, and the gradient needs what it was."""
    x, weight, bias, _ = drawn(T=2)
    leaves = [y.requires_grad_() for y in (x, weight, bias)]
    state = torch.randn(4 if pool else 2, 64, 4)
    slots, before = (torch.tensor([3, 1]), state[[3, 1]]) if pool else (None, state.clone())
    y = causal_conv1d_update(x[0], state, weight, bias, "silu", conv_state_indices=slots, target="triton")
    wide = [y.detach().double().requires_grad_() for y in leaves]
    want = torch.cat([by_torch(wide[0][0, n:n + 1], wide[1], wide[2], before[n], "silu")[0] for n in range(2)])
    for got, exact in zip(torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(want.square().sum(), wide),
                          strict=True):
        assert rms_error(got, exact) < 1e-5


@pytest.mark.parametrize("B, T", [(0, 4), (2, 0)])
def test_numbers_of_no_sequence(B, T):
    x, weight, bias, _ = drawn(T=4)
    y = causal_conv1d_fn(x.transpose(1, 2)[:0].new_zeros(B, 64, T), weight, bias, torch.zeros(B, T, dtype=torch.int32),
                         target="triton")
    assert y.shape == (B, 64, T)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("W, activation", [(4, "silu"), (2, None)])
def test_gradients(target, W, activation):
    """By x, weight, bias and the initial state, with gradients of y and of the final state."""
    leaves = [y.requires_grad_() for y in drawn(W=W)]
    wide = [y.detach().double().requires_grad_() for y in leaves]
    x, weight, bias, state = leaves
    made = causal_conv1d(x, weight, bias, None, state, True, activation, cu_seqlens=ENDS, target=target)
    want = packed(*wide, activation)
    gen = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=gen) for y in made]
    for n, (got, exact) in enumerate(zip(torch.autograd.grad(made, leaves, seeds),
                                         torch.autograd.grad(want, wide, [s.double() for s in seeds]), strict=True)):
        assert rms_error(got, exact) < 1e-5, n


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
def test_positional_arguments_are_flas():
    (fla,) = importlib.util.find_spec("fla").submodule_search_locations
    text = (Path(fla) / "modules" / "causal_conv1d" / "ops.py").read_text()
    (want,) = (f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == "causal_conv1d")
    ours = inspect.signature(gdn_codegen.causal_conv1d).parameters.values()
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == [a.arg for a in want.args.args]


@pytest.mark.slow
def test_compiled_whole():
    """torch.compile builds the page's op while it traces, also in the first call, and takes the call as one node."""
    x, weight, bias, state = drawn(T=20, N=1, D=32)
    f = lambda x, state: causal_conv1d(x, weight, bias, None, state, True, "silu", target="triton", chunk_size=32)
    whole = torch.compile(f, fullgraph=True, backend="aot_eager")
    for given in (x, x.clone().requires_grad_()):
        for got, want in zip(whole(given, state), f(given, state), strict=True):
            assert torch.equal(got, want)
