"""Grouped value heads on the PTO target: HV a multiple of H, one build for all counts."""
import pytest
import torch
from reference import check, problem

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function


@pytest.mark.parametrize("value_heads", [8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("chunk, schedule, dtype, size", [(64, "fused", "float16", 64), (128, "staged", "bfloat16", 128)])
def test_value_heads(chunk, schedule, dtype, size, value_heads):
    fn = function(Build("pto", chunk, schedule=schedule, dtype=dtype, head_dim_k=size, head_dim_v=size))
    check(fn, problem([chunk + 6, 0, 9], 4, value_heads, size, size, getattr(torch, dtype), gate=-0.1, seed=value_heads))
