"""Keywords of other libraries, for calls that repeat them: their meaning is kept, as a compiled function.

`renamed` (foreign_keywords.py) finds the meaning of a call's keywords; that takes 6 to 15 us. It depends on the names of the
keywords, on which tensors are given, and on the values that are no tensors. Calls that have the same of these need only their
tensors put in their places. native_keywords.h does that. It is a part of the native launcher's library. Without it each call
takes the way through `renamed`.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import native_launcher
from .arguments import DERIVED, Options, Tensors
from .foreign_keywords import IGNORED, LENGTHS, MEANT, least, renamed

#: Keywords at whose values each call looks: numbers, those of tensors, or which tensors they are.
LOOKED_AT = *LENGTHS, "output_state_indices", "core_attn_out"
#: Keywords whose meaning holds for the shape of one of our tensors.
OF_SHAPE = {"cache_steps": "intermediate_states_buffer"}
#: Where cu_seqlens is among Tensors, and the longest sequence among Options.
ENDS, LONGEST = Tensors._fields.index("cu_seqlens"), Options._fields.index("longest")
#: Classes of tensors that may be put in their places.
PLAIN = Tensor, torch.nn.Parameter
Call = tuple[tuple[Any, ...], tuple[Any, ...]]
#: Functions for the calls that came last, RECENT at most, each with its keywords of LOOKED_AT.
recent: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = ()
RECENT = 8


@dataclass(frozen=True)
class _Mark:
    """Stands for a tensor of a call, of which nothing is known but its place: among the call's tensors, then the keywords."""

    place: int


def spelled(t: tuple[Any, ...], x: tuple[Any, ...], others: dict[str, Any], chunk: int = 0, ours: bool = False) -> Call:
    """The same call, as Tensors and Options, without keywords of other libraries.

    chunk: as `renamed` takes it. ours: whether names of Tensors and Options may be among `others`; they replace those of t and x.
    """
    global recent
    if torch.compiler.is_dynamo_compiling():
        return _translated(t, x, others, chunk, ours)
    about = chunk, ours
    for known, looked_at in recent:
        call = known(t, x, others, about)
        if call is not None:
            return _look(call, others, chunk, looked_at) if looked_at else call
    done = _translated(t, x, others, chunk, ours)
    if native_launcher.keywords is not None:
        kept = _kept(native_launcher.keywords, t, x, others, chunk, ours)
        recent = (kept, *recent[:RECENT - 1]) if kept is not None else recent
    return done


def _own(own: dict[str, Any], others: dict[str, Any], chunk: int, ours: bool) -> dict[str, Any]:
    """`own`, our arguments by name, with what keywords say of them."""
    mine = {n: y for n, y in others.items() if ours and n in own and n not in DERIVED}
    return renamed(own | mine, {n: y for n, y in others.items() if n not in mine}, chunk)


def _translated(t: tuple[Any, ...], x: tuple[Any, ...], others: dict[str, Any], chunk: int, ours: bool) -> Call:
    own = _own({**Tensors(*t)._asdict(), **Options(*x)._asdict()}, others, chunk, ours)
    return Tensors(*(own[n] for n in Tensors._fields)), Options(*(own[n] for n in Options._fields))


def _look(call: Call, others: dict[str, Any], chunk: int, looked_at: tuple[str, ...]) -> Call:
    """The call, after what depends on more than which tensors are given."""
    t, x = call
    if LENGTHS.keys() >= set(looked_at):  # in less than half of the time that the general way takes
        found = x[LONGEST]
        for name in looked_at:
            found = least(found, name, others[name], t[ENDS])
        return t, (*x[:LONGEST], found, *x[LONGEST + 1:])
    own = dict(zip((*Tensors._fields, *Options._fields), (*t, *x), strict=True))
    for name in looked_at:
        MEANT[name](own, others[name], chunk)
    values = tuple(own.values())
    return values[:len(t)], values[len(t):]


def _kept(make: Callable[[dict[str, Any]], Callable[..., Any]], t: tuple[Any, ...], x: tuple[Any, ...], others: dict[str, Any],
          chunk: int, ours: bool) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """What `recent` holds for this call. None where its keywords have no meaning apart from their tensors.

    Marks stand for tensors, so that nothing here can depend on one."""
    looked_at = tuple(n for n in LOOKED_AT if others.get(n) is not None)
    sorts = {n: "tensor" if type(y) in PLAIN and n not in IGNORED else "any" if n in IGNORED or n in looked_at else "equal"
             for n, y in others.items()}
    found = *t, *others.values()
    marks = [None if y is None else _Mark(n) for n, y in enumerate(t)]
    values = {n: _Mark(at) if sorts[n] == "tensor" else y for at, (n, y) in enumerate(others.items(), len(t))}
    meant = {n: y for n, y in values.items() if sorts[n] != "any" and n not in looked_at and n not in OF_SHAPE}
    try:
        own = _own(dict(zip((*Tensors._fields, *Options._fields), (*marks, *x), strict=True)), meant, chunk, ours)
    except ValueError:
        return None
    tensors, options = [own[n] for n in Tensors._fields], tuple(own[n] for n in Options._fields)
    shaped = [own[OF_SHAPE[n]] for n, y in others.items() if n in OF_SHAPE and y is not None]
    if any(type(y) is _Mark for y in options) or any(type(y) is not _Mark for y in (*tensors, *shaped) if y is not None):
        return None
    shapes = [(y.place, found[y.place]) for y in shaped if y is not None]
    if len(shapes) < len(shaped) or any(type(y) not in PLAIN for _, y in shapes):
        return None
    return make(dict(
        about=(chunk, ours), options=options, said=list(x), names=list(others), given=[y is not None for y in t],
        sorts=list(sorts.values()), values=[y if sorts[n] == "equal" else None for n, y in values.items()],
        places=[-1 if y is None else y.place for y in tensors], shapes=[(n, tuple(y.shape)) for n, y in shapes])), looked_at
