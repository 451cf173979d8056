"""Blocks of fewer threads than a tile has columns: each thread takes several columns."""
import re

import pytest
from reference import module

from gdn_codegen.runtime.build import Build, lowered, render

tilelang = pytest.importorskip("tilelang")


def columns_of_a_thread(K, V):
    """The threads of `fused`, and how many columns of inverses of diagonal blocks each computes, by the CUDA text."""
    b = Build("tilelang", 64, dtype="float32", head_dim_k=K, head_dim_v=V, schedule="fused")
    (kernel,), launcher = lowered(b).kernels, module(render(b))._launcher
    target = {"kind": "cuda", "arch": "sm_90a"}
    with tilelang.tvm.transform.PassContext(config=launcher.passes[kernel.name]), tilelang.tvm.target.Target(target):
        source = tilelang.lower(launcher.program(kernel.name), target=target).kernel_source
    before = source[:re.search(r"\n *for \(int (\w+) = 0; \1 < 16; \+\+\1\) \{\n *float \w+;\n *if \(\(\1 == ", source).start()]
    loop = re.search(r"for \(int (\w+) = 0; \1 < (\d+); \+\+\1\) \{\n *#pragma unroll$", before)
    return kernel.threads, int(loop[2]) if loop else 1


@pytest.mark.slow
def test_threads_invert_all_columns():
    assert columns_of_a_thread(16, 16) == (32, 2)
