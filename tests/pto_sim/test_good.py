"""Kernels that obey every rule run to the end, and their numbers are right."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gdn_codegen.pto_sim import BOTH, INPUT, OUTPUT, WORKSPACE, PtoSimError, driver_text, launch, trace


@pytest.fixture(scope="module")
def lib(compiled):
    return compiled("good")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("concurrent", [0, 1])
def test_add(lib, blocks, concurrent):
    a, b = torch.randn(2, 4096 * 7)
    a, b, c = a.contiguous(), b.contiguous(), torch.empty(4096 * 7)
    launch(lib, "add", blocks, [a, b, c], [INPUT, INPUT, OUTPUT], [a.numel()], concurrent=concurrent)
    assert torch.equal(c, a + b)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("ta,tb,how", [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)])
def test_product(lib, dtype, ta, tb, how):
    kind, result = {"f16": (torch.float16, torch.float32), "bf16": (torch.bfloat16, torch.bfloat16),
                    "f32": (torch.float32, torch.float16)}[dtype]
    a, b = torch.randn(32, 64).to(kind), torch.randn(64, 48).to(kind)
    want = (a.double() @ b.double()).to(result)
    stored_a = a.T.contiguous() if ta else a
    stored_b = b.T.contiguous() if tb else b
    c = torch.empty(32, 48, dtype=result)
    launch(lib, f"product_{dtype}", 1, [stored_a, stored_b, c], [INPUT, INPUT, OUTPUT], [ta, tb, how])
    torch.testing.assert_close(c, want)


def test_chain(lib):
    a, b, c = (torch.randn(64, 64).half() / 8 for _ in range(3))
    out = torch.empty(64, 64)
    launch(lib, "chain", 1, [a, b, c, out], [INPUT] * 3 + [OUTPUT])
    torch.testing.assert_close(out, (a.float() @ b.float()).half().float() @ c.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("blocks,concurrent", [(1, 1), (4, 1), (4, 0)])
@pytest.mark.parametrize("shuffle", [0, 1, 7])
def test_handshake(lib, blocks, concurrent, shuffle):
    n = 3
    x, y = torch.randn(blocks, n, 64, 64).half() / 8, torch.randn(blocks, 64, 64).half() / 8
    w, out = torch.rand(blocks, 64), torch.empty(blocks, n, 64, 64)
    ws, wp = torch.empty(blocks, 64, 64), torch.empty(blocks, 64, 64, dtype=torch.float16)
    launch(lib, "handshake", blocks, [x, y, w, ws, wp, out], [INPUT] * 3 + [WORKSPACE] * 2 + [OUTPUT], [n],
           concurrent=concurrent, shuffle=shuffle)
    s = x.float() @ y.float()[:, None]
    p = (torch.exp(-(s**2)) * w[:, None, :, None]).half().float()
    torch.testing.assert_close(out, p @ y.float()[:, None], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("rows", [64, 63, 40, 32, 17, 1])
def test_tail(lib, rows):
    a = torch.randn(rows, 64).half()
    out, sums = torch.empty(64, 64), torch.empty(64)
    launch(lib, "tail", 1, [a, out, sums], [INPUT, OUTPUT, OUTPUT], [rows])
    torch.testing.assert_close(out, a.float().T @ a.float(), atol=1e-4, rtol=1e-4)
    want = torch.zeros(64)
    want[:rows] = a.float().sum(1)
    torch.testing.assert_close(sums, want, atol=1e-5, rtol=1e-5)


def test_vectors(lib):
    x, y = torch.randn(16, 32), torch.rand(16, 32) + 0.5
    sums, line = x.sum(1, keepdim=True), x.sum(0, keepdim=True)
    moved = x.clone()
    moved.view(-1)[3] = x.view(-1)[5] + 1
    want = [x - y, x / y, torch.maximum(x, y), torch.minimum(x, y), x + 2, x.clamp(min=0.25), x.clamp(max=0.25),
            y.log(), y.sqrt(), y.rsqrt(), x.T, x - sums, sums.expand(16, 32), x * sums, x + sums, x / sums,
            line.expand(16, 32), x * line, x - line, torch.maximum(x, y), x, moved * 2]
    out = torch.empty(len(want), 16 * 32)
    launch(lib, "vectors", 1, [x, y, out], [INPUT, INPUT, OUTPUT])
    for i, w in enumerate(want):
        torch.testing.assert_close(out[i], w.reshape(-1), atol=1e-5, rtol=1e-4, msg=lambda m, i=i: f"result {i}: {m}")


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_device_wide_barrier(lib, blocks):
    slots, out = torch.empty(blocks, 8), torch.empty(blocks, 8)
    launch(lib, "everyone", blocks, [slots, out], [WORKSPACE, OUTPUT])
    assert torch.equal(out, torch.full((blocks, 8), blocks * (blocks + 1) / 2))


def test_device_wide_barrier_needs_all_blocks_live(lib):
    slots, out = torch.empty(2, 8), torch.empty(2, 8)
    with pytest.raises(PtoSimError, match="one after another"):
        launch(lib, "everyone", 2, [slots, out], [WORKSPACE, OUTPUT], concurrent=0)


def test_trace_lists_instructions(lib):
    a, c = torch.randn(4096), torch.empty(4096)
    launch(lib, "add", 1, [a, a, c], [INPUT, INPUT, OUTPUT], [4096], trace=1)
    steps = [s for s in trace(lib) if s.core == "vector 0"]
    names = [s.name for s in steps]
    assert names[:5] == ["TLOAD", "TLOAD", "set_flag", "wait_flag", "TADD"]
    add = steps[4]
    assert "TADD(x, x, y);" in (Path(__file__).parent / "good.cpp").read_text().splitlines()[add.line - 1]
    assert (add.pipe, add.rows, add.cols, add.dtype, add.block) == ("V", 32, 128, "float", 0)
    assert steps[2].extra == (5, 2, 0)


def test_wrong_arguments_are_refused(lib):
    a = torch.zeros(4096)
    with pytest.raises(PtoSimError, match="takes 3 pointers, not 2"):
        launch(lib, "add", 1, [a, a], [INPUT, INPUT], [1])
    with pytest.raises(PtoSimError, match="takes 1 integers, not 0"):
        launch(lib, "add", 1, [a, a, a], [BOTH, BOTH, BOTH], [])
    with pytest.raises(PtoSimError, match="share memory"):
        launch(lib, "add", 1, [a, a, a], [INPUT, INPUT, OUTPUT], [4096])
    with pytest.raises(PtoSimError, match="no option"):
        launch(lib, "add", 1, [a, a, a], [INPUT] * 3, [0], nonsense=1)


def test_driver_text_names_the_source_and_its_kernels():
    text = driver_text("k.cpp", ["one", "two"])
    assert '#define PTO_SIM_SOURCE "k.cpp"' in text
    assert "PTO_SIM_KERNEL(one) PTO_SIM_KERNEL(two)" in text
