"""What kernels find from the lengths of all sequences: which kernels do so, and what they are told."""
import re
from dataclasses import replace

import pytest
from walks import lowered, walker

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import Kernel, Op
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.places import unplaced
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.types import Tile
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.launch.overlapping import _early, _touched
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
    module, places = text(PARTS), {k.name: k for k in lowered(PARTS).kernels if k.grid == "parts"}
    assert len(places) == 5 and module.count("t.choose_parts(") == 1
    for name, k in places.items():
        of = of_kernel(module, name)
        reads = [of.index(f"part_places[{x}]") for x in ("0", "1", *(f"4 * (part + 1) + {n}" for n in range(4)))]
        waits = re.search(r"if units != 0:\n(?: {16}(?!if).*\n)*? +(if summed == 0:\n +)?t.wait_for_earlier_kernels\(\)\n", of)
        assert k.start == "beside" or (waits.end() <= min(reads) and bool(waits[1]) == (k.start == "unless_summed"))
        assert max(reads) < of.index("t.end_if(")


@pytest.mark.parametrize("fields", [{}, {"longest_first": True}])
def test_instances_with_nothing_to_do_end_after_the_kernels_before(fields):
    """Where blocks start early, the first one alone waits: else all of them hold their multiprocessors until then."""
    plan = replace(PARTS, **fields)
    module, ends = text(plan), {}
    for k in lowered(plan).kernels:
        if k.grid == "parts":
            ends[k.name] = re.search(r"t.end_if\((.*)\)\n", of_kernel(module, k.name))[1]
    whole = "span == slots or part >= chosen"
    assert ends == {"F_chunk": f"{whole}, True", "S_offset": f"{whole}, True", "S_factor": f"{whole}, part + hv == 0",
                    "S_start": f"{whole}, part + hv + block == 0", "o_S": "part >= chosen, part + hv == 0"}


def test_one_block_more_chooses_the_parts():
    first = of_kernel(text(PARTS), lowered(PARTS).kernels[0].name)
    assert re.search(r"t.kernel\(slots \* .* \+ 1, threads=\d+\) as block_number:\n +instance = block_number - 1\n"
                     r" +if instance < 0:\n +t.choose_parts\(", first)
    assert first.index("t.choose_parts(") < first.index("t.end_if(instance < 0, False)") < first.index("slot = ")


def test_all_instances_share_the_rows_past_the_pack():
    """Also those without a part, before they end. Those of host's parts clear rows with their own part."""
    walk = of_kernel(text(PARTS), "o_S")
    past = walk.index("if units != 0 and clear_o != 0:")
    assert past < walk.index("o_out[b, row + i, hv, j] = 0") < walk.index("t.end_if(")
    assert "n + 1 == ends - 1 and units == 0, L - start, length)" in walk


@pytest.mark.parametrize("change", [
    lambda ks: [replace(ks[0], body=ks[0].body[1:]), *ks[1:]],  # nothing chooses
    lambda ks: [ks[0], replace(ks[1], body=(ks[0].body[0], *ks[1].body)), *ks[2:]],  # twice
    lambda ks: [replace(ks[0], places="part_places"), *ks[1:]],  # its own
    lambda ks: [*ks[:-1], replace(ks[-1], places="")],  # the walk has the host's parts, the others do not
    lambda ks: [*ks[:-1], replace(ks[-1], places="others")],
    lambda ks: [replace(ks[0], body=ks[0].body[1:]), *(replace(k, places="") for k in ks[1:])]])
def test_places_are_chosen_first_and_read_by_all(change):
    p = lowered(PARTS)
    assert not [*unplaced(p)]
    changed = replace(p, kernels=tuple(change(list(p.kernels))))
    (found,) = unplaced(changed)
    assert "accepted: the first one, over chunks, chooses them" in found
    with pytest.raises(VerifyError, match="places part_places are chosen by"):
        verify(changed)


def test_a_kernel_that_reads_places_touches_them():
    """So `overlapping` lets it start early only where the kernel that stores them has ended."""
    p = lowered(PARTS)
    reads = {k.name for k in p.kernels if "part_places" in _touched(p, k)[0]}
    assert reads == {k.name for k in p.kernels if k.grid == "parts"} and "part_places" in _touched(p, p.kernels[0])[1]


def test_a_kernel_waits_where_the_one_that_chooses_may_still_run():
    """It reads places before all else, so that no wait under a condition comes early enough."""
    p = lowered(PARTS)
    choice = replace(p.kernels[0], body=p.kernels[0].body[:1])
    reader = Kernel("reader", "parts", (Op("warm_up_length", "length", (), type=Tile(())),
                                        Op("return_unless_negative", "", ("length",))), places="part_places")
    before = [choice, Kernel("beside", "parts", (Op("fence", ""),), start="beside")]
    assert _early(p, reader, before) == reader
    assert _early(p, replace(reader, places=""), before).start == "beside"


@pytest.mark.usefixtures("unchecked")
def test_short_warm_ups_have_the_hosts_parts():
    """Their first kernel is over parts, so that no kernel before it could choose, and they cost something else."""
    p = built(Build("tilelang", 16, algorithm="kimi_delta_attention", dtype="bfloat16", arch="sm_90a",
                    schedule=varied("walk_in_turn", "sm_90a", partition="short"), contract=Contract.parse("g=floored")))
    assert p.kernels[0].grid == "parts" and not any(k.places for k in p.kernels)


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
