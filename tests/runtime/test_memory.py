"""Which tensors share memory, beside a list of all their addresses."""
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call.aliasing import shared
from gdn_codegen.runtime.load import module

MEMORY = torch.zeros(4096, dtype=torch.float16)


def addresses(x):
    """Of each byte, as often as it is in the tensor."""
    found = [x.data_ptr()]
    for n, far in zip(x.shape, x.stride(), strict=True):
        found = [a + i * far * x.element_size() for a in found for i in range(n)]
    return [a + i for a in found for i in range(x.element_size())]


def views(sizes=(1, 2, 3, 5), gaps=(0, 1, 2, 7)):
    """Tensors whose dims step over what finer ones reach, in any order, here and there with gaps."""
    @st.composite
    def one(draw):
        shape, strides, reach = [], [], 1
        for _ in range(draw(st.integers(1, 3))):
            n, far = draw(st.sampled_from(sizes)), reach + draw(st.sampled_from(gaps))
            shape.append(n)
            strides.append(far)
            reach = far * n
        order = draw(st.permutations(range(len(shape))))
        return MEMORY.as_strided([shape[i] for i in order], [strides[i] for i in order], draw(st.integers(0, 60)))
    return one()


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(views(), views())
def test_nothing_is_said_to_be_shared_that_is_not(x, y):
    assert not shared(x, y) or set(addresses(x)) & set(addresses(y))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(views(), st.integers(0, 60), st.integers(1, 60))
def test_what_shares_with_a_dense_tensor_is_seen(x, start, size):
    y = MEMORY[start:start + size]
    assert shared(x, y) == shared(y, x) == bool(set(addresses(x)) & set(addresses(y)))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(views(), st.integers(0, 60))
def test_what_shares_with_a_view_of_the_same_strides_is_seen(x, start):
    y = MEMORY.as_strided(x.shape, x.stride(), start)
    assert shared(x, y) == bool(set(addresses(x)) & set(addresses(y)))


@pytest.mark.parametrize("shape, strides, apart", [
    ((3, 4), (4, 1), True), ((3, 4), (3, 1), False), ((3, 4), (0, 1), False), ((1, 4), (0, 1), True), ((4, 3), (1, 4), True),
    ((2, 2, 4), (8, 16, 1), True), ((2, 3, 4), (4, 16, 1), True), ((3, 3, 4), (4, 8, 1), False), ((0, 4), (0, 1), True)])
def test_whether_an_element_is_in_two_places(shape, strides, apart):
    x = MEMORY.as_strided(shape, strides)
    assert module(Build("pto"))._is_apart(x) == apart == (len(set(addresses(x))) == len(addresses(x)))
