"""What makes lowering for cores slow happens a bounded number of times. Times themselves are measured elsewhere."""
from collections import Counter

import pytest

from gdn_codegen.passes.storage import arrange
from gdn_codegen.passes.storage.pack import KernelValues
from gdn_codegen.passes.sync.traversal import Traversal
from gdn_codegen.runtime.build import Build, lowered


@pytest.fixture
def counted(monkeypatch):
    """Counts of tried variants of kernels, of attempts to place their values, of traversals of traces, and of their ops."""
    count = Counter()

    schedule, place, traverse = arrange.list_scheduling, KernelValues.__init__, Traversal.run

    def scheduled(*args):
        count["variants"] += 1
        return schedule(*args)

    def placed(self, *args):
        count["placements"] += 1
        place(self, *args)

    def traversed(self, end=None):
        whole = traverse(self, end)
        count["traversals"] += 1
        count["ops"] += sum(s.kind == "op" for s in self.trace.steps[:len(self.known)])
        return whole
    monkeypatch.setattr(arrange, "list_scheduling", scheduled)
    monkeypatch.setattr(KernelValues, "__init__", placed)
    monkeypatch.setattr(Traversal, "run", traversed)
    return count


@pytest.mark.parametrize("schedule, options, variants, placements, traversals, ops", [
    ("fused", {}, 3, 5, 7, 6_000), ("fused", {"chunk": 128}, 3, 7, 5, 7_000), ("staged", {}, 6, 12, 16, 3_800),
    ("walk", {}, 2, 5, 8, 4_200), ("replay", {"chunk": 128}, 6, 10, 8, 4_600)])
def test_modules_of_cores_are_lowered_in_few_steps(schedule, options, variants, placements, traversals, ops, counted):
    lowered.__wrapped__(Build("pto", schedule=schedule, **options))
    assert counted["variants"] <= variants and counted["placements"] <= placements, counted
    assert counted["traversals"] <= traversals and counted["ops"] <= ops, counted


@pytest.mark.parametrize("limit", range(14))
@pytest.mark.parametrize("error", [-3, 0, 2])
def test_the_most_masks_are_found_in_few_tries(limit, error):
    """error: how many masks too many the bytes that lack seem to stand for, of a variant and of the first guess."""
    for best in range(-1, limit + 1):
        tries = []

        def variant(kept, best=best, tries=tries):
            tries.append(kept)
            return kept, max(10 * (kept - best + error), 1) if kept > best else 0
        lacks = max(10 * (limit - best + error), 1) if limit > best else 0
        assert arrange._most(variant, [10] * limit, lacks) == (best if best >= 0 else None)
        assert len(tries) <= 2 + (1 + limit.bit_length() if error else 0) and len(set(tries)) == len(tries)
