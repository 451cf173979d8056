"""Hopper with warp groups. The agents of a thread block exchange tiles through rings in shared memory, ordered by mbarriers.

The mbarriers of a block take the first KiB of its shared memory, because the tiles after them begin at a multiple of 1024 bytes.
An H100 refused a kernel with 231680 bytes of tiles.
"""
from . import HOPPER, Groups
from .part_cost import PartCost

SM_90A = Groups(
    "sm_90a", "tilelang", {**HOPPER.spaces, "shared": 226 * 1024}, operand="shared", product="fragment", loaded="shared",
    vector="shared", tile="fragment", number="local", summed=HOPPER.summed, in_place=True, extents=HOPPER.extents,
    solves=HOPPER.solves, solves_whole=HOPPER.solves_whole, async_loads=HOPPER.async_loads, staged=HOPPER.staged,
    # chunk_us, launch_us, split_us and both lengths of warm-ups are fitted to times of 200 random packs on an H100
    # (benchmarks/packs.py), idle_us and crowded to 32 of them. summary_us is what makes the longest warm-up 8 parts, which short
    # parts need; warm_up_limit keeps that of long ones from taking more time than summaries.
    part_cost=PartCost(chunk_us=2.6, fold_us=4.0, launch_us=10.0, split_us=5.0, summary_us=10.0, warm_up_chunks=3,
                       longest_warm_up_chunks=2.5, least_part_chunks=3, resident=1, idle_us=4.0, crowded=1.4, start_chunks=1.2),
    splits_warm_up=True, heads=HOPPER.heads, register_file=HOPPER.register_file,
    rows=64, most=2, threads=1024, starts_early=True, decayed_block_rows=64,
)
