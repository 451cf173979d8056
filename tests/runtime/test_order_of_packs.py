"""What dispatch makes of packs on Hopper: the longest first, and parts by lengths that only the device knows."""
import pytest
import torch
from choices import a_call

from gdn_codegen.runtime.call import choose, device, tables
from gdn_codegen.runtime.call.tables import Extent

H100 = device.described("NVIDIA H100 80GB HBM3")


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    rows = []
    monkeypatch.setattr(tables, "nearest", lambda *about: rows)
    choose.kept_choice.cache_clear()
    yield rows
    choose.kept_choice.cache_clear()


def plan(x, target="tilelang", **options):
    return choose.choice(a_call(x, torch.bfloat16, "meta", (128, 128), target=target, **options), H100).build.plan


@pytest.mark.parametrize("x, persistent, by_length", [
    (Extent(32, 32, 32, 32768, True), False, True), (Extent(16, 16, 32, 65536), False, False),  # rows of one length
    (Extent(16, 16, 32, 32768, True, 1152), True, False), (Extent(16, 16, 32, 65536, True, 2304), False, False),  # about equal
    (Extent(16, 16, 32, 32768, True, 3200), False, True),  # the longest takes 0.75 of the time of all
    (Extent(16, 16, 8, 4096, True), False, False),  # all run at a time
    (Extent(16, 16, 64, 4096, True), True, False), (Extent(16, 16, 64, 16384, True), True, False),
    (Extent(32, 32, 47, 3641, True, 2816), False, True),  # one of 2670 tokens, the rest of about 20
    (Extent(32, 32, 47, 3641, True, 88), True, False)])
def test_the_longest_start_first_where_walks_wait_for_others(x, persistent, by_length):
    p = plan(x)
    assert (p.name, p.partition, p.persistent, p.by_length) == ("fused_walk", None, persistent, by_length)


def test_only_warp_groups_have_that_order_and_batch_invariant_calls_do_not():
    x = Extent(32, 32, 32, 32768, True)
    assert plan(x).by_length and not plan(x, "triton").by_length and not plan(x, batch_invariant=True).by_length


def test_a_build_with_that_order_that_was_refused_is_left(monkeypatch):
    x, call = Extent(32, 32, 32, 32768, True), torch.device("meta")
    ordered = choose.choice(a_call(x, torch.bfloat16, "meta", (128, 128), target="tilelang"), H100).build
    monkeypatch.setitem(choose._refused, (ordered, call), "wrong")
    choose.kept_choice.cache_clear()
    left = plan(x)
    assert ordered.plan.by_length and not left.by_length and left.name == ordered.plan.name


@pytest.mark.parametrize("sequences, tokens, splits", [
    (8, 8192, False), (8, 65536, True),  # 128 walks: few chunks for each multiprocessor, and many
    (4, 4096, True), (4, 2048, True),  # 64 walks, on less than half of them
    (12, 65536, True), (12, 16384, False), (64, 131072, True), (64, 32768, False)])  # 192 and 1024 walks
def test_packs_of_unknown_lengths_are_split_if_that_may_pay(sequences, tokens, splits):
    assert (plan(Extent(16, 16, sequences, tokens, True)).partition == "decay") == splits


def test_a_row_without_parts_does_not_serve_lengths_that_only_the_device_knows(no_tables):
    """If the model splits, and whole sequences may leave half of the GPU idle."""
    small, large = Extent(16, 16, 4, 4096, True), Extent(16, 16, 8, 65536, True)
    whole = choose.choice(a_call(Extent(16, 16, 64, 65536), torch.bfloat16, "meta", (128, 128), target="tilelang"), H100).build
    no_tables.append(tables.Row("any", whole, small, 1.0))
    choose.kept_choice.cache_clear()
    assert plan(small).partition == "decay" and plan(large).partition is None
    assert plan(Extent(16, 16, 4, 4096)).partition is None and plan(Extent(16, 16, 4, 4096, True, 1024)).partition is None
