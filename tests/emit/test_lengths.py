"""What an instance finds from the lengths of all sequences: device functions, run by 32 lanes on a CPU in place of a warp."""
import random
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from gdn_codegen.emit.tilelang.functions import FOLDER

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
#: The device's costs, of warm-ups of 3 chunks, and others, of warm-ups of 2 chunks.
COSTS = [(192, 160, 123, 90, 77), (128, 0, 64, 64, 0)]
PROGRAM = """
#include "{warp}"
#include "{by_length}"
#include "{part_chunks}"
#include <cstdio>
int main() {{
  int sequences, least, instances, units;
  while (std::scanf("%d %d %d %d", &sequences, &least, &instances, &units) == 4) {{
    std::vector<int> ends(sequences + 1), order(sequences);
    for (int n = 0, tokens; n < sequences && std::scanf("%d", &tokens); ++n) ends[n + 1] = ends[n] + tokens;
    int span[32];
    as_warp([&] {{
      for (int rank = 0; rank < sequences; ++rank) {{
        int n = by_length(ends.data(), rank, sequences);
        if (threadIdx.x == rank % 32) order[rank] = n;
      }}
      span[threadIdx.x] = part_chunks(ends.data(), sequences, 64, least, instances, units, {costs});
    }});
    std::printf("%d", *std::min_element(span, span + 32) == *std::max_element(span, span + 32) ? span[0] : -1);
    for (int n : order) std::printf(" %d", n);
    std::printf("\\n");
  }}
}}
"""


def run(cases, costs, folder):
    """For each case (lengths, least, instances, units): the chunks of a part, and sequences by rank."""
    (folder / "lengths.cpp").write_text(PROGRAM.format(
        warp=Path(__file__).with_name("warp.h"), costs=", ".join(map(str, costs)),
        **{n: FOLDER / f"{n}.cuh" for n in ("by_length", "part_chunks")}))
    subprocess.run(["g++", "-std=c++20", "-O1", "lengths.cpp", "-o", "lengths"], cwd=folder, check=True)
    given = "".join(f"{len(lens)} {' '.join(map(str, rest))} {' '.join(map(str, lens))}\n" for lens, *rest in cases)
    found = subprocess.run([folder / "lengths"], input=given, capture_output=True, text=True, check=True).stdout
    rows = [[int(x) for x in line.split()] for line in found.splitlines()]
    return [(row[0], row[1:]) for row in rows]


def drawn(seed):
    """Packs of 1 to 70 sequences, some of them empty or equal, with the numbers that a host would give."""
    r = random.Random(seed)
    for _ in range(24):
        n, scale = r.randint(1, 70), 2 ** r.uniform(0, 15)
        lens = [int(scale * r.choice([r.random(), r.random() ** 8, 0])) for _ in range(n)]
        lens = [int(scale)] * n if r.random() < .2 else lens
        yield lens, r.randint(1, 40), r.choice([1, 3, 8, 64]), r.choice([0, 1, 132, 132, 264])


def expected(lens, least, instances, units, costs):
    """The chunks of a part, by the same model, one number of parts after another."""
    warm_up, longest, split, crowded, start = costs
    chunks = [-(-n // 64) for n in lens]
    walk = max(chunks)
    if not units:
        return least
    tried, found = -(-walk // least), []
    for n in [*range(1, tried + 1)] if tried <= 32 else [1 + lane * (tried - 1) // 31 for lane in range(32)]:
        span = max(least, -(-walk // n))
        parts = sum(max(1, -(-c // span)) for c in chunks)
        splits, of_walk = parts - len(lens), -(-walk // span)
        before = 64 * (of_walk - 1) * span
        warm, waves = min(warm_up, before), -(-parts * instances // units)
        last = 64 * min(span, walk) + start + (warm if splits else 0)
        work = (64 * sum(chunks) + splits * warm + parts * start) * instances // units
        time = max(last, work if waves == 1 else work * (crowded if splits else 64) // 64 + 2 * last // 5)
        time = max(time, waves * (64 * min(min(chunks), span) + start))
        if splits:
            time += split + min(longest, before - warm)
        found.append((time, -span))
    return -min(found)[1] if tried > 1 else least


@pytest.mark.slow
@pytest.mark.parametrize("costs", [COSTS[0], pytest.param(COSTS[1], marks=pytest.mark.long)])
def test_all_lanes_find_the_cheapest_parts(costs, tmp_path):
    cases = list(drawn(costs[0]))
    found = [span for span, _ in run(cases, costs, tmp_path)]
    assert found == [expected(*case, costs) for case in cases]
    assert all(span >= case[1] for span, case in zip(found, cases, strict=True))  # no more parts than the host has instances for
    assert len({(span > case[1], span < max(case[0]) // 64) for span, case in zip(found, cases, strict=True)}) == 4


@pytest.mark.slow
def test_each_sequence_has_a_rank_and_the_longest_comes_first(tmp_path):
    cases = [*drawn(0), ([5] * 300, 1, 1, 0), ([*range(300)], 1, 1, 0), ([1, 2, 2**31 - 9], 1, 1, 0)]
    for (lens, *_), (_, order) in zip(cases, run(cases, COSTS[0], tmp_path), strict=True):
        assert sorted(order) == list(range(len(lens)))
        of = [lens[n] for n in order]
        if len(lens) <= 256:
            assert all(y - x <= max(lens) / 16 for x, y in pairwise(of))
        else:
            assert order == list(range(len(lens)))


def test_equal_sequences_keep_their_order(tmp_path):
    ((_, order),) = run([([640] * 40, 1, 1, 0)], COSTS[0], tmp_path)
    assert order == list(range(40))
