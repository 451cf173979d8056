"""Generated ops on a CUDA GPU. Run with: pytest -m device tests/device"""
import pytest
import torch
from reference import call, check, problem

from gdn_codegen.runtime.build import TARGETS, Build
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import SCHEDULES

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in TARGETS if t != "pto" and runs(t, "cuda")]
#: float32 operands pass the matrix units of a GPU as tf32 under TileLang.
TOLERANCE = {("triton", "float32"): 1e-5, ("tilelang", "float32"): 2e-3}


def on_gpu(fn):
    def run(*tensors, initial_state, cu_seqlens, **options):
        move = lambda t: None if t is None else t.cuda()
        o, S = fn(*map(move, tensors), initial_state=move(initial_state), cu_seqlens=move(cu_seqlens), **options)
        return o.cpu(), S.cpu()
    return run


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("target", HERE)
def test_schedules(target, schedule, dtype):
    size = 128 if dtype != "float32" else 64
    b = Build(target, 64, "bthd", "gated_delta_rule", schedule, dtype, size, size)
    fn = on_gpu(function(b))
    limit = TOLERANCE.get((target, dtype), 5e-3)
    for lengths, H, HV in (([1], 1, 1), ([130, 0, 65], 1, 2), ([447], 2, 4), ([64, 64], 1, 1)):
        x = problem(lengths, H, HV, size, size, getattr(torch, dtype), gate=-0.1, seed=len(lengths))
        check(fn, x, limit)
    check(fn, problem([70, 70], 1, 2, size, size, getattr(torch, dtype), initial=False), limit, batched=True)


@pytest.mark.parametrize("chunk", [16, 32, 128])
@pytest.mark.parametrize("target", HERE)
def test_chunks_and_head_major_layout(target, chunk):
    fn = on_gpu(function(Build(target, chunk, "bhtd", "gated_delta_rule", "replay", "float16", 64, 64)))
    check(fn, problem([130, 0, 65], 1, 2, 64, 64), layout="bhtd")


@pytest.mark.parametrize("target", HERE)
def test_same_bits_every_time(target):
    fn = on_gpu(function(Build(target)))
    x = problem([333, 64], 2, 4, 128, 128, gate=-0.05)
    first = call(fn, x)
    for _ in range(20):
        again = call(fn, x)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
