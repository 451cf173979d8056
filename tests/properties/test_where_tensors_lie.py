"""Every tensor of a call in every way that it can lie in memory: nothing beside it is written, and results are right."""
import pytest
import torch
from guarded import STATES, TENSORS, every_way, laid
from tiers import every

from gdn_codegen.runtime.targets import runs

pytestmark = pytest.mark.slow

TARGETS = ("triton", "tilelang", "pto")


def ways(name, target, **options):
    if not runs(target, "cpu"):
        pytest.skip(f"{target} does not run here")
    assert every_way(name, target=target, chunk_size=16, **options) > 3


@pytest.mark.parametrize("target, name", every(2, TARGETS, TENSORS))
def test_nothing_beside_a_tensor_is_touched(target, name):
    ways(name, target)


# What follows is the same text for all targets, so the one that compiles nothing tries it.
@pytest.mark.parametrize("name", ["out", "v"])
def test_in_the_other_layout(name):
    ways(name, "triton", layout="bhtd")


def test_states_in_place():
    ways("initial_state", "triton", in_place=True)


@pytest.mark.parametrize("name", STATES)
def test_states_in_a_pool(name):
    ways(name, "triton", pool=True)


def test_out_that_is_widened():
    """TileLang's C backend has no bfloat16: what it writes is another tensor, whatever the strides of dims of size 1 are."""
    ways("out", "tilelang", dtype=torch.bfloat16)


# --- the guards see what they are for -----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["dense", "slice", "apart", "columns"])
def test_guards_see_every_byte(kind):
    y = laid(torch.ones(2, 3, 4, 5), kind, 4)
    assert y.x.data_ptr() % 16 == 4 and y.mine.sum() == y.x.numel() * 4 and not y.touched(True)
    y.x.fill_(7)
    assert y.touched(True) and not y.touched(False)
    for beside in (~y.mine).nonzero().flatten()[::97]:
        y.memory[beside] ^= 1
        assert y.touched(False)
        y.memory[beside] ^= 1
