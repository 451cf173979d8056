"""Calls that are differentiated: which they are, what they cannot ask for, and what they save."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ...host.tensors import _fail
from .arguments import RAW_INPUTS, Options, Tensors, name_of
from .by_token import ARGUMENTS
from .gradient_builds import check_target
from .normalise import SAVED, settled
from .request import DEFAULT_CHUNK, Request
from .stored_states import check_undifferentiated

#: Tensors of a call that nobody differentiates by, or through.
_LENT = ("out", "final_state", "state_indices", *ARGUMENTS, "checkpoint_positions", "checkpoint_slots")
#: What is accepted in place of a tensor to which a call writes.
NONE = "None beside a tensor that requires grad, or a call under torch.no_grad()"


def differentiates(tensors: Iterable[Any]) -> bool:
    """Whether the gradient by one of these may be asked for. Items may be None."""
    return torch.is_grad_enabled() and any(getattr(y, "requires_grad", False) for y in tensors)


def differentiable(t: Tensors, x: Request, save: str, called: Mapping[str, str] = MappingProxyType({})) -> Request:
    """The Request of a call that is differentiated, which saves what `save` says. ValueError for what has no gradient.

    called: what callers call arguments, by our names.
    """
    def refuse(name: str, got: object, accepted: str) -> None:
        _fail(called.get(name, name), got, accepted)
    check_target(x.target)
    for name in _LENT:
        if getattr(t, name) is not None:
            refuse(name_of(Tensors._fields.index(name), t), "a tensor", NONE)
    if x.in_place:
        refuse("initial_state", "a tensor that the call overwrites", "inplace_final_state=False beside a tensor that requires "
               "grad, or a call under torch.no_grad()")
    if x.checkpoint_chunks:
        refuse("checkpoint_chunks", x.checkpoint_chunks, "0 beside a tensor that requires grad, or a call under torch.no_grad()")
    if save == "nothing" or x.decode:  # a decoding step has one chunk, or few
        return x
    ending, rounded = SAVED[save]
    return replace(x, algorithm=x.algorithm + ending, rounded_states=rounded, chunk_size=x.chunk_size or DEFAULT_CHUNK)


def asked_of(t: Tensors, x: Options, decode: bool) -> Request:
    """`settled` for Gated DeltaNet's ops, with what a call that is differentiated needs."""
    asked = settled(t, x, decode)
    if not differentiates(t[:RAW_INPUTS + 1]):
        return asked
    check_undifferentiated(t, x)
    return differentiable(t, asked, x.save)
