"""States in float8, which a caller stores and no kernel reads: calls widen them to float32, and round what they write.

FlashInfer's prefill takes such states (flashinfer/gdn_prefill.py at fb28d724). They have no scale: what is larger than the
dtype's largest number becomes that number, as in conversions of CUDA with satfinite.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...host.arguments import _check_device, _check_integers, _check_slots
from ...host.tensors import _fail, _is_apart
from .arguments import Options, Tensors
from .normalise import reads, request_of
from .request import STORED

#: What such states are not accepted beside.
BESIDE = ("checkpoint_positions", "checkpoint_slots", "intermediate_states_buffer", "num_accepted_tokens",
          "retrieve_parent_token")


def _wish(x: Options) -> Any:
    """The dtype that the call asks for, also where its name is given."""
    return getattr(torch, x.state_dtype, None) if isinstance(x.state_dtype, str) else x.state_dtype


def stores(t: Tensors, x: Options) -> bool:
    """Whether the call reads or writes states in float8."""
    return _wish(x) in STORED or any(y is not None and y.dtype in STORED for y in (t.initial_state, t.final_state))


def check_undifferentiated(t: Tensors, x: Options) -> None:
    """ValueError for states in float8 beside a tensor that requires grad: nothing differentiates through such rounding."""
    states = {n: getattr(t, n) for n in ("initial_state", "final_state")}
    for name, dtype in {"state_dtype": _wish(x), **{n: y.dtype for n, y in states.items() if y is not None}}.items():
        if dtype in STORED:
            _fail(name, dtype, "torch.float32, torch.bfloat16 or torch.float16 beside a tensor that requires grad")


def with_stored(t: Tensors, x: Options, call: Callable[[Tensors, Options], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What a call gives, by way of `call` with states in float32. Of a pool only the slots of the call's sequences are widened.

    Nothing waits for the device. ValueError where a state would be written inside of a sequence, and with batch_invariant=True
    where the final state is rounded.
    """
    for name in BESIDE:
        if getattr(t, name) is not None:
            _fail(name, "a tensor beside states in float8", "None, or states in 16 or 32 bits")
    slots, initial, final = t.state_indices, t.initial_state, t.final_state
    if slots is not None:
        _check_integers("state_indices", slots)
        if slots.ndim != 1:
            _fail("state_indices", f"rank {slots.ndim} beside states in float8", "rank 1")
    asked = request_of(t, x)
    into = initial if asked.in_place else final
    if slots is not None and initial is not None:
        _check_device("state_indices", slots, initial.device)
        if final is not None and len(final) < len(initial):
            _fail("final_state", f"{len(final)} slots", f"at least {len(initial)}, as many as initial_state has")
        if reads(slots):
            _check_slots(slots.tolist(), "state_indices", len(initial), into is not None)
    if into is not None and not _is_apart(into):
        _fail("initial_state" if asked.in_place else "final_state", f"strides {into.stride()}", "elements that do not overlap")
    held = initial if slots is not None else into
    rounds = held.dtype if held is not None else _wish(x)
    if asked.batch_invariant and rounds in STORED:
        _fail("state_dtype", f"{rounds} with batch_invariant=True",
              "torch.float32, because a state in 8 bits is rounded wherever a prompt is cut")
    one = final is initial
    wide = _widened(initial, slots)
    t = t._replace(initial_state=wide, final_state=wide if one else _widened(final, slots), state_indices=_numbered(slots))
    o, state, *checkpoints = call(t, x._replace(state_dtype=None if _wish(x) in STORED else x.state_dtype))
    if into is not None and into.dtype in STORED:
        _write(into, wide if asked.in_place else t.final_state, slots)
        state = into
    elif rounds in STORED and state is not None:
        state = _rounded(state, rounds)
    return o, state, *(_rounded(y, rounds) if rounds in STORED else y for y in checkpoints)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return x.float().clamp(-most, most).to(dtype)


def _numbered(slots: Tensor | None) -> Tensor | None:
    """The slots among those of the call alone; -1 stays."""
    if slots is None:
        return None
    return torch.where(slots < 0, -1, torch.arange(len(slots), dtype=slots.dtype, device=slots.device))


def _widened(x: Tensor | None, slots: Tensor | None) -> Tensor | None:
    """States of a buffer in float32, or those of slots of a pool. A buffer of another dtype stays as it is."""
    if x is None or x.dtype not in STORED:
        return x
    return (x if slots is None else _at(x, slots)).to(torch.float32, memory_format=torch.contiguous_format)


def _at(pool: Tensor, slots: Tensor) -> Tensor:
    """The states in these slots; those of -1 are any."""
    if not len(pool):
        return pool.new_empty((len(slots), *pool.shape[1:]))
    return pool.view(torch.uint8).index_select(0, slots.clamp(min=0)).view(pool.dtype)  # torch selects no float8


def _write(into: Tensor, states: Tensor | None, slots: Tensor | None) -> None:
    """Round states to a buffer, or to these slots of a pool. A sequence in slot -1 writes what the first one writes that has a
    slot: the same bits twice, so that nothing waits to learn how many have one."""
    assert states is not None
    new = _rounded(states, into.dtype)
    if slots is None:
        into.copy_(new)
    elif len(slots) and len(into):
        kept = slots >= 0
        which = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
        at = slots.index_select(0, which).clamp(min=0)
        bits = torch.where(kept.any(), new.view(torch.uint8).index_select(0, which), _at(into, at).view(torch.uint8))
        into.view(torch.uint8).index_copy_(0, at.long(), bits)
