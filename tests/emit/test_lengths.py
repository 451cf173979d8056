"""What kernels find from the lengths of all sequences: device functions, run by 32 lanes on a CPU in place of a warp."""
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
#include "{choose_parts}"
#include <cstdio>
int main() {{
  int sequences, least, instances, units;
  while (std::scanf("%d %d %d %d", &sequences, &least, &instances, &units) == 4) {{
    std::vector<int> ends(sequences + 1), order(sequences);
    for (int n = 0, tokens; n < sequences && std::scanf("%d", &tokens); ++n) ends[n + 1] = ends[n] + tokens;
    int launched = ends[sequences] / (64 * least) + sequences, whole = ends[sequences] / 64 + sequences;
    std::vector<int> places(4 * (1 + launched), -1);
    as_warp([&] {{
      for (int rank = 0; rank < sequences; ++rank) {{
        int n = by_length(ends.data(), rank, sequences);
        if (threadIdx.x == rank % 32) order[rank] = n;
      }}
      choose_parts(places.data(), ends.data(), sequences, 64, least, whole, instances, units, {costs});
    }});
    for (int n : order) std::printf("%d ", n);
    for (int x : places) std::printf("%d ", x);
    std::printf("\\n");
  }}
}}
"""


def run(cases, costs, folder):
    """For each case (lengths, least, instances, units): sequences by rank, and the places of parts."""
    (folder / "lengths.cpp").write_text(PROGRAM.format(
        warp=Path(__file__).with_name("warp.h"), costs=", ".join(map(str, costs)),
        **{n: FOLDER / f"{n}.cuh" for n in ("by_length", "choose_parts")}))
    subprocess.run(["g++", "-std=c++20", "-O1", "lengths.cpp", "-o", "lengths"], cwd=folder, check=True)
    given = "".join(f"{len(lens)} {' '.join(map(str, rest))} {' '.join(map(str, lens))}\n" for lens, *rest in cases)
    found = subprocess.run([folder / "lengths"], input=given, capture_output=True, text=True, check=True).stdout
    rows = [[int(x) for x in line.split()] for line in found.splitlines()]
    return [(row[:len(lens)], row[len(lens):]) for row, (lens, *_) in zip(rows, cases, strict=True)]


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
    tried, found = max(1, -(-walk // least)), []
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
    return -min(found)[1]


def parts(lens, span):
    """The parts of so many chunks, the longest sequence first: sequence, first chunk, first token and tokens of the sequence."""
    chunks, starts = [-(-n // 64) for n in lens], [sum(lens[:n]) for n in range(len(lens))]
    order = sorted(range(len(lens)), key=lambda n: (-chunks[n], n))
    return [[n, first, starts[n], lens[n]] for n in order for first in range(0, max(1, chunks[n]), span)]


@pytest.mark.slow
@pytest.mark.parametrize("costs", [COSTS[0], pytest.param(COSTS[1], marks=pytest.mark.long)])
def test_all_lanes_find_the_cheapest_parts(costs, tmp_path):
    r, kinds = random.Random(1), set()
    cases = [*drawn(costs[0]), ([r.randint(0, 900) for _ in range(256)], 4, 8, 132), ([0] * 9, 1, 8, 132)]
    for case, (_, places) in zip(cases, run(cases, costs, tmp_path), strict=True):
        lens, least, _, units = case
        if not units:
            assert set(places) == {-1}, "the host has chosen the parts"
            continue
        span, walk = expected(*case, costs), -(-max(lens) // 64)
        whole = sum(lens) // 64 + len(lens)
        want = parts(lens, span)
        assert places[:2] == [whole if span >= walk else span, len(want)] and span >= least
        assert places[4:4 * (1 + len(want))] == [x for part in want for x in part]
        assert set(places[4 * (1 + len(want)):]) <= {-1}  # the host has launched instances for all parts
        kinds.add((span > least, span < walk))
    assert len(kinds) == 4


@pytest.mark.slow
def test_each_sequence_has_a_rank_and_the_longest_comes_first(tmp_path):
    cases = [*drawn(0), ([5] * 300, 1, 1, 0), ([*range(300)], 1, 1, 0), ([1, 2, 2**31 - 9], 2**20, 1, 0)]
    for (lens, *_), (order, _) in zip(cases, run(cases, COSTS[0], tmp_path), strict=True):
        assert sorted(order) == list(range(len(lens)))
        of = [lens[n] for n in order]
        if len(lens) <= 256:
            assert all(y - x <= max(lens) / 16 for x, y in pairwise(of))
        else:
            assert order == list(range(len(lens)))


def test_equal_sequences_keep_their_order(tmp_path):
    ((order, _),) = run([([640] * 40, 1, 1, 0)], COSTS[0], tmp_path)
    assert order == list(range(40))
