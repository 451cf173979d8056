"""What instances find from the lengths of all sequences: which kernels do so, and what they are told."""
import re
from dataclasses import replace

import pytest
from walks import lowered, walker

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.build import lowered as built
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract

ORDERED = varied("fused_walk", "sm_90a", by_length=True)
PARTS = varied("fused_walk", "sm_90a", partition="decay")


def text(plan):
    return render(Build("tilelang", schedule=plan, dtype="bfloat16", arch="sm_90a"))


def of_kernel(module, name):
    """The text of one kernel."""
    return re.search(rf"\ndef {name}_kernel\(t\):(.*?)\n    return ", module, re.DOTALL)[1]


@pytest.mark.parametrize("fields", [{}, {"persistent": True}])
def test_only_walks_take_sequences_by_length(fields):
    p = lowered(replace(ORDERED, **fields))
    assert [k.by_length for k in p.kernels] == [k is walker(p) for k in p.kernels]
    assert parse_program(program_text(p)) == p
    assert not any(k.by_length for k in lowered(replace(ORDERED, by_length=False, **fields)).kernels)


def test_the_walk_itself_stays_as_it_is():
    assert walker(lowered(ORDERED)) == replace(walker(lowered("fused_walk")), by_length=True)


@pytest.mark.parametrize("partition", ["exact", "decay"])
def test_parts_have_no_order_by_length(partition):
    with pytest.raises(ScheduleError, match=f"by_length=True with partition='{partition}'; accepted only without a partition"):
        replace(ORDERED, partition=partition)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_sequence_of_an_instance_is_found_by_its_rank(persistent):
    walk = of_kernel(text(replace(ORDERED, persistent=persistent)), "o_S")
    assert "t.by_length(cu_seqlens, rank, ends - 1)" in walk and "hv = " in walk
    assert not re.search(r"\bn = .*truncdiv", walk)


def test_kernels_over_parts_get_the_costs_of_the_device():
    c, p = SM_90A.part_cost, lowered(PARTS)
    costs = c.warm_up_chunks, c.longest_warm_up_chunks, c.split_us / c.chunk_us, c.crowded, c.start_chunks
    expected = tuple(round(64 * x) for x in costs)
    assert {k.grid: k.spans for k in p.kernels} == {"chunks": (), "parts": expected}
    assert parse_program(program_text(p)) == p


def test_all_kernels_over_parts_choose_the_same_chunks():
    """Else a kernel would take the warm-up of another part."""
    module = text(PARTS)
    names = [k.name for k in lowered(PARTS).kernels if k.grid == "parts"]
    (chosen,) = {re.search(r"span = (.*?)\n +size = ", of_kernel(module, n), re.DOTALL)[1] for n in names}
    assert len(names) == 5 and "least_span, part_instances, units, (192, 160, " in " ".join(chosen.split())


def test_warm_ups_have_a_limit_in_calls_with_summaries_alone():
    """Else the walk would start from a state that no kernel makes."""
    calls = re.findall(r"t\.warm_up_length\(\n(.*?)\n +\)\n", text(PARTS), re.DOTALL)
    limit = r"T\.if_then_else\(\s*summed != 0,\s*T\.min\(8 \* span, span \+ 50\),"
    assert len(calls) >= 4 and all(re.search(limit, x) for x in calls)


def test_summaries_alone_leave_the_chunks_of_a_part_to_the_host():
    assert not any(k.spans for k in lowered(varied("walk", "sm_90a", partition="exact")).kernels)
    assert "part_chunks(" not in text(varied("walk", "sm_90a", partition="exact"))


@pytest.mark.slow
def test_walks_back_leave_them_to_the_host_too():
    kept = Contract.parse("S_chunks=bfloat16")
    b = Build("tilelang", algorithm="gated_delta_rule.gradient", schedule=varied("fused_gradient", "sm_90a", partition="decay"),
              dtype="bfloat16", arch="sm_90a", contract=kept)
    p = built(b)
    assert any(k.grid == "parts" for k in p.kernels) and not any(k.spans for k in p.kernels)
