"""Where TileLang's compiler lets buffers share memory, a barrier stands between their uses."""
import re
from dataclasses import replace
from math import prod

import pytest
from reference import module

from gdn_codegen.ir.types import BYTES
from gdn_codegen.passes import pipelines
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import PLAIN, Contract

tilelang = pytest.importorskip("tilelang")

TARGET = {"kind": "cuda", "arch": "sm_90a"}
LAYER = Contract.parse("g=raw,beta=sigmoid,q=l2norm,k=l2norm")
#: A barrier of the block. Sums over warps have one before they write to their buffer.
BARRIER = r"__syncthreads\(\)|NamedBarrier<\d+>[^\n]*, \(&\("


def gradient(page, contract=PLAIN):
    plain = asked_of(Build("tilelang", algorithm=page, contract=contract, dtype="bfloat16", head_dim_k=128, head_dim_v=128), True)
    return next(x for x in candidates(plain, "cuda", "sm_90a", 64, True, False, False) if not any(map(unfit, x.all)))


def forward(page, contract=PLAIN):
    return Build("tilelang", 64, algorithm=page, dtype="bfloat16", head_dim_k=128, head_dim_v=128, arch="sm_90a",
                 contract=contract, schedule=varied("operand_walk", "sm_90a", v_block=64, residuals="@update"))


def cuda(m, name):
    """The CUDA text of a kernel, without the device functions before it."""
    with tilelang.tvm.target.Target(TARGET), tilelang.tvm.transform.PassContext(config=m._launcher.passes[name]):
        source = tilelang.lower(m._launcher.program(name), target=TARGET).kernel_source
    return source[source.rindex('extern "C" __global__'):]


def unordered(source, sizes):
    """Pairs of buffers that share memory, and those of them where no barrier is after the last use of the first and before the
    first use of the second. sizes: bytes of each buffer. Names of the text may end in _. Sums over warps have a buffer of the
    compiler: a float for each of 256 threads, or four."""
    begin = {n: int(x) for n, x in re.findall(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\)", source)}
    text = source[max((m.end() for m in re.finditer(r"void\* \w+ = [^\n]*\n", source)), default=0):]
    barriers = [m.start() for m in re.finditer(BARRIER, text)]
    sizes = sizes | {n: 4096 if re.search(rf"run_batch\(.*\b{n}\b", text) else 1024 for n in begin if n.startswith("workspace")}
    sizes = {n: sizes.get(n) or sizes[n.rstrip("_")] for n in begin}
    uses = {n: [m.start() for m in re.finditer(rf"(?<![.\w]){n}\b", text)] for n in begin}
    order = sorted((n for n in uses if uses[n]), key=lambda n: uses[n][0])
    pairs = [(x, y) for i, x in enumerate(order) for y in order[i + 1:]
             if begin[x] < begin[y] + sizes[y] and begin[y] < begin[x] + sizes[x]]
    return pairs, [(x, y) for x, y in pairs if not any(uses[x][-1] < b < uses[y][0] for b in barriers)]


def of_build(b):
    """For each kernel its name, pairs that share memory, and those without a barrier. Buffers of several agents share none."""
    m = module(render(b))
    for k in lowered(b).kernels:
        sizes = {x.name: x.slots * prod((*x.shape[:-1], x.shape[-1] + x.pad)) * BYTES[x.dtype] for x in k.buffers
                 if x.shape and x.dtype in BYTES}
        pairs, missing = unordered(cuda(m, k.name), sizes)
        assert not (k.agents and pairs), k.name
        yield k.name, pairs, missing


@pytest.mark.slow
@pytest.mark.parametrize("build", [
    pytest.param(lambda: gradient("kimi_delta_attention", LAYER).gradient, id="gradient of KDA, as layers call it",
                 marks=pytest.mark.long),
    pytest.param(lambda: forward("kimi_delta_attention", LAYER), id="KDA, as layers call it"),
    pytest.param(lambda: gradient("gated_delta_rule_2").gradient, id="gradient of GDN-2", marks=pytest.mark.long),
])
def test_a_barrier_stands_between_buffers_that_share_memory(build):
    found = [*of_build(build())]
    assert not [x for x in found if x[2]] and any(pairs for _, pairs, _ in found)


@pytest.mark.slow
@pytest.mark.long  # of TileLang, not of this package
def test_the_compiler_misses_a_barrier_without_the_pass(monkeypatch):
    """A copy would overwrite an operand that another warp group still reads. If this fails, TileLang does not need the pass."""
    monkeypatch.setattr(pipelines, "reused_memory", lambda p, device: p)
    lowered.cache_clear()
    b = gradient("kimi_delta_attention", LAYER).gradient
    apart = tuple(tuple(x for x in g if x != "@elementwise") for g in b.plan.kernels)
    found = [*of_build(replace(b, schedule=replace(b.plan, kernels=apart)))]
    lowered.cache_clear()
    assert [x for x in found if x[2]]


def test_missing_barriers_are_found():
    head = "void* a = ((void*)((char*)buf_dyn_shmem + 0));\nvoid* b = ((void*)((char*)buf_dyn_shmem + 64));\n"
    for between, missing in (("", [("a", "b")]), ("__syncthreads();\n", [])):
        text = f"{head}x = a[0];\n{between}b[0] = v.a;\n__syncthreads();\ny = b[0];\n"
        assert unordered(text, {"a": 128, "b": 64}) == ([("a", "b")], missing)
    assert unordered(head + "x = a[0]; y = b[0];", {"a": 64, "b": 64}) == ([], [])
