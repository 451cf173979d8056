"""Kernels without room on a core: an order with few live values, and tiles that are loaded again for each reader."""

import pytest
import torch
from reference import rms_error

from gdn_codegen.derived_pages import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.loops.depth_first import depth_first
from gdn_codegen.passes.loops.reload import reload
from gdn_codegen.passes.storage.arrange import lacking
from gdn_codegen.schedule import varied
from gdn_codegen.targets import lower

LARGE, SMALL = {"C": 64, "K": 128, "V": 128}, {"C": 16, "K": 16, "V": 32}


def before_arrange(page, sizes, schedule="fused", dtype="float32"):
    """The program that `arrange` gets."""
    seen = []
    pipelines.observers.append(see := lambda name, before, p, c: seen.append(p) if name == "feed" else None)
    try:
        lower(page.trace(), "pto", varied(schedule), sizes, dtype, upto="feed")
    finally:
        pipelines.observers.remove(see)
    return seen[0]


@pytest.mark.parametrize("name", ["gated_delta_rule.gradient", "gla"])
@pytest.mark.parametrize("again", [False, True])
def test_the_meaning_stays(name, again):
    """Each op after all that it reads, and after all that read what it overwrites."""
    page, lengths = find(name), [1, 0, 20]
    p = before_arrange(page, SMALL)
    gen = torch.Generator().manual_seed(0)
    sizes = {**SMALL, "HV": 2}
    x = {}
    for t in p.role("input"):
        rows = {"token": (sum(lengths),), "sequence": (len(lengths),), "slot": (sum(lengths) // 16 + len(lengths),)}[t.index]
        x["initial_state" if t.name == "S_0" else t.name] = -torch.rand(
            *rows, 1 if t.heads == "H" else 2, *(sizes[d] for d in t.dims if d != "C"), generator=gen, dtype=torch.float64) / 4
    problem = Problem(lengths, 1, 2)

    def order(k):
        return depth_first(p, reload(k, ASCEND_A2) if again else k, ASCEND_A2)
    q = p.map_kernels(order)
    assert q != p
    want, got = (interpret(y, problem, x, {"scale": 0.5}) for y in (p, q))
    assert all(rms_error(got[n], want[n]) < 1e-12 for n in want)


def test_each_makes_room():
    """A kernel for all gradients of Gated DeltaNet with a state of 128 x 128 fits with both only."""
    page, s = find("gated_delta_rule.gradient"), varied("fused")
    p = before_arrange(page, LARGE, dtype="bfloat16")
    (k,) = p.kernels
    plain, first, both = (lacking(p, x, s, ASCEND_A2) for x in (k, depth_first(p, k, ASCEND_A2),
                                                               depth_first(p, reload(k, ASCEND_A2), ASCEND_A2)))
    assert plain > first > both == 0
    assert lower(page.trace(), "pto", s, LARGE, "bfloat16").stage == "checked"
