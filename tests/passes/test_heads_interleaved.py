"""Heads batched by interleaving: how many, and what is refused."""
from dataclasses import replace

import pytest

from gdn_codegen.algorithms import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.core import Batch, walk
from gdn_codegen.passes.sync.synchronise import synchronise
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.targets import lower

SIZES = {"C": 32, "K": 16, "V": 32}


def lowered(schedule, heads, target="pto"):
    return lower(find("gated_delta_rule").trace(), target, varied(schedule, value_heads=heads), SIZES, "float16")


@pytest.mark.slow
@pytest.mark.parametrize("heads, want", [(0, 2), (1, 1), (2, 2), (4, 4)])
def test_a_kernel_over_chunks_interleaves_as_many_heads_as_asked(heads, want):
    """0 is the device's number. Each head but the first has stores of its own, and a walk has one head."""
    chunks, walks = lowered("replay", heads).kernels
    assert chunks.batch == (Batch(want, "interleaved") if want > 1 else Batch()) and walks.batch == Batch()
    stored = [o.attr("head", 0) for o in walk(chunks.body) if o.kind == "store" and o.attr("tensor") == "G_ws"]
    assert stored == list(range(want))


def test_what_needs_more_flags_than_there_are_names_the_field():
    """Four heads had too many before flags were shared."""
    lowered("prepared", 4)
    p = lower(find("gated_delta_rule").trace(), "pto", varied("prepared", value_heads=4), SIZES, "float16", upto="pack")
    with pytest.raises(ScheduleError, match=r"it needs \d+ cross-core flags, ascend_a2 has 2; set value_heads=1$"):
        synchronise(p, replace(ASCEND_A2, flags=2))


@pytest.mark.parametrize("heads, way", [(1, "threads"), (2, ""), (2, "pairs"), (0, "")])
def test_a_batch_is_heads_and_a_way(heads, way):
    with pytest.raises(ValueError, match=r"batch: got .*; accepted: 1 head and '', or more heads and interleaved or key_head"):
        Batch(heads, way)
