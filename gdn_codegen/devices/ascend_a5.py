"""Ascend 950 (A5), as far as PTO-ISA's headers say (github.com/hicann/pto-isa). No target emits text for it.

Sizes are those of include/pto/cpu/NPUMemoryModel.hpp. The same core group, pipes and ids of flags are in
include/pto/npu/a5/custom/TSync_Custom.hpp. What differs in the text, and what these headers do not say, is in UNKNOWN.
"""
from dataclasses import replace

from .ascend_a2 import ASCEND_A2

#: Vector ops with a column may take memory at the end of UB, as on A2. Nothing says that they do not.
SCRATCH = 8 * 1024

ASCEND_A5 = replace(
    ASCEND_A2, name="ascend_a5", cycle_models={},
    spaces={"UB": 256 * 1024 - SCRATCH, "L1": 512 * 1024, "L0A": 64 * 1024, "L0B": 64 * 1024, "L0C": 256 * 1024},
    column_scratch=("UB", 256 * 1024 - SCRATCH, 256 * 1024),
)

#: What text for A5 needs and no header says, and what nothing here can try.
UNKNOWN = ("whether flags within a core group (set_intra_block, wait_intra_block) need a base address",
           "up to which count these flags go", "how the two vector cores of a group join",
           "the size of L0A, which PTO-ISA marks as a placeholder",
           "whether the text compiles: PTO-ISA's stubs lack vector intrinsics of its A5 headers, and its CPU_SIM has no flags")
