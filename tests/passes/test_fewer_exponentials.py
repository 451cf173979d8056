"""Exponentials of running sums that follow from others."""
import pytest

from gdn_codegen.ir.core import walk
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract


def tiles(page, schedule="walk_in_turn", chunk=16, accept="g=floored", **fields):
    """How many tiles of exponentials the walk computes."""
    b = Build("tilelang", algorithm=page, dtype="bfloat16", contract=Contract.parse(accept), chunk=chunk, arch="sm_90a",
              schedule=varied(schedule, "sm_90a", **fields))
    return sum(o.kind == "exp" and o.type.dims == ("C", "K") for k in lowered(b).kernels for o in walk(k.body))


FORMS = [("kimi_delta_attention", "g=floored"), ("kimi_delta_attention", "beta=sigmoid,g=safe,k=l2norm,q=l2norm"),
         ("gla", "g=floored"), ("gated_delta_rule_2", "g=floored")]


@pytest.mark.parametrize("page, accept", FORMS)
def test_two_tiles_are_left_of_four(page, accept):
    assert tiles(page, accept=accept) == 2


def test_other_schedules_keep_them():
    assert tiles("kimi_delta_attention", "operand_walk") == 4
