"""Ascend A2 and A3. A core group has one cube core and two vector cores, which exchange tiles through global memory."""
from . import Cores
from .cycle_model import CycleModel, saturating

#: Figures of PTO-ISA (github.com/hicann/pto-isa, commit dd3cb0fbd5d7), whose model of A2/A3 runs at 1.85 GHz.
#: Bandwidths: include/pto/costmodel/arch_config.hpp, PTO_BW_MODE=fitted, of a 910B3: GiB/s, and the bytes that reach half of it.
#: Lines: include/pto/costmodel/a2a3/formula_costmodel/formula_params.csv, which include/pto/costmodel/pto_instr.hpp takes for
#: TROWEXPAND where it is more than the sum of its parts.
FITTED = CycleModel(
    transfers={("vector", "MTE2"): saturating(247.16, 30643, 1.85), ("cube", "MTE2"): saturating(28.61, 1107, 1.85),
               ("vector", "MTE3"): saturating(28.19, 1755, 1.85), ("cube", "FIX"): saturating(41.25, 29104, 1.85)},
    least={("TROWEXPAND", "float", 8): (1.7596, 33.4), ("TROWEXPAND", "float", 32): (0.4375, 37),
           ("TROWEXPAND", "float", 64): (0.2187, 37), ("TROWEXPAND", "float", 96): (0.1562, 37),
           ("TROWEXPAND", "float", 128): (0.1176, 34.5), ("TROWEXPAND", "half", 32): (0.4375, 37),
           ("TROWEXPAND", "half", 64): (0.2187, 37), ("TROWEXPAND", "half", 96): (0.1458, 37),
           ("TROWEXPAND", "half", 128): (0.1094, 37), ("TROWEXPAND", "half", 160): (0.0937, 37),
           ("TROWEXPAND", "half", 192): (0.0781, 37)},
)

ASCEND_A2 = Cores(
    "ascend_a2", "pto",
    {"UB": 184 * 1024, "L1": 512 * 1024, "L0A": 64 * 1024, "L0B": 64 * 1024, "L0C": 128 * 1024},
    heads={"columns": 16, "interleaved": 2},  # of 16 float32 numbers a token each vector core loads 32 bytes
    operand="L1", product="L0C", loaded="UB", vector="UB", tile="UB", number="",
    inverts_blocks=True,
    agents=("vector", "cube"),
    runs={"matmul": "cube"},
    copies={"vector": 2, "cube": 1},
    home={"vector": "UB", "cube": "L1"},
    feeds=("L0A", "L0B"),
    narrow=("float16", "bfloat16"),
    pipes={"vector": {"load": "MTE2", "store": "MTE3", "*": "V"},
           "cube": {"load": "MTE2", "valid": "MTE2", "full": "MTE2", "move": "MTE1", "matmul": "M",
                    "cast": "FIX", "insert": "FIX", "store": "FIX"}},
    unordered=("V",),
    issuer="S",
    # PTO-ISA gives kernels the ids 0 to 12 (include/pto/npu/a2a3/custom/TSync_Custom.hpp). A counter holds 15; 12 leaves room.
    events=8, flags=13, flag_limit=12, barrier_flags=(13, 14, 15),
    rates={("vector", "MTE2"): 58, ("vector", "MTE3"): 110, ("vector", "V"): 126, ("cube", "MTE2"): 78,
           ("cube", "MTE1"): 127, ("cube", "M"): 4048, ("cube", "FIX"): 81},
    align=32,
    clears=False,
    column_scratch=("UB", 184 * 1024, 192 * 1024),
    cycle_models={"flat": CycleModel(), "fitted": FITTED},
)
