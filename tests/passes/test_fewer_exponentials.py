"""Exponentials of running sums that follow from others."""
import re
from dataclasses import replace

import pytest

from gdn_codegen.ir.core import map_ops, walk
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


@pytest.mark.parametrize("target, last, before", [
    ("triton", r"== C - 1, G", r"== C - 3, G"), ("tilelang", r"G\[C - 1\]", r"G\[C - 3\]"),
    ("pto", r"G\w*\.GetValue\(31\)", r"G\w*\.GetValue\(29\)")])
def test_each_target_reads_rows_before_the_last(target, last, before):
    """Of running sums of a number for each token, which every target keeps in a vector."""
    b = Build(target, 32, algorithm="simple_gla", schedule="fused")
    p = lowered(b)
    def third(o):
        return [o.with_attrs(before=2) if o.kind == "last" else o]
    other = p.map_kernels(lambda k: replace(k, body=map_ops(k.body, third)))
    old, new = ("\n".join(k.body for k in b.of.emit(x, b.layout, b.heads)) for x in (p, other))
    assert re.search(last, old) and not re.search(before, old)
    assert re.search(before, new) and not re.search(last, new)
