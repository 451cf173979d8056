"""Which kernels of TileLang CUDA's driver starts without TVM, and that they give the same bits. Run with: pytest -m device"""
from pathlib import Path

import pytest
import torch
from reference import expected, rms_error
from test_op_on_gpu import HERE, compiled, decode, given, step  # noqa: F401, the fixture is used by its name

from gdn_codegen.ops import chunk_gated_delta_rule
from gdn_codegen.runtime.call import launch, native_launcher

pytestmark = [pytest.mark.device, pytest.mark.skipif(
    not torch.cuda.is_available() or "tilelang" not in HERE or bool(torch.version.hip),
    reason="needs TileLang and CUDA's driver")]


@pytest.fixture
def made(monkeypatch):
    """What launchers are made from, and `by_driver`: how many of their kernels the driver starts."""
    seen, library = [], native_launcher._library(Path("nothing was compiled ahead"))
    monkeypatch.setattr(native_launcher, "_library", lambda ahead: lambda about: seen.append(about) or library(about))
    launch.forget()
    yield seen
    launch.forget()


@pytest.mark.parametrize("where", range(torch.cuda.device_count()))
@pytest.mark.parametrize("captured", [False, True])
def test_the_driver_starts_the_kernel_of_a_decoding_step(captured, where, made):
    """On each device, also if a graph is captured while the launcher is made."""
    with torch.cuda.device(where):
        want = []
        for n in range(3):
            launch.forget()
            x = step(64, seed=n)
            want.append((decode("tilelang", x)[0], x["initial_state"]))
        for n in range(3):
            x, graph = step(64, seed=n), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            if captured:
                with torch.cuda.graph(graph):
                    o, _ = decode("tilelang", x)
                graph.replay()
            else:
                o, _ = decode("tilelang", x)
            assert torch.equal(o, want[n][0]) and torch.equal(x["initial_state"], want[n][1])
        assert [about["by_driver"] for about in made] == [1]


@pytest.mark.parametrize("schedule", [None, "fused", "staged"])
def test_the_driver_starts_kernels_that_need_a_grid_and_parameters_alone(schedule, made):
    """Kernels with descriptors of tensors, and those that start while the one before them runs, stay with TVM."""
    from tilelang.contrib import nvcc
    x, a, S, ends = given()
    ask = dict(initial_state=S, output_final_state=True, cu_seqlens=ends, target="tilelang", schedule=schedule)
    want = chunk_gated_delta_rule(*a, **ask)
    (kept,) = launch._kept.values()
    for _ in range(3):
        got = chunk_gated_delta_rule(*a, **ask)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    m = kept.module._launcher
    arch = m.arch or "sm_" + nvcc.get_target_arch(torch.cuda.get_device_capability())
    texts = [m.compiled(name, arch).get_kernel_source() for name, *_ in kept.module.TABLES.kernels]
    plain = [not any(word in text for word in ("CUtensorMap", "cudaGridDependencySynchronize")) for text in texts]
    print(schedule, m.arch, plain, made[0]["by_driver"])
    assert made[0]["by_driver"] == sum(plain)
    assert rms_error(got[0][0].cpu(), expected(x)[0]) < 2e-2
