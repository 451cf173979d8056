"""summed_columns: fragments of which a warp has whole columns."""
from dataclasses import replace

import pytest

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.ops import OPS
from gdn_codegen.passes.storage.summed_columns import by_columns
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates
from gdn_codegen.schedule.contract import Contract


@pytest.fixture(scope="module")
def kernel():
    """The kernel that computes the gradient by a layer's gates, and by their numbers and vectors of a head."""
    layer = Contract.parse("g=raw,beta=sigmoid,q=l2norm,k=l2norm")
    b = asked_of(Build("tilelang", algorithm="kimi_delta_attention", contract=layer, dtype="bfloat16", head_dim_k=128,
                       head_dim_v=128), True)
    x = next(x for x in candidates(b, "cuda", "sm_90a", 64, True, False, False) if not any(map(unfit, x.all)))
    (k,) = (k for k in lowered(x.gradient).kernels if any(o.attr("tensor") == "d_dt_bias" for o in k.ops))
    return k


def test_sums_that_meet_no_product_are_within_warps(kernel):
    """The derivative of raw gates reads shared memory alone. What the products give is in their own order, and so is its sum."""
    held = {b.name for b in kernel.buffers if b.layout == "columns"}
    home = {o.out: o.buffer for o in kernel.ops if o.out}
    summed = {home[o.args[0]] for o in kernel.ops if o.kind == "column_sum"}
    products = {o.buffer for o in kernel.ops if o.kind in ("matmul", "decayed_blocks")}
    assert len(summed & held) == 3 and len(summed - held) == 1 and not held & products
    fragments = {b.name for b in kernel.buffers if b.space == "fragment" and len(b.shape) == 2}
    for o in kernel.ops:  # a loop over entries has fragments of one order
        if o.buffer in fragments and OPS[o.kind].elementwise:
            read = {home[a] for a in o.args if home.get(a) in fragments}
            assert read <= held if o.buffer in held else not read & held


def test_threads_that_do_not_divide_the_columns(kernel):
    assert by_columns(kernel, SM_90A) and not by_columns(replace(kernel, threads=384), SM_90A)


def test_a_walk_and_agents_have_none(kernel):
    assert not by_columns(replace(kernel, grid="sequences"), SM_90A)
    assert not by_columns(replace(kernel, agents=(object(),)), SM_90A)
