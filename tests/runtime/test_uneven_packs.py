"""What dispatch takes on Hopper for packs whose longest sequence the host knows, of pages with a gate for each channel."""
import pytest
import torch

from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.call.device import described
from gdn_codegen.runtime.call.request import Call, Request
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.schedule.contract import Contract

PLAIN, LAYER = "g=floored", "g=safe/bfloat16,q=l2norm,k=l2norm,beta=sigmoid"
WHOLE, HALVES = ("walk_in_turn", None, 0), ("walk_in_turn", None, 64)
OPERANDS, IN_PARTS, PARTS_IN_HALVES = (("operand_walk", *x) for x in ((None, 64), ("decay", 0), ("decay", 64)))


def chosen(heads, sequences, tokens, longest, accept=PLAIN, page="kimi_delta_attention"):
    """(schedule, partition, columns of V) of the build, and whether another with short warm-ups runs first."""
    extent = Extent(heads, heads, sequences, tokens, True, longest)
    call = Call(Request(algorithm=page, target="tilelang"), torch.bfloat16, torch.device("cuda"), (128, 128), extent,
                Contract.parse(accept) if accept else Contract())
    b = choose.choice(call, described("NVIDIA H200")).build
    return (b.plan.name, b.plan.partition, b.plan.v_block), b.earlier is not None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("longest, plain, layer", [
    (2048, WHOLE, WHOLE), (5632, WHOLE, WHOLE), (7168, HALVES, OPERANDS), (9216, OPERANDS, OPERANDS),
    (20480, IN_PARTS, IN_PARTS)])
def test_the_longest_sequence_decides(longest, plain, layer):
    """13 sequences of 26482 tokens with 16 heads. Many tokens have a pair of builds, but not those of a layer."""
    about = 16, 13, 26482, longest
    assert chosen(*about) == (plain, longest > 6000)
    assert chosen(*about, LAYER) == (layer, False)
    unbounded = ("operand_walk", None, 64 if longest > 6000 else 0) if layer != IN_PARTS else IN_PARTS
    assert chosen(*about, "")[0] == chosen(*about, "", "gla")[0] == unbounded


@pytest.mark.usefixtures("unchecked")
def test_few_tokens_have_no_pair_and_parts_in_halves():
    """19 sequences with 8 heads; two with 12."""
    assert chosen(8, 19, 8316, 2304) == (OPERANDS, False)
    assert chosen(8, 19, 8316, 6656) == (PARTS_IN_HALVES, False)
    assert chosen(12, 2, 27663, 24576, "") == (IN_PARTS, False)
    assert chosen(12, 2, 27663, 24576) == (IN_PARTS, True)
    assert chosen(12, 2, 6528, 3840)[0] == OPERANDS  # of nearly the same length


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("heads, sequences, tokens, longest", [
    (64, 34, 374, 11), (48, 19, 2235, 1694), (64, 31, 4371, 141), (64, 34, 374, 0)])
def test_short_sequences_have_whole_walks(heads, sequences, tokens, longest):
    """Each walk takes longer than its tokens: beside 18 short sequences with 48 heads one of 1694 tokens is no long one."""
    for accept in (PLAIN, LAYER):
        assert chosen(heads, sequences, tokens, longest, accept) == (WHOLE, False)
