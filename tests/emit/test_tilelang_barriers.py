"""Barriers of a block that TileLang puts into kernels of one agent stand where all threads come."""
import re
from dataclasses import replace

import pytest
from reference import module

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import SCHEDULES

tilelang = pytest.importorskip("tilelang")

BUILDS = {f"{name}-{dims}-{heads}": Build("tilelang", chunk, schedule=replace(SCHEDULES[name], value_heads=heads),
                                          head_dim_k=dims, head_dim_v=dims)
          for name, chunk, dims, heads in (
              ("walk", 64, 64, 1), ("walk", 64, 128, 4),
              ("staged", 64, 64, 2), ("replay", 64, 64, 1), ("replay", 32, 64, 4), ("fused", 64, 64, 1))}
#: TileLang takes longest for these.
LONG = ("walk-128-4", "staged-64-2", "replay-64-4")


def cuda(m, name):
    target = {"kind": "cuda", "arch": "sm_90a"}
    with tilelang.tvm.transform.PassContext(config=m._launcher.passes[name]), tilelang.tvm.target.Target(target):
        return tilelang.lower(m._launcher.program(name), target=target).kernel_source


def astray(source):
    """Barriers inside a branch that not all threads of a block take: whose condition names a thread."""
    open_, found = [], []
    for line in source[source.rindex('extern "C" __global__'):].splitlines():
        if re.search(r"__sync(threads|_thread)", line) and any("threadIdx" in x for x in open_):
            found.append(line.strip())
        closed = [open_.pop() for _ in range(line.count("}"))]
        asked = line if re.search(r"\bif\b", line) else closed[-1] if "else" in line else ""  # the other branch of a question
        open_ += [asked] * line.count("{")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in BUILDS])
def test_all_threads_come_to_each_barrier(name):
    m = module(render(BUILDS[name]))
    for k in m._launcher.kernels:
        source = cuda(m, k)
        assert "__syncthreads" in source and not astray(source), k


def test_those_in_branches_of_some_threads_are_found():
    """TileLang put one before an inverse that stood in a branch of one warp, over a tile that had just been filled."""
    lines = ('extern "C" __global__ void f() {', "if (length < 64) {", "__syncthreads();",
             "if ((((int)threadIdx.x) >> 5) == 0) {", "__syncthreads();", "} else {", "tl::__sync_thread_partial(3, 32);", "}",
             "__syncthreads();", "} else {", "__syncthreads();", "}", "}")
    assert astray("\n".join(lines)) == ["__syncthreads();", "tl::__sync_thread_partial(3, 32);"]
