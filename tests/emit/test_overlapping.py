"""Kernels that start before the one before has ended: each waits before it touches memory that another one uses."""
import re

import pytest

from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import named, varied

ARCH = "sm_90a"
WAIT, START = "t.wait_for_earlier_kernels()", "t.start_next_kernel()"
PLANS = {"walk": named("walk", ARCH), "fused_walk": named("fused_walk", ARCH), "decay": varied("walk", ARCH, partition="decay"),
         "exact": varied("fused_walk", ARCH, partition="exact")}
#: Tensors that no kernel writes, and that say which rows an instance has.
INDICES = r"cu_seqlens|state_indices_in"


def kernels(b):
    """The texts of a module's kernels, in the order in which they are launched."""
    text = render(b)
    return [x.split("    return ", 1)[0] for x in re.split(r"\n(?=def \w+_kernel\(t\))", text)[1:]]


@pytest.mark.parametrize("plan", PLANS)
def test_a_kernel_waits_before_it_reads_or_writes(plan):
    texts = kernels(Build("tilelang", 64, schedule=PLANS[plan], dtype="bfloat16", arch=ARCH))
    assert len(texts) > 1
    for n, text in enumerate(texts):
        assert (text.count(WAIT), text.count(START)) == (n > 0, n + 1 < len(texts))
        body = text[text.index("with t.kernel("):]
        before = body[:body.index(WAIT)] if n else ""
        assert not re.search(rf"\b(?!{INDICES})\w+(_in|_out|_ws|S_\w+)\[", before)
        assert n in (0, len(texts) - 1) or text.index(WAIT) < text.index(START)


def test_other_builds_start_kernels_one_after_the_other():
    for b in (Build("tilelang", 64), Build("triton", 64), Build("pto", 64)):
        assert lowered(b).launch == "kernels" and WAIT not in render(b)
