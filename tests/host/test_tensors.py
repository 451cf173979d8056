"""host/tensors.py by itself: where tensors of a generated module lie."""
import torch

from gdn_codegen.host import tensors as t


def test_a_pool_is_flat_from_its_first_element_to_its_last():
    assert t._flat("S", torch.zeros(3, 40)[:, :32].unflatten(1, (2, 4, 4))).shape == (112,)


def test_plain_is_dense_aligned_and_has_the_strides_of_its_shape():
    odd = torch.zeros(9)[1:].view(2, 4)
    for x in (odd, torch.zeros(4, 2).T, torch.zeros(1, 4).as_strided((1, 4), (9, 1))):
        y = t._plain(x, torch.float32)
        assert y.data_ptr() % 16 == 0 and t._is_plain(y, torch.float32) and torch.equal(x, y)
    assert not t._is_plain(torch.zeros(4, 2).T, torch.float32) and not t._is_plain(torch.zeros(2), torch.half)


def test_steps_are_by_batch_token_and_head():
    assert t._steps((9, 3, 1, 1), "bthd") == (9, 3, 1) and t._steps((9, 3, 1, 1), "bhtd") == (9, 1, 3)
