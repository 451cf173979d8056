"""Bad calls of the short convolution's ops, for docs/errors.md: (argument, the op and what is wrong with it) -> the call."""
import torch
from trials_of_members import _of, half

B, T, D, W = 2, 8, 64, 4
X, WEIGHT, STATE = half(B, T, D), half(D, W), half(B, D, W - 1)
ROWS = dict(x=X.transpose(1, 2), weight=WEIGHT)
NUMBERS = torch.zeros(B, T, dtype=torch.int32)

CONVOLUTION = dict([
    *_of("causal_conv1d", dict(x=X, weight=WEIGHT),
         weight__missing=dict(weight=None), weight__taps=dict(weight=half(D, 5)), weight__channels=dict(weight=half(32, W)),
         x__rank=dict(x=X[0]), x__dtype=dict(x=X.double()), x__channels=dict(x=half(B, T, 17), weight=half(17, W)),
         bias__shape=dict(bias=half(3)), bias__device=dict(bias=WEIGHT[:, 0].to("meta")), bias__dtype=dict(bias=NUMBERS[0]),
         residual__shape=dict(residual=X[:, :2]), residual__dtype=dict(residual=X.long()),
         residual__device=dict(residual=X.to("meta")),
         initial_state__shape=dict(initial_state=STATE), activation__another=dict(activation="relu"),
         backend__another=dict(backend="mine"), cp_context__of_FLA=dict(cp_context=1),
         seq_idx__no_such_keyword=dict(seq_idx=NUMBERS), chunk_size__another=dict(chunk_size=8)),
    *_of("causal_conv1d_fn", ROWS,
         x__rank=dict(x=X[0]), initial_states__shape=dict(initial_states=half(B, D, W)),
         seq_idx__shape=dict(seq_idx=NUMBERS[:, 1:]),
         initial_states__beside_numbers_of_sequences=dict(seq_idx=NUMBERS, initial_states=STATE),
         return_final_states__beside_numbers_of_sequences=dict(seq_idx=NUMBERS, return_final_states=True),
         final_states_out__not_asked_for=dict(final_states_out=STATE), final_states_out__dtype=dict(
             return_final_states=True, final_states_out=STATE.long()), final_states_out__elements_in_two_places=dict(
             return_final_states=True, final_states_out=STATE[:1].expand(B, -1, -1)), final_states_out__a_leaf=dict(
             return_final_states=True, final_states_out=STATE.clone().requires_grad_())),
    *_of("causal_conv1d_update", dict(x=X[:, 0], conv_state=STATE, weight=WEIGHT),
         pad_slot_id__another=dict(pad_slot_id=0), cache_seqlens__ring_buffers=dict(cache_seqlens=NUMBERS[0]),
         x__rank=dict(x=X[0, 0]),
         conv_state__few_inputs=dict(conv_state=STATE[..., 1:]), conv_state__dtype=dict(conv_state=STATE.float()),
         conv_state__elements_in_two_places=dict(conv_state=STATE[:1].expand(B, -1, -1)),
         conv_state_indices__shape=dict(conv_state_indices=NUMBERS),
         **{"conv_state_indices__past the pool (*)": dict(conv_state_indices=torch.tensor([0, 2])),
            "conv_state_indices__two sequences in a slot (*)": dict(conv_state_indices=torch.tensor([1, 1]))},
         conv_state__sequences=dict(conv_state=half(3, D, W))),
])
