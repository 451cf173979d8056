"""Fields of a schedule on PTO: each changes the source, or is listed as one that does not, or is refused."""
from dataclasses import fields, replace

import pytest
from pto_fields import SWITCHED, switched
from reference import module
from up_to_names import tokens

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import Schedule, ScheduleError, named, varied
from gdn_codegen.targets import find
from gdn_codegen.tools.cases import Case
from gdn_codegen.tools.verify import accepted, compare


def statements(b):
    """The tokens of the emitted source; its comments say which build it is of."""
    return tokens(module(render(b)).SOURCE, python=False)


@pytest.mark.parametrize("field", SWITCHED)
def test_a_field_changes_the_source(field):
    b = switched(field)
    assert statements(b) != statements(replace(b, schedule=SWITCHED[field][0]))


@pytest.mark.parametrize("schedule", ["staged", "fused"])
def test_both_inverses_are_one_source(schedule):
    """Both start from blocks of one row, because cores solve no larger ones."""
    b = Build("pto", 32, schedule=schedule, head_dim_k=32, head_dim_v=32)
    assert statements(b) == statements(replace(b, schedule=replace(named(schedule), inverse="doubling")))


@pytest.mark.parametrize("said", [{"partition": "exact"}, {"partition": "exact", "part_chunks": 2}])
def test_parts_are_refused(said):
    with pytest.raises(ScheduleError, match=r"accepted for pto is None"):
        render(Build("pto", 32, schedule=varied("fused", **said)))


def test_blocks_of_k_change_the_source_and_not_the_results():
    """Of a page with gates for each channel: kernels of others have results without K."""
    b = Build("pto", 16, algorithm="gla", schedule=varied("staged", k_block=16), head_dim_k=32, head_dim_v=32)
    assert statements(b) != statements(replace(b, schedule="staged"))
    case = Case((20, 0, 3))
    assert all(e <= accepted(b, case) for e in compare(b, case).values())


def test_pieces_of_v_change_a_gradient():
    """tests/family/test_gradients.py compares its results with a reference."""
    b = Build("pto", 16, algorithm="gated_delta_rule.gradient", schedule=varied("prepared", v_piece=32), head_dim_k=16,
              head_dim_v=64)
    assert statements(b) != statements(replace(b, schedule="prepared"))


def test_pieces_may_have_padding():
    """tests/family/test_gradients.py compares results with a reference."""
    b = Build("pto", 16, algorithm="gated_delta_rule.gradient", schedule=varied("prepared", v_piece=32), head_dim_k=16,
              head_dim_v=56)
    assert statements(b) != statements(replace(b, schedule=replace(b.plan, padded_pieces=True)))


def test_no_field_is_left_out():
    """tests/runtime/test_unused_fields.py has those that PTO's passes do not read. Other tests have launch, kernels and names."""
    here = {*SWITCHED, "inverse", "partition", "part_chunks", "k_block", "v_piece", "padded_pieces", "if_declined"}
    assert {*here, *find("pto").lowering.unused, "name", "kernels", "launch"} == {f.name for f in fields(Schedule)}
