"""moved_rows: products with pieces of an identity for ops that move rows of tiles, on vector cores that hold some rows each."""
from dataclasses import replace

import pytest
import torch

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.builder import algorithm, carried, delay, latest
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.passes import pipelines
from gdn_codegen.passes.loops.hoist import hoist
from gdn_codegen.schedule.schedule import ScheduleError, varied
from gdn_codegen.targets import lower

SIZES, PROBLEM = {"C": 16, "K": 32, "V": 32}, Problem([1, 0, 15, 17, 40], 2, 2)
KINDS = {"delay", "advance", "latest"}


def run(p, page):
    """What a program makes of random inputs, the same for all programs of a page."""
    gen = torch.Generator().manual_seed(0)
    traced = Interpreter(replace(page.trace(), dims=tuple(SIZES.items())), PROBLEM, {})
    x = {t.name: torch.randn(traced.shape(t), generator=gen, dtype=torch.float64) for t in page.trace().role("input")}
    return Interpreter(p, PROBLEM, {"linear": 0.0}).run(x)


def same(p, page):
    got, want = (run(q, page) for q in (p, replace(page.trace(), dims=tuple(SIZES.items()))))
    return all((got[n] - want[n]).abs().max() < 1e-9 for n in want)


@pytest.mark.parametrize("name, changes", [
    ("causal_conv1d", {}), ("causal_conv1d", {"channel_slots": 2}), ("causal_conv1d", {"cache_masks": False}),
    ("causal_conv1d", {"prefetch": "no"}), ("causal_conv1d.gradient", {}), ("causal_conv1d.gradient", {"channel_slots": 2})])
def test_every_pass_keeps_the_meaning(name, changes):
    """Also prefetch, which must not store the next chunk's rows where this chunk's are read for a state."""
    page, programs = find(name), []
    see = lambda done, before, p, c: programs.append((done, p))
    pipelines.observers.append(see)
    try:
        lower(page.trace(), "pto", varied("gradient" if "." in name else "fused", **changes), SIZES, "float32")
    finally:
        pipelines.observers.remove(see)
    start = [done for done, _ in programs].index("moved_rows")
    for done, p in programs[start:]:
        assert same(p, page), done
    assert not [o.kind for k in programs[start][1].kernels for o in k.ops if o.kind in KINDS]


def test_pieces_of_one_tile_are_hoisted_apart():
    """Each delay reads another piece of the identity."""
    seen = []
    see = lambda done, before, p, c: seen.append(before) if done == "arrange" else None
    pipelines.observers.append(see)
    try:
        lower(find("causal_conv1d").trace(), "pto", varied("fused"), SIZES, "float32")
    finally:
        pipelines.observers.remove(see)
    (k,) = seen[0].kernels
    done = hoist(k, {"moving_mask"})
    pieces = [o.attr("piece") for o in walk(done.body) if o.attr("tensor") == "moving_mask"]
    assert sorted(pieces) == [(1, "C"), (2, "C"), (3, "C")]


def test_a_delay_longer_than_the_identity_is_wide_is_refused():
    @algorithm(x="HV C K", s=carried("K"))
    def far(x, s):
        return delay(x, *17 * [s]), latest(x)
    with pytest.raises(ScheduleError, match=r"delay: got 17 tokens .*up to 16"):
        lower(far.trace(), "pto", varied("fused"), SIZES, "float32")
