"""The arguments of a call of the package's ops, by name: its tensors, and its options before normalisation."""
from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor


class Tensors(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    state_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    retrieve_parent_token: Tensor | None
    intermediate_state_indices: Tensor | None
    cu_seqlens: Tensor | None
    final_state: Tensor | None
    out: Tensor | None
    intermediate_states_buffer: Tensor | None = None
    chunk_indices: Tensor | None = None
    chunk_offsets: Tensor | None = None
    checkpoint_positions: Tensor | None = None
    checkpoint_slots: Tensor | None = None


# Most calls are plain tuples of these tensors, which take a tenth of the time to make. Indices of some fields, and their numbers:
INITIAL, FINAL, OUT, BUFFER = map(Tensors._fields.index, ("initial_state", "final_state", "out", "intermediate_states_buffer"))
#: Tensors of integers that kernels read, in the order in which modules take them.
INTEGERS = tuple(map(Tensors._fields.index, ("state_indices", "num_accepted_tokens", "intermediate_state_indices",
                                             "retrieve_parent_token")))
#: How many inputs every call has; with A_log and dt_bias; tensors that kernels read or write. They are the first in Tensors.
INPUTS, RAW_INPUTS, IN_KERNELS = map(Tensors._fields.index, ("A_log", "initial_state", "chunk_indices"))
#: The first of the two tensors about states at positions.
POSITIONS = Tensors._fields.index("checkpoint_positions")


def name_of(n: int, t: tuple[Any, ...]) -> str:
    """What callers call a tensor of a call. The buffer for states by token is `checkpoint_states` beside positions."""
    return "checkpoint_states" if n == BUFFER and t[POSITIONS] is not None else Tensors._fields[n]


class Options(NamedTuple):
    """The options of a call: all arguments other than tensors and the scale. longest: as in Request."""

    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    head_first: bool
    layout: str | None
    gate: str
    beta_form: str
    allow_neg_eigval: bool
    state_v_first: bool
    state_dtype: torch.dtype | None
    inplace_final_state: bool | None
    target: str
    schedule: Any
    chunk_size: int | None = None
    checkpoint_chunks: int = 0
    unit_keys: bool = False
    batch_invariant: bool | None = None
    aligned_positions: bool = False
    longest: int = 0
    save: str = "nothing"


#: Options that follow from another argument.
DERIVED = ("longest",)
#: Options that are True or False, and nothing else.
FLAGS = tuple(n for n, kind in get_type_hints(Options).items() if kind is bool)
