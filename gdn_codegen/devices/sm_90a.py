"""Hopper with warp groups: agents of one thread block, which talk through rings in shared memory and mbarriers."""
from . import HOPPER, Groups
from .part_cost import PartCost

SM_90A = Groups(
    "sm_90a", "tilelang", HOPPER.spaces, operand="shared", product="fragment", loaded="shared", vector="shared",
    tile="fragment", number="local", in_place=True, extents=HOPPER.extents,
    solves=HOPPER.solves, solves_whole=HOPPER.solves_whole, async_loads=HOPPER.async_loads, joined=True, staged=HOPPER.staged,
    part_cost=PartCost(chunk_us=2.4, fold_us=4.0, launch_us=3.0, summary_us=10.0, warm_up_chunks=7, longest_warm_up_chunks=16,
                       least_part_chunks=3, resident=1),
    splits_warm_up=True, heads_per_block=HOPPER.heads_per_block, register_file=HOPPER.register_file,
    state="state", aux="aux", loader="loader", store="store", solve="solve",
    warps={"aux": 4, "loader": 1, "store": 1, "solve": 2},
    registers={"state": 192, "aux": 104, "loader": 24, "store": 24}, slots={"aux": 2, "state": 1},
    solving={"registers": {"state": 192, "aux": 80, "loader": 48, "store": 48, "solve": 48},
             "slots": {"aux": 3, "solve": 3, "state": 1}},
    rows=64, most=2,
)
