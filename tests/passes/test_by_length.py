"""What kernels find from the lengths of all sequences: which kernels do so, and what they are told."""
import re
from dataclasses import replace

import pytest
from walks import lowered, walker

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.places import miscounted
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


def test_the_first_kernel_chooses_parts_by_the_costs_of_the_device():
    c, p = SM_90A.part_cost, lowered(PARTS)
    costs = c.warm_up_chunks, c.longest_warm_up_chunks, c.split_us / c.chunk_us, c.crowded, c.start_chunks
    (chosen,) = [(k.name, o) for k in p.kernels for o in k.ops if o.kind == "choose_parts"]
    assert chosen[0] == p.kernels[0].name and chosen[1].attr("costs") == tuple(round(64 * x) for x in costs)
    assert {(k.grid, k.places) for k in p.kernels} == {("chunks", ""), ("parts", chosen[1].attr("tensor"))}
    assert parse_program(program_text(p)) == p


def test_all_kernels_over_parts_read_the_same_places():
    """Else a kernel would take the warm-up of another part. They read them after the kernel that stores them has ended."""
    module = text(PARTS)
    names = [k.name for k in lowered(PARTS).kernels if k.grid == "parts"]
    assert len(names) == 5 and module.count("t.choose_parts(") == 1
    for k in names:
        of = of_kernel(module, k)
        reads = [of.index(f"part_places[4 * (part + 1) + {n}]") for n in range(4)]
        assert max(reads) < of.index("t.end_if(") < of.index("t.find_sequence(")
        waits = re.search(r"if units != 0( and summed == 0)?:\n +t.wait_for_earlier_kernels\(\)", of)
        assert waits and waits.start() < min(reads) if k not in ("S_factor", "S_start") else not waits


def test_kernels_for_split_sequences_end_if_none_is():
    module = text(PARTS)
    idle = {k.name for k in lowered(PARTS).kernels if any(o.kind == "return_unless_split" for o in k.ops)}
    assert idle == {"F_chunk", "S_offset", "S_factor", "S_start"}
    for k in lowered(PARTS).kernels:
        if k.grid == "parts":
            assert ("t.end_if(span == slots or part >= " in of_kernel(module, k.name)) == (k.name in idle)


@pytest.mark.parametrize("change, message", [
    (lambda p: [replace(p.kernels[0], body=p.kernels[0].body[1:]), *p.kernels[1:]], "places part_places are used by"),
    (lambda p: [*p.kernels[:-1], replace(p.kernels[-1], body=(p.kernels[0].body[0], *p.kernels[-1].body))], "are used by"),
    (lambda p: [replace(p.kernels[0], places="part_places"), *p.kernels[1:]], r"read by kernels \[0, "),
    (lambda p: [*p.kernels[:-1], replace(p.kernels[-1], places="")], None)])
def test_places_that_nothing_chooses_first_are_refused(change, message):
    p = lowered(PARTS)
    p = replace(p, kernels=tuple(change(p)))
    found = [x for x in miscounted(p) if "part_places" in x]
    assert bool(found) == (message is not None) and all(re.search(message, x) for x in found)


def test_warm_ups_have_a_limit_in_calls_with_summaries_alone():
    """Else the walk would start from a state that no kernel makes."""
    calls = re.findall(r"t\.warm_up_length\(\n(.*?)\n +\)\n", text(PARTS), re.DOTALL)
    limit = r"T\.if_then_else\(\s*summed != 0,\s*T\.min\(8 \* span, span \+ 50\),"
    assert len(calls) >= 4 and all(re.search(limit, x) for x in calls)


def test_summaries_alone_leave_the_chunks_of_a_part_to_the_host():
    assert not any(k.places for k in lowered(varied("walk", "sm_90a", partition="exact")).kernels)
    assert "choose_parts(" not in text(varied("walk", "sm_90a", partition="exact"))


@pytest.mark.slow
def test_walks_back_leave_them_to_the_host_too():
    kept = Contract.parse("S_chunks=bfloat16")
    b = Build("tilelang", algorithm="gated_delta_rule.gradient", schedule=varied("fused_gradient", "sm_90a", partition="decay"),
              dtype="bfloat16", arch="sm_90a", contract=kept)
    p = built(b)
    assert any(k.grid == "parts" for k in p.kernels) and not any(k.places for k in p.kernels)
