"""A tensor that a gradient needs and that a later call overwrites: torch then refuses the backward pass, as for its own ops."""
import pytest
import torch

from gdn_codegen import chunk_gated_delta_rule, pages, recurrent_gated_delta_rule, selective_state_update
from gdn_codegen.ir.builder import algorithm, carried, lower

T, K = 4, 16


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def summed(q, k, v, S):
    return q @ S + lower(q @ k.T) @ v, S + k.T @ v


def drawn():
    torch.manual_seed(0)
    return dict(q=torch.randn(1, T, 1, K), k=torch.randn(1, T, 1, K) / 4, v=torch.randn(1, T, 1, K), g=-torch.rand(1, T, 1),
                beta=torch.rand(1, T, 1), target="triton")


def state(*rows):
    return torch.randn(*(rows or (1,)), 1, K, K)


def of_page(x, y):
    op = pages.compile(summed, target="triton", chunk=16, head_dim_k=K, head_dim_v=K, dtype="float32")
    op(x["q"], x["k"], x["v"], final_state=y, output_final_state=True)


SLOT = torch.tensor([0])
#: memory that a call overwrites -> the memory, and the call
CALLS = {
    "out": (lambda: torch.randn(1, T, 1, K), lambda x, y: chunk_gated_delta_rule(**x, out=y)),
    "final_state": (state, lambda x, y: chunk_gated_delta_rule(**x, final_state=y)),
    "in place": (state, lambda x, y: chunk_gated_delta_rule(**x, initial_state=y, inplace_final_state=True)),
    "pool": (lambda: state(3), lambda x, y: chunk_gated_delta_rule(**x, initial_state=y, state_indices=SLOT)),
    "float8": (lambda: state().to(torch.float8_e4m3fn), lambda x, y: chunk_gated_delta_rule(**x, final_state=y)),
    "rows of draft tokens": (lambda: state(1, T), lambda x, y: recurrent_gated_delta_rule(
        **x, initial_state=state(2), state_indices=SLOT, intermediate_states_buffer=y, disable_state_update=True)),
    "positions": (lambda: state(2), lambda x, y: chunk_gated_delta_rule(
        **x, checkpoint_positions=torch.tensor([[2]]), checkpoint_slots=torch.tensor([[1]]), checkpoint_states=y)),
    "another member": (lambda: state(1), lambda x, y: selective_state_update(
        y, x["v"][:, 0], x["beta"][:, 0], -torch.ones(1), x["k"][:, 0], x["q"][:, 0], target="triton")),
    "a page": (state, of_page),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_gradient_is_refused(call):
    memory, overwrite = CALLS[call]
    x = drawn()
    for _ in range(3):  # later calls take what the first decided
        y, weight = memory(), torch.ones((), requires_grad=True)
        loss = (y.float() * weight).sum() if y.dtype != torch.float32 else (y * weight).sum()
        before = y._version
        overwrite(x, y)
        assert y._version > before
        if y.dtype == torch.float32:  # the product keeps y itself
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_inputs_are_not_overwritten():
    """Nor is a state that is only read, which a gradient may keep."""
    x, y, weight = drawn(), state(), torch.ones((), requires_grad=True)
    loss = (y * weight).sum()
    chunk_gated_delta_rule(**x, initial_state=y, output_final_state=True)
    chunk_gated_delta_rule(**x, initial_state=y, final_state=state())
    loss.backward()
    assert y._version == 0 and all(t._version == 0 for t in x.values() if isinstance(t, torch.Tensor))


def test_tensors_of_inference_mode_have_no_count():
    with torch.inference_mode():
        y = state()
        chunk_gated_delta_rule(**drawn(), initial_state=y, inplace_final_state=True)
    chunk_gated_delta_rule(**drawn(), initial_state=y, inplace_final_state=True)
    assert y.is_inference()
