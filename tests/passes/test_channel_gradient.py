"""The schedule `channel_gradient` and what passes do for it: kernels by blocks of K, early terms, numbers in operands, orders in
which few fragments are live, running sums in place, and tiles without bank conflicts."""
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.core import Op, Program
from gdn_codegen.ir.interpret import Interpreter, Problem
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.abi.memory import memory
from gdn_codegen.passes.algebra import decayed_products
from gdn_codegen.passes.algebra.canonical import canonical
from gdn_codegen.passes.algebra.early_terms import early_terms
from gdn_codegen.passes.algebra.operand_scales import operand_scales
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates, undecided
from gdn_codegen.schedule import ScheduleError, named, varied
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.targets import find as target

SIZES = {"C": 8, "K": 4, "V": 6}


def gradient(page: str, **changes: object) -> Program:
    """The lowered gradient of a page for warp groups, as training calls build it."""
    b = Build("tilelang", algorithm=page, dtype="bfloat16", head_dim_k=128, head_dim_v=128, arch="sm_90a")
    back = undecided(asked_of(b, True), True).gradient
    return lowered(replace(back, schedule=varied("channel_gradient", "sm_90a", v_block=64, **changes)))


def products(p: Program) -> list[int]:
    """How many products each kernel has."""
    return [sum(o.kind == "matmul" for o in k.ops) for k in p.kernels]


def test_kernels_over_chunks_by_halves_of_the_channels():
    """Those whose results all have K, and that sum nothing over K. Warps compute decayed products by themselves."""
    p = gradient("kimi_delta_attention")
    assert [(k.grid, k.blocked_dim) for k in p.kernels] == [
        ("chunks", ""), ("chunks", ""), ("sequences", "V"), ("chunks", "K"), ("chunks", ""), ("chunks", "K")]
    assert products(p) == [2, 3, 4, 1, 2, 2]
    assert [k.blocked_dim for k in gradient("kimi_delta_attention", k_block=0).kernels] == ["", "", "V", "", "", ""]


def test_a_kernel_that_needs_nothing_of_the_walk_runs_beside_it():
    """One of its blocks waits for the walk, so that it ends later. So the kernel after it waits for both."""
    b = Build("tilelang", algorithm="kimi_delta_attention.gradient", dtype="bfloat16", arch="sm_90a",
              schedule=varied("channel_gradient", "sm_90a", v_block=64))
    p = lowered(b)
    assert [k.start for k in p.kernels] == ["", "", "", "beside", "", ""]
    assert parse_program(program_text(p)) == p
    waits = [x.body.count("t.wait_for_earlier_kernels()") for x in b.of.emit(p, b.layout, b.heads)]
    assert waits == [0, 1, 1, 1, 1, 1]
    assert "if slot + hv + block == 0:\n                t.wait_for_earlier_kernels()" in b.of.emit(p, b.layout, b.heads)[3].body


def test_a_kernel_that_reads_what_a_walk_writes_waits():
    p = lowered(Build("tilelang", algorithm="gated_delta_rule.gradient", dtype="bfloat16", arch="sm_90a",
                      schedule=varied("gradient", "sm_90a", v_block=64)))
    assert [k.start for k in p.kernels] == ["", "", ""]


def test_blocks_divide_their_dim():
    with pytest.raises(ScheduleError, match="k_block=48 does not divide K=128"):
        gradient("gla", k_block=48)


def test_which_schedule_a_page_takes_first():
    b = asked_of(Build("tilelang", algorithm="gla", dtype="bfloat16", head_dim_k=128, head_dim_v=128), True)
    first = next(candidates(b, "cuda", "sm_90a", 64))
    assert first.gradient.plan.name == "channel_gradient"
    plain = next(candidates(replace(b, algorithm="simple_gla"), "cuda", "sm_90a", 64))
    assert plain.gradient.plan.name == "fused_gradient"
    without = next(candidates(replace(b, algorithm="delta_rule"), "cuda", "sm_90a", 64))
    assert without.gradient.plan.name == "gradient"


def both_results(p: Program, q: Program) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What two programs of one gradient give for the same inputs, in float64."""
    gen = torch.Generator().manual_seed(0)
    given = {}
    for t in p.role("input"):
        first = {"token": (13,), "slot": (2,), "sequence": (1,)}[t.index]
        x = torch.randn(*first, 1, *(SIZES[d] for d in t.dims if d != "C"), generator=gen, dtype=torch.float64)
        given[t.name] = -x.abs() if t.name == "g" else x
    results = [Interpreter(replace(x, dims=tuple(SIZES.items())), Problem([13], 1, 1), {"scale": 0.5}).run(dict(given))
               for x in (p, q)]
    return [(results[0][n], results[1][n]) for n in results[0]]


@pytest.mark.parametrize("change", [early_terms, operand_scales])
def test_passes_keep_the_results(change):
    """Sums in another order, and a number in an operand. Other schedules keep the program."""
    device = target("triton").lowering.device
    p = canonical(memory(find("kimi_delta_attention.gradient").trace(), SIZES, device, PLAIN), named("channel_gradient"))
    done = change(p, named("channel_gradient"))
    assert done != p
    assert change(p, named("gradient" if change is operand_scales else "operand_walk")) is p
    assert all((x - y).abs().max() <= 1e-12 * x.abs().max() for x, y in both_results(p, done))


def test_one_workspace_for_the_early_terms_of_a_sum():
    """Of d_k and of d_g: three terms each would be five workspaces."""
    written = {t.name for t in gradient("kimi_delta_attention").tensors if t.role == "workspace" and t.dims == ("C", "K")}
    assert written == {"G_ws", "scale_exp_G_q_ws", "exp_G_k_ws", "k_decay_to_end_ws", "q_scaled_sum_ws", "k_difference_ws"}


def test_both_products_of_the_walk_add_onto_the_state():
    walk = gradient("kimi_delta_attention").kernels[2]
    assert sum(len(o.args) == 3 for o in walk.ops if o.kind == "matmul") == 3  # and one onto d_U


def test_running_sums_lie_over_the_gates_with_rows_in_different_banks():
    first = gradient("kimi_delta_attention").kernels[0]
    home = {o.out: o.buffer for o in first.ops}
    assert home["g"] == home["G"]
    assert {b.name: b.pad for b in first.buffers if b.pad} == {home["G"]: 8}
    for n, tiles in ((3, {"q", "k", "G"}), (5, {"k", "G", "q_scaled_sum"})):  # in the first kernel products read q and k, too
        k = gradient("kimi_delta_attention").kernels[n]
        assert {b.name for b in k.buffers if b.pad} == {o.buffer for o in k.ops if o.out in tiles}
    with pytest.raises(VerifyError, match="accepted: only in a kernel that batches heads"):
        p = gradient("kimi_delta_attention")
        verify(p.map_kernels(lambda k: replace(k, buffers=tuple(replace(b, pad=8) for b in k.buffers))))


@pytest.fixture
def by_levels(monkeypatch):
    """Builds whose warps compute no decayed product, as those of other GPUs."""
    lowered.cache_clear()
    monkeypatch.setattr(decayed_products, "by_op", lambda *args: (0, None))
    yield
    lowered.cache_clear()


@pytest.mark.usefixtures("by_levels")
def test_no_load_waits_for_the_product_that_transposes_a_tile():
    """The identity has memory of its own, so that all loads but one of the last kernel's first half come before its products."""
    k = gradient("gated_delta_rule_2").kernels[5]
    (eye,) = [o for o in k.ops if o.kind == "eye"]
    homes = [o.buffer for o in k.ops if o.out == eye.out or (o.kind == "cast" and o.args == (eye.out,))]
    assert sum(o.buffer in homes for o in k.ops if o.buffer) == 1
    first = next(n for n, o in enumerate(k.ops) if o.kind == "matmul")
    assert {"k", "G", "b", "S", "d_operand_of_U"} <= {o.out for o in k.ops[:first] if o.kind == "load"}


@pytest.mark.usefixtures("by_levels")
def test_levels_are_computed_one_after_another():
    """The decays of a level come directly before its products, so that those of one level are live at a time."""
    last = gradient("gated_delta_rule_2").kernels[-1]
    order = [o for o in last.ops if isinstance(o, Op) and o.kind in ("exp", "matmul")]
    levels = [n for n, o in enumerate(order) if o.kind == "exp" and o.out.startswith("exp_G_to_")]
    assert len(levels) == 6
    assert all(any(o.kind == "matmul" for o in order[a:b]) for a, b in pairwise(levels))
