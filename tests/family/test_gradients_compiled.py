"""Triton's gradients, compiled for GPUs that are not here, NVIDIA's and AMD's."""
from __future__ import annotations

from pathlib import Path

import pytest

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.call.gradient_builds import candidates
from gdn_codegen.runtime.load import write

pytest.importorskip("triton")
from gdn_codegen.tools.check_triton import USUAL, compiled


def errors(b: Build, folder: Path) -> list[str]:
    """Why kernels of the modules that a gradient takes on a GPU do not compile, or do not fit. b: as for `candidates`."""
    builds = next(x for x in candidates(b, "cuda", "sm_90", b.chunk) if all(map(choose.fits, x.all)))
    return [f"{x.name}: {c.remark}" for x in builds.all for c in compiled(write(x, folder), USUAL) if c.error]


def test_a_small_gradient(tmp_path: Path) -> None:
    assert not errors(Build("triton", 16, algorithm="mamba2", dtype="bfloat16", head_dim_k=16, head_dim_v=16), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page, chunk", [("gated_delta_rule", 64), ("kimi_delta_attention", 16), ("mamba2", 64)])
def test_gradients_of_real_sizes(page: str, chunk: int, tmp_path: Path) -> None:
    assert not errors(Build("triton", chunk, algorithm=page, dtype="bfloat16"), tmp_path)
