"""host/parts.py by itself: into how many parts a sequence goes."""
from dataclasses import replace

import pytest

from gdn_codegen.devices import HOPPER, TRITON
from gdn_codegen.devices.part_cost import of_chunks
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.host.parts import _cheapest_span, _needs_summaries

COST = SM_90A.part_cost


def span(chunks, sequences=1, instances=16, cost=COST, warms_up=True):
    return _cheapest_span(chunks, sequences, instances, 132 * cost.resident, cost, 3, 8, warms_up)


@pytest.mark.parametrize("device", [HOPPER, SM_90A, TRITON])
@pytest.mark.parametrize("warms_up", [True, False])
def test_a_long_sequence_goes_in_parts_and_a_batch_that_fills_the_gpu_does_not(device, warms_up):
    found = span(2048, cost=device.part_cost, warms_up=warms_up)
    assert found is not None and found < 1024
    assert span(64, sequences=64, instances=32, cost=device.part_cost, warms_up=warms_up) is None
    assert span(1, cost=device.part_cost, warms_up=warms_up) is None


def test_what_costs_more_is_done_less():
    assert span(64) is not None and span(64, cost=replace(COST, warm_up_chunks=1000.0)) is None
    assert span(2048, cost=replace(COST, fold_us=1e6), warms_up=False) is None


def test_a_warm_up_reaches_so_many_parts_back():
    assert not _needs_summaries(72, 8, 8) and _needs_summaries(73, 8, 8)


def test_cost_in_chunks_of_other_lengths():
    half = of_chunks(COST, 32)
    assert half.chunk_us == COST.chunk_us / 2 and half.warm_up_chunks == 2 * COST.warm_up_chunks
    assert half.launch_us == COST.launch_us and of_chunks(COST, 64) == COST
