"""host/parts.py by itself: into how many parts a sequence goes."""
from dataclasses import replace

import pytest

from gdn_codegen.devices import HOPPER, TRITON
from gdn_codegen.devices.part_cost import of_chunks
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.host.parts import _cheapest_span, _lengths, _needs_summaries

COST = SM_90A.part_cost


def span(chunks, sequences=1, instances=16, cost=COST, warms_up=True):
    known = _lengths(sequences * chunks * 64, sequences, False, 0, 64)
    return _cheapest_span(known, instances, 132 * cost.resident, cost, 3, 8, warms_up)


def of_pack(tokens, longest, value_heads, sequences=16):
    """Chunks of a part of a pack, whose longest sequence has so many tokens (0: not known)."""
    return _cheapest_span(_lengths(tokens, sequences, True, longest, 64), value_heads, 132, COST, 3, 8, True)


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


def test_a_warm_up_reaches_so_many_parts_or_chunks_back():
    assert COST.warm_up_limit == 50
    for chunks, span in ((36, 4), (178, 64)):
        assert not _needs_summaries(chunks, span, 8, COST) and _needs_summaries(chunks + 1, span, 8, COST)


def test_where_kernels_choose_parts_the_longest_sequence_decides_about_summaries():
    """Its warm-ups may then reach back to its start. Of one sequence the host chooses the parts."""
    for chunks in (1, 75, 76, 1000):
        assert all(_needs_summaries(chunks, span, 8, COST, chosen=True) == (chunks > 75) for span in (1, 14, 100))
    of = lambda sequences, longest=0: _lengths(120 * 64, sequences, True, longest, 64, chosen=True)
    assert [of(4).chosen, of(4, 64 * 64).chosen, of(1).chosen] == [True, True, False]
    assert [of(4).possible, of(4, 64 * 64).possible, of(4, 30 * 64).possible] == [120, 64, 30]


def test_cost_in_chunks_of_other_lengths():
    half = of_chunks(COST, 32)
    assert half.chunk_us == COST.chunk_us / 2 and half.warm_up_chunks == 2 * COST.warm_up_chunks
    assert half.warm_up_limit == 2 * COST.warm_up_limit
    assert half.launch_us == COST.launch_us and of_chunks(COST, 64) == COST


def test_the_longest_sequence_of_a_pack_decides_where_it_is_known():
    """Equal sequences stay whole, one long among short ones is split. Without that a pack is taken for one sequence."""
    even, unknown = of_pack(16384, 1024, 8), of_pack(16384, 0, 8)
    assert even is None and unknown == of_pack(16384, 16384, 8, sequences=1) is not None
    uneven = of_pack(16384, 12288, 8)
    assert uneven is not None and 2 <= uneven < 192 // 4


@pytest.mark.parametrize("sequences, tokens, longest, value_heads, splits", [
    (39, 40424, 5632, 32, False), (34, 87197, 24576, 32, False), (29, 47608, 4608, 16, False), (20, 11242, 2816, 16, False),
    (4, 38304, 10240, 64, False), (44, 6543, 1280, 1, True), (6, 27024, 4608, 8, True), (4, 69791, 59392, 2, True)])
def test_parts_of_packs_that_fill_a_gpu_cost_more_than_their_chunks(sequences, tokens, longest, value_heads, splits):
    """Packs of benchmarks/packs.py, whose times are in docs/performance.md. The model split the first five as well before it knew
    this. That of one head stayed whole: kernels for summaries that nobody needs were taken for costly."""
    assert (of_pack(tokens, longest, value_heads, sequences) is not None) == splits


@pytest.mark.parametrize("tokens, longest, even", [(8 * 10253, 10752, True), (8 * 1000, 1125, True), (8 * 1000, 1126, False)])
def test_sequences_are_equal_where_the_longest_is_rounded_up(tokens, longest, even):
    known = _lengths(tokens, 8, True, longest, 64)
    assert (known.rest == known.longest) == even and known.others == 7


@pytest.mark.parametrize("longest", [1, 40, 63, 64, 1 << 40, -5])
def test_a_longest_sequence_that_cannot_be_is_put_right(longest):
    known = _lengths(16 * 64 * 5, 16, True, longest, 64)
    assert 5 <= known.longest <= 80 and known.possible == 80 and 1 <= known.rest <= 5.5
    assert 80 <= known.longest + known.others * known.rest <= 80 + 15  # each of the others has a chunk at least
