"""instance_warps: warps of Triton's kernels."""
import pytest

from gdn_codegen.runtime.build import Build, lowered


def warps(chunk, schedule, dtype, K=128, V=128):
    """The warps of each kernel of Gated DeltaNet."""
    b = Build("triton", chunk, schedule=schedule, dtype=dtype, head_dim_k=K, head_dim_v=V)
    return [k.threads // 32 for k in lowered(b).kernels]


@pytest.mark.parametrize("chunk, schedule, K, V, want", [
    (64, "fused", 16, 16, [8]),  # 10 products of 64 x 64 x 64, and some with K or V
    (64, "fused", 36, 16, [16]),
    (64, "fused", 128, 128, [16]),
    (32, "walk", 128, 128, [2, 4]),  # few enough, as in 16 bits
    (1, "fused", 128, 128, [2])])  # no product
def test_products_of_float32_have_few_multiplications_of_a_lane(chunk, schedule, K, V, want):
    assert warps(chunk, schedule, "float32", K, V) == want


@pytest.mark.parametrize("chunk, schedule, K, V, want", [
    (64, "fused", 36, 16, [2]), (64, "fused", 128, 128, [4]), (32, "walk", 128, 128, [2, 4])])
def test_products_of_16_bits_are_those_of_tensor_cores(chunk, schedule, K, V, want):
    assert warps(chunk, schedule, "float16", K, V) == want
