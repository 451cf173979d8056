"""Triton's tensor descriptors: the same results, ends of sequences kept, compiled for GPUs with and without such a unit."""
from dataclasses import replace

import pytest
import torch
from reference import TOLERANCE, call, check, expected, in_parts, module, problem, rms_error

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import named

triton = pytest.importorskip("triton")
LENGTHS = [40, 0, 17, 1, 64]


def build(schedule="walk", sizes=(16, 32, 32), dtype="float16", layout="bthd", **changes):
    plan = replace(named(schedule), **{"descriptors": True, **changes})
    return Build("triton", sizes[0], layout, "gated_delta_rule", plan, dtype, *sizes[1:])


@pytest.mark.slow
@pytest.mark.parametrize("changes, dtype, layout", [
    ({}, "float16", "bthd"), ({}, "bfloat16", "bhtd"),
    ({"partition": "decay", "longest_first": True}, "float32", "bthd"),
    ({"partition": "decay", "longest_first": True}, "float16", "bhtd"),
    ({"schedule": "prepared", "v_block": 16}, "bfloat16", "bthd"),
    ({"schedule": "prepared", "v_block": 16}, "float32", "bhtd")], ids=str)
def test_the_same_results(changes, dtype, layout):
    fn = in_parts(function(build(dtype=dtype, layout=layout, **changes)), 1)
    assert "_rows.load([t, 0])" in open(fn.__globals__["__file__"]).read()
    check(fn, problem(LENGTHS, 1, 2, 32, 32, getattr(torch, dtype), gate=-0.1), TOLERANCE[dtype], layout=layout)
    rows = problem([33, 33], 1, 2, 32, 32, getattr(torch, dtype), initial=False)
    check(fn, rows, TOLERANCE[dtype], layout=layout, batched=True)
    in_parts(fn, 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_they_end_with_their_sequence(layout):
    """Rows of the next one are no number, and enter where descriptors are longer."""
    b, x = build(layout=layout, partition="decay"), problem([40, 24], 1, 1, 32, 32)
    x["k"][40:], x["q"][40:] = float("nan"), float("nan")
    want_o, want_S = expected(x)
    for text, holds in ((render(b), True), (render(b).replace("[length, K]", "[length + 8, K]"), False)):
        o, S = call(in_parts(module(text).chunk_gated_delta_rule, 1), x, layout=layout)
        first = rms_error(o[:40], want_o[:40]) <= 5e-3 and rms_error(S[:1], want_S[:1]) <= 5e-3
        assert first == holds


@pytest.mark.slow
def test_compiled_for_gpus():
    from gdn_codegen.runtime.load import cached
    from gdn_codegen.tools.check_triton import compiled
    for partition in (None, "decay"):
        path = cached(build(sizes=(32, 128, 128), stages=3, partition=partition))
        found = compiled(path, ("sm_90", "gfx942", "gfx950"), ["o_S"])
        assert len(found) == 3 and not [c.remark for c in found if c.error]


def test_memory_for_descriptors_is_the_callers_where_it_gives_some():
    m = module(render(build()))
    before = triton.runtime._allocation._allocator.get()
    try:
        triton.set_allocator(triton.runtime._allocation.NullAllocator())
        m._give_memory()
        assert triton.runtime._allocation._allocator.get() is m._scratch
        own = lambda size, alignment, stream: None
        triton.set_allocator(own)
        m._give_memory()
        assert triton.runtime._allocation._allocator.get() is own
    finally:
        triton.set_allocator(before)
    assert m._launcher.descriptors and not module(render(build(descriptors=False)))._launcher.descriptors
