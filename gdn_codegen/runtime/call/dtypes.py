"""Calls with dtypes for which there are no kernels: rounds or widens their tensors before and after the kernels."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .arguments import Options, Tensors
from .stored_states import stores, with_stored


def _states(t: Tensors, x: Options) -> torch.dtype | None:
    """The dtype of states that a call makes, where it is neither initial_state's nor float32, which takes any."""
    initial, final = t.initial_state, t.final_state
    if initial is None or initial is final or t.state_indices is not None or x.inplace_final_state:
        return None
    said = x.state_dtype if final is None else final.dtype
    dtype = getattr(torch, said) if isinstance(said, str) else said
    return None if dtype in (None, torch.float32, initial.dtype) else dtype


def adapts(t: Tensors, x: Options) -> bool:
    """True if a call has to be made in other dtypes: q or k in float32 with v in 16 bits, states of two dtypes or in float8."""
    return t.q.dtype != t.v.dtype or t.k.dtype != t.v.dtype or stores(t, x) or _states(t, x) is not None


def adapted(t: Tensors, x: Options, call: Callable[[Tensors, Options], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What a call gives, by way of `call` with tensors in dtypes that kernels take. q and k are rounded to v's dtype."""
    return with_states(t._replace(q=t.q.to(t.v.dtype), k=t.k.to(t.v.dtype)), x, call)


def with_states(t: Tensors, x: Options, call: Callable[[Tensors, Options], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What a call gives, by way of `call` with states that kernels take. States of two dtypes pass through float32, so that
    each is rounded once."""
    if stores(t, x):
        return with_stored(t, x, lambda t, x: with_states(t, x, call))
    dtype, final = _states(t, x), t.final_state
    if dtype is None:
        return call(t, x)
    if final is None:
        o, state, *checkpoints = call(t, x._replace(state_dtype=torch.float32))
        state = None if state is None else state.to(dtype)
    else:  # a buffer of its shape and strides, which are checked like its own
        wide = torch.empty_strided(final.shape, final.stride(), dtype=torch.float32, device=final.device)
        o, state, *checkpoints = call(t._replace(final_state=wide), x._replace(state_dtype=None))
        state = final.copy_(state)
    return o, state, *(y.to(dtype) for y in checkpoints)
