"""launch="single": all kernels in one launch, with barriers over the device between them."""
import re
from dataclasses import replace

import pytest
from reference import call, check, module, problem

from gdn_codegen.ir.core import walk
from gdn_codegen.pto_sim import PtoSimError
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import ScheduleError, named

LENGTHS = [65, 0, 130, 64]


def single(schedule, **options):
    return Build("pto", 64, schedule=replace(named(schedule), launch="single"), head_dim_k=32, head_dim_v=32, **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["staged", "prepared", "replay"])
def test_one_launch_agrees(schedule):
    b = single(schedule)
    assert len(module(render(b)).TABLES.kernels) == 1
    check(function(b), problem(LENGTHS, 1, 2, 32, 32))
    check(function(b), problem([65, 65], 2, 4, 32, 32, initial=False), batched=True)


@pytest.mark.slow
def test_as_many_barriers_as_cuts():
    for name, cuts in (("staged", 5), ("replay", 1), ("fused", 0)):
        barriers = [o for k in lowered(single(name)).kernels for o in walk(k.body) if o.kind == "barrier" and o.attr("ids")]
        assert len(barriers) == 2 * cuts  # the cube core and its vector cores


#: Parts of the barrier: vector cores to their cube, cube to cube, cube to its vector cores.
UP, ACROSS, DOWN = 13, 14, 15
PARTS = {"up": rf"ffts_cross_core_sync\(PIPE_MTE3, group_flag\({UP}\)\);|wait_flag_dev\({UP}\);",
         "across": rf"ffts_cross_core_sync\(PIPE_FIX, all_flag\({ACROSS}\)\);|wait_flag_dev\({ACROSS}\);",
         "down": rf"ffts_cross_core_sync\(PIPE_FIX, group_flag\({DOWN}\)\);|wait_flag_dev\({DOWN}\);"}


def without(part, text):
    text, n = re.subn(PARTS[part], "", text)
    assert n and n % 2 == 0
    return text


def run(text):
    call(module(text).chunk_gated_delta_rule, problem(LENGTHS, 1, 2, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, parts", [("staged", PARTS), ("prepared", PARTS), ("replay", ("across", "down"))])
def test_without_a_part_of_the_barrier_the_simulator_stops(schedule, parts):
    """Of [A] and of [G A] vector cores write last what the next kernel reads, so all of it is needed."""
    for part in parts:
        with pytest.raises(PtoSimError, match=r"race|flag|uninitialised"):
            run(without(part, render(single(schedule))))


@pytest.mark.slow
def test_a_later_signal_of_the_same_pipe_says_what_vector_cores_would():
    """Of [G Tinv] they store G alone for others, and then hand their cube tiles through the same pipe: what waits for these
    has waited for G. A store after the last of them is seen."""
    text = render(single("replay"))
    check(module(without("up", text)).chunk_gated_delta_rule, problem(LENGTHS, 1, 2, 32, 32))
    store = re.search(r"\{\n +auto mine = tile_at<UbTile<float, 1, 32>>[^}]*TSTORE\(view\(G_ws_gm[^}]*, mine\);\n +\}", text)[0]
    end = text.index(f"group_flag({UP})")
    last = text.rindex("ffts_cross_core_sync(PIPE_MTE3", 0, end - len("ffts_cross_core_sync(PIPE_MTE3, "))
    assert text.index(store) < last
    later = text[:last] + text[last:].replace("\n", f"\npipe_barrier(PIPE_ALL);\n{store}\npipe_barrier(PIPE_ALL);\n", 1)
    run(later)
    with pytest.raises(PtoSimError, match=r"race\] RAW .* nothing orders"):
        run(without("up", later))


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_a_target_without_such_a_barrier_refuses(target):
    with pytest.raises(ScheduleError, match=f"launch='single' .*{target}"):
        render(replace(single("replay"), target=target))


def test_the_module_says_how_much_workspace_it_takes():
    """What lies between kernels grows with tokens and heads; what cores of a group hand each other does not."""
    workspace_bytes = module(render(single("replay"))).HOST.workspace_bytes
    one, two = (workspace_bytes(tokens=n * 4096, sequences=3, value_heads=8) for n in (1, 2))
    assert two - one == 64 * 8 * (64 * 4 + 64 * 64 * 2) < one
