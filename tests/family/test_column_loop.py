"""Kernels over chunks that take pieces of the columns of K in a loop (`k_piece`): Triton, for members with a gate per channel."""
import pytest
from members import Case, computed, drawn, expected
from reference import rms_error
from tiers import every

from gdn_codegen.ir.core import loops
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.roofline import costs
from gdn_codegen.schedule import varied

CHANNELS = ("gla", "kimi_delta_attention", "gated_delta_rule_2", "rwkv7")
#: Ragged tails, a sequence of one token, and an empty one.
CASE = Case((70, 0, 1, 33), heads=1, value_heads=2, repeat=True)
GROUPS = (("@gate_sum", "@keyed"), ("@inverse", "@pair"), ("@output", "@state"))


def build(page, K=64, dtype="bfloat16", **fields):
    """A build for Triton in chunks of 32, whose products of pairs of tokens have a kernel of their own."""
    s = varied("operand_walk", kernels=fields.pop("kernels", GROUPS), **{"k_piece": 16, **fields})
    return Build("triton", 32, algorithm=page, schedule=s, dtype=dtype, head_dim_k=K, head_dim_v=32)


def looping(b):
    """The kernels with a loop over columns, and those loops."""
    return {k: lp for k in lowered(b).kernels for lp in loops(k.body) if lp.index == "columns"}


@pytest.mark.parametrize("page, dtype", every(2, CHANNELS, ["bfloat16", "float16", "float32"]))
def test_pieces_give_what_the_recurrence_gives(page, dtype):
    b = build(page, dtype=dtype)
    x = drawn(page, CASE, lowered(b), {"C": 32, "K": 64, "V": 32})
    for got, want in zip(computed(b, CASE, x), expected(page, CASE, x), strict=True):
        assert rms_error(got, want) < (2e-5 if dtype == "float32" else 6e-3 if dtype == "float16" else 2e-2)


def test_the_loop_holds_one_sum_for_each_product_of_pairs():
    """Its tiles have 16 columns, whatever K is; masked products of all levels are added to one sum. The rest has no loop."""
    sums = {"gla": 1, "kimi_delta_attention": 2, "gated_delta_rule_2": 2, "rwkv7": 4}
    for page in CHANNELS:
        for K in (64, 96):
            b = build(page, K)
            ((kernel, lp),) = looping(b).items()
            assert len(lp.carried) == sums[page] and lp.step == 16
            loaded = {o.type.dims[-1] for o in lp.ops if o.kind == "load"}
            assert loaded == {16} and any(o.kind == "load" and o.attr("piece") == (0, 16) for o in lp.ops)
            assert kernel.threads == (64 if page == "rwkv7" else 32)
    assert [k.threads // 32 for k in looping(build("gla", piece_warps=2))] == [2]
    assert not looping(build("gla", K=16)) and not looping(build("gla", k_piece=0))


def test_no_loop_where_a_tile_with_k_depends_on_a_product():
    """The inverse, which needs all of K, multiplies a tile with K. In a kernel of its own that product needs no loop either."""
    together, apart = (("@gate_sum", "@inverse", "@weight", "@offset"),), (("@gate_sum", "@inverse"), ("@weight", "@offset"))
    for groups, found in ((together, []), (apart, ["G_Tinv"])):
        s = varied("prepared", kernels=(*groups, ("@state", "@solution"), ("@output",)), k_piece=16)
        b = Build("triton", 32, algorithm="kimi_delta_attention", schedule=s, head_dim_k=64, head_dim_v=32)
        assert [k.name for k in looping(b)] == found


def test_the_cost_of_a_kernel_is_that_of_all_pieces():
    """As many multiplications and bytes of callers' tensors as without pieces."""
    whole, pieces = (costs(lowered(build("gla", k_piece=n)), [64], 1, 1) for n in (0, 16))
    assert {n: (x.bytes, x.flops) for n, x in whole.items()} == {n: (x.bytes, x.flops) for n, x in pieces.items()}


def test_padding_of_k_adds_nothing():
    """K = 36 has tiles of 64 columns. The last pieces read what no tensor has."""
    b, c = build("kimi_delta_attention", K=36), Case((40, 3), value_heads=1)
    x = drawn("kimi_delta_attention", c, lowered(b), {"C": 32, "K": 36, "V": 32})
    for got, want in zip(computed(b, c, x), expected("kimi_delta_attention", c, x), strict=True):
        assert rms_error(got, want) < 2e-2

