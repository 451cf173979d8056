"""Ascend A2 and A3. A core group has one cube core and two vector cores, which exchange tiles through global memory."""
from . import Cores

ASCEND_A2 = Cores(
    "ascend_a2", "pto",
    {"UB": 184 * 1024, "L1": 512 * 1024, "L0A": 64 * 1024, "L0B": 64 * 1024, "L0C": 128 * 1024},
    heads={"product": 16, "interleaved": 2},  # a cube core multiplies 16 rows or more
    operand="L1", product="L0C", loaded="UB", vector="UB", tile="UB", number="",
    inverts_blocks=True,
    agents=("vector", "cube"),
    runs={"matmul": "cube"},
    copies={"vector": 2, "cube": 1},
    home={"vector": "UB", "cube": "L1"},
    feeds=("L0A", "L0B"),
    narrow=("float16", "bfloat16"),
    pipes={"vector": {"load": "MTE2", "store": "MTE3", "*": "V"},
           "cube": {"load": "MTE2", "valid": "MTE2", "move": "MTE1", "matmul": "M", "cast": "FIX", "store": "FIX"}},
    unordered=("V",),
    issuer="S",
    events=8, flags=16, flag_limit=15,
    rates={("vector", "MTE2"): 58, ("vector", "MTE3"): 110, ("vector", "V"): 126, ("cube", "MTE2"): 78,
           ("cube", "MTE1"): 127, ("cube", "M"): 4048, ("cube", "FIX"): 81},
    align=32,
    clears=False,
    column_scratch=("UB", 184 * 1024, 192 * 1024),
)
