"""What a generated module is given of a call's tensors, and in which order."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir.differentiate import TRANSPOSED
from .arguments import BUFFER, FINAL, INTEGERS, Tensors
from .request import Inputs, Request

ROWS = Tensors._fields.index("intermediate_state_indices")


def given_to(about: Inputs, t: Tensors, x: Request, checkpoints: Tensor | None) -> tuple[Any, ...]:
    """A call's tensors as modules take them: inputs, states, outputs, ends, buffers."""
    buffers = tuple(t[n] for n in buffers_of(x))
    return ((*about.inputs, *about.of_heads), (t.initial_state,), (t.out,), t.cu_seqlens,
            (*buffers, checkpoints) if x.checkpoint_chunks or t.checkpoint_positions is not None else buffers)


def buffers_of(x: Request) -> tuple[int, ...]:
    """Indices of the tensors to which a call writes final states and states by token."""
    words = x.by_token.split("/")
    return (*(() if x.in_place or "frozen" in words else (FINAL,)), *((BUFFER,) if "rows" in words else ()))


def places_of_integers(t: tuple[Any, ...], x: Request) -> tuple[int, ...]:
    """Indices of the tensors of integers that a call's module takes. It takes rows of states even where they are not given."""
    rows = "rows" in x.by_token.split("/")
    return tuple(n for n in INTEGERS if t[n] is not None or (rows and n == ROWS))


def integers_of(t: tuple[Any, ...], x: Request) -> tuple[Any, ...]:
    """The tensors of integers that a call's module takes."""
    return tuple(t[n] for n in places_of_integers(t, x))


def in_page_order(name: str, states: Tensor) -> Tensor:
    """States of chunks with the page's order of dims, or back, as a view. name: the tensor of the module, which says how it
    lies."""
    return states.transpose(-1, -2) if name.endswith(TRANSPOSED) else states


def _transposed(device: torch.device) -> bool:
    """Whether the tiles of saved states lie transposed in memory. On a GPU walks in both directions read and store them so."""
    return device.type == "cuda"


def kept_in_order(states: Tensor) -> Tensor:
    """Saved states [slots, HV, K, V] in the memory order of `empty_kept`. That is a copy only if they lie otherwise."""
    return states.mT.contiguous().mT if _transposed(states.device) else states.contiguous()


def empty_kept(like: Tensor, slots: Any, heads: Any, K: Any, V: Any, rounded: bool) -> Tensor:
    """Memory for the states that a call saves for its gradient: [slots, HV, K, V], in the dtype of `like` if rounded, else in
    float32."""
    dims = (V, K) if _transposed(like.device) else (K, V)
    made = like.new_empty((slots, heads, *dims), dtype=like.dtype if rounded else torch.float32)
    return made.mT if _transposed(like.device) else made
