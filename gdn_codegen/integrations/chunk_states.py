"""States before the chunks of a call, which FLA's older kernels return as `h` and some hosts read.

Row first(n) + c of h is the state of sequence n before its chunk c of 64 tokens, where first(n) is the number of chunks of the
sequences before n, rounded up for each. Hosts have as many rows as there are chunks, for which they wait for the device. Here h
has as many as there may be, so that nothing waits. Rows past the last chunk are undefined, and so are those of skipped sequences.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.call.request import DTYPES

CHUNK = 64


def chunk_states(v: Tensor, K: int, initial_state: Tensor | None, state_indices: Tensor | None, cu_seqlens: Tensor | None,
                 state_v_first: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """h [1, rows, HV, K, V] (or [..., V, K]) with the states before all first chunks, the row of these [N], and the keywords by
    which an op of ours stores the others. It is called next, as it may overwrite initial_state.

    v: [B, T, HV, V], with sequences as in cu_seqlens or one for each batch row. initial_state, state_indices: as our ops have
    them. dtype: of the op's final states. ValueError for one that kernels have not.
    """
    if dtype not in DTYPES:
        raise ValueError(f"initial_state: got {dtype}; accepted: {', '.join(map(str, DTYPES))}, of which h can be")
    (rows, tokens, heads, V), device = v.shape, v.device
    ends = torch.arange(0, rows * tokens + 1, max(tokens, 1), device=device) if cu_seqlens is None else cu_seqlens
    chunks = (ends.diff() + CHUNK - 1) // CHUNK
    count = rows * tokens // CHUNK + len(chunks)  # at least all chunks
    first = chunks.cumsum(0) - chunks
    h = v.new_empty((count + 1, heads, *((V, K) if state_v_first else (K, V))), dtype=dtype)
    at = first.where(chunks > 0, count)  # empty sequences share the last row
    if initial_state is None:
        h.index_fill_(0, at, 0)
    elif state_indices is None:
        h.index_copy_(0, at, initial_state.to(dtype))
    elif len(initial_state):
        h.index_copy_(0, at, initial_state.index_select(0, state_indices.clamp_min(0)))
    before = torch.arange(1, -(-tokens // CHUNK), device=device)  # chunks before a state
    if not len(before):
        return h[None], first, {}
    slots = (first[:, None] + before).where(before < chunks[:, None], -1).int()
    return h[None], first, dict(checkpoint_states=h, checkpoint_positions=(before * CHUNK).expand(slots.shape),
                                checkpoint_slots=slots, aligned_positions=True)
