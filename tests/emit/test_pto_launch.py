"""launch="single": all kernels in one launch, with barriers over the device between them."""
import re
from dataclasses import replace

import pytest
from reference import call, check, module, problem

from gdn_codegen.ir.core import walk
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.pto_sim import PtoSimError
from gdn_codegen.schedule import ScheduleError, named

LENGTHS = [65, 0, 130, 64]


def single(schedule, **options):
    return Build("pto", 64, schedule=replace(named(schedule), launch="single"), head_dim_k=32, head_dim_v=32, **options)


@pytest.mark.parametrize("schedule", ["staged", "prepared", "replay"])
def test_one_launch_agrees(schedule):
    b = single(schedule)
    assert len(module(render(b)).KERNELS) == 1
    check(function(b), problem(LENGTHS, 1, 2, 32, 32))
    check(function(b), problem([65, 65], 2, 4, 32, 32, initial=False), batched=True)


def test_as_many_barriers_as_cuts():
    for name, cuts in (("staged", 5), ("replay", 1), ("fused", 0)):
        barriers = [o for k in lowered(single(name)).kernels for o in walk(k.body) if o.kind == "barrier" and o.attr("ids")]
        assert len(barriers) == 2 * cuts  # the cube core and its vector cores


@pytest.mark.parametrize("piece", ["across", "up", "down"])
def test_without_a_part_of_the_barrier_the_simulator_stops(piece):
    up, across, down = 13, 14, 15
    cut = {"across": rf"ffts_cross_core_sync\(PIPE_FIX, all_flag\({across}\)\);\n\s*wait_flag_dev\({across}\);",
           "up": rf"(ffts_cross_core_sync\(PIPE_MTE3, group_flag\({up}\)\);|wait_flag_dev\({up}\);)",
           "down": rf"(ffts_cross_core_sync\(PIPE_FIX, group_flag\({down}\)\);|wait_flag_dev\({down}\);)"}[piece]
    text, n = re.subn(cut, "", render(single("staged")))  # of [G], which only vector cores write, all of it is needed
    assert n
    fn = module(text).chunk_gated_delta_rule
    with pytest.raises(PtoSimError, match=r"race|flag|uninitialised"):
        call(fn, problem(LENGTHS, 1, 2, 32, 32))


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_a_target_without_such_a_barrier_refuses(target):
    with pytest.raises(ScheduleError, match=f"launch='single' .*{target}"):
        render(replace(single("replay"), target=target))


def test_the_module_says_how_much_workspace_it_takes():
    workspace_bytes = module(render(single("replay"))).workspace_bytes
    slots = 4096 // 64 + 3
    assert workspace_bytes(tokens=4096, sequences=3, value_heads=8) == slots * 8 * (64 * 4 + 64 * 64 * 2)
