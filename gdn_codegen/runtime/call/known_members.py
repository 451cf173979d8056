"""Calls of members that came before: what they decided is kept, and repeated without their checks.

A call's kind is all that its arguments say but the values of its tensors: names, shapes, strides, dtypes, devices, and whatever
is no tensor. Only tensors that the module is given as they came have a place in what is kept.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...host.host import Host
from ...host.tensors import _is_transformed
from ..admit import captures
from .aliasing import reach, shared, written
from .arguments import Tensors
from .foreign_keywords import LENGTHS, ends_of, longest
from .given import given_to, integers_of
from .launch import PLAIN, RECENT, kind
from .native_launcher import Asked, NotReady, call_launcher, kernels_ahead
from .normalise import reads
from .request import Inputs, Request


class Said(NamedTuple):
    """What a caller says. tensors: all arguments, None for those that are no tensors. others: names of the arguments, and the
    values of those that are no tensors. ends: where cu_seqlens is."""

    tensors: tuple[Tensor | None, ...]
    others: tuple[Any, ...]
    numbers: dict[str, Any]
    recurrent: bool
    ends: int


@dataclass
class Known:
    """What is kept of a call. places: for inputs, states, outputs, buffers and integers, where the module's tensors are among the
    caller's, None for absent ones. written: places of those that the call writes. state: that of initial and of final state.
    reaches: as in aliasing.check_written."""

    module: Any
    plan: Any
    checkpoints: bool
    places: tuple[tuple[int | None, ...], ...]
    ends: int | None
    written: tuple[int, ...]
    state: tuple[int, int]
    reaches: tuple[int, ...]
    came_again: bool = False
    again: Callable[..., Any] | None = None


_known: dict[Any, Known] = {}
#: Types of most arguments that are no tensors: a look-up here is quicker than isinstance.
PYTHONS = frozenset((type(None), bool, int, float, str))
#: How many kinds are kept at most.
MOST = 1024
#: The calls that came last as functions, as in launch.py.
recent: tuple[Callable[..., Any], ...] = ()


def numbers_for(host: Host, given: Mapping[str, Any]) -> tuple[float, ...]:
    """The numbers that kernels take: the caller's by name, or the page's defaults for None."""
    return host.numbers_of([given.get(n) for n in host.tables.scalars])


def said(algorithm: str, inputs: dict[str, Any], numbers: dict[str, Any], named: dict[str, Any], others: dict[str, Any],
         forms: str, recurrent: bool) -> Said:
    """What the arguments of members.call say. Of keywords about lengths only the longest length that they give counts."""
    ends, about_lengths = named.get("cu_seqlens"), [n for n in LENGTHS if others.get(n) is not None]
    if about_lengths:
        given = ends_of(ends, others)
        others = others | {n: longest(n, others[n], given) for n in about_lengths}
    values = [*inputs.values(), *named.values(), *others.values()]
    tensors = tuple([None if type(y) in PYTHONS or not isinstance(y, Tensor) else y for y in values])
    rest = [y for y in values if type(y) in PYTHONS or not isinstance(y, Tensor)]
    return Said(tensors, (algorithm, forms, *inputs, *named, *others, *rest), numbers, recurrent,
                len(inputs) + [*named].index("cu_seqlens"))


def _kind(s: Said) -> Any:
    """The kind of a call: also which of its tensors are one tensor."""
    given = [y for y in s.tensors if y is not None]
    same = tuple([(m, n) for n, y in enumerate(given) for m in range(n) if given[m] is y])
    return (s.others, tuple(map(type, s.others)), s.recurrent, same, tuple([None if y is None else kind(y) for y in s.tensors]))


def _places(s: Said, x: Tensor | None) -> list[int]:
    """Where a tensor is among the caller's."""
    return [n for n, y in enumerate(s.tensors) if y is x]


def again(s: Said) -> tuple[Any, ...] | None:
    """The results of a call of a kind that came before. None for another, and where something has to be said of it."""
    global recent
    scale = s.numbers.get("scale")
    for run in recent:
        results: tuple[Any, ...] | None = run(s.tensors, s.others, scale, s.recurrent)
        if results is not None:
            return results
    try:
        found = _known.get(_kind(s))
    except (TypeError, RuntimeError):  # an option without a hash, or a tensor without strides: settling says so
        return None
    if found is None or not _is_memory(s.tensors) or _overlap(s.tensors, found):
        return None
    if not found.came_again:
        with suppress(NotReady):
            found.again = _as_one(s, found)
            found.came_again = True
    if found.again is not None:
        recent = found.again, *[f for f in recent if f is not found.again][:RECENT - 1]
        results = found.again(s.tensors, s.others, scale, s.recurrent)
        if results is not None:
            return results
    host = found.plan.host
    given = [tuple([None if n is None else s.tensors[n] for n in places]) for places in found.places]
    inputs, states, outs, buffers, integers = given
    memory = found.plan.call(inputs, numbers_for(host, s.numbers), states, outs, None if found.ends is None else
                             s.tensors[found.ends], (*buffers, None) if found.checkpoints else buffers, integers)
    made: tuple[Any, ...] = host.results(memory, found.plan.wanted)
    return made


def _is_memory(tensors: tuple[Tensor | None, ...]) -> bool:
    """True if the values of tensors are those in their memory, and none of them wants gradients."""
    if _is_transformed():
        return False
    differentiates = torch.is_grad_enabled()
    return all(y is None or (type(y) in PLAIN and not y.is_neg() and not (differentiates and y.requires_grad)) for y in tensors)


def _overlap(tensors: tuple[Any, ...], c: Known) -> bool:
    """Whether a tensor that the call writes shares memory with another."""
    for n in c.written:
        first = tensors[n].data_ptr()
        for m, y in enumerate(tensors):
            if y is None or m == n or (n in c.state and m in c.state and y is tensors[n]):
                continue
            at = y.data_ptr()
            if at < first + c.reaches[n] and first < at + c.reaches[m] and shared(tensors[n], y):
                return True
    return False


def keep(s: Said, about: Inputs, t: Tensors, x: Request, module: Any, plan: Any) -> None:
    """Keep what a call decided, for those of its kind. Nothing is kept where each call looks at values, where the module was
    given other tensors than the call, and of a captured call, which may not have been admitted."""
    looks = "linear" in x.forms and reads(about.inputs[0])
    if looks or t.chunk_indices is not None or t.chunk_offsets is not None or captures(about.inputs[0].device):
        return
    one_state = t.initial_state is t.final_state
    if any(len(_places(s, y)) > (2 if one_state and y is t.initial_state else 1) for y in s.tensors if y is not None):
        return
    inputs, states, outs, ends, buffers = given_to(about, t, x, None)
    groups = inputs, states, outs, buffers[:-1] if x.checkpoint_chunks else buffers, integers_of(t, x), (ends,)
    if not all(_places(s, y) for group in groups for y in group if y is not None):
        return
    *places, (at,) = [tuple([None if y is None else _places(s, y)[0] for y in group]) for group in groups]
    pair = [_places(s, y) for y in (t.initial_state, t.final_state) if y is not None]
    state = (pair[0][0], pair[1][-1]) if len(pair) == 2 else (-1, -1)
    writes = tuple(_places(s, t[n])[0] for n in written(t, x.in_place))
    try:
        if len(_known) >= MOST:
            _known.clear()
        _known[_kind(s)] = Known(module, plan, x.checkpoint_chunks > 0, tuple(places), at, writes, state,
                                 tuple(map(reach, s.tensors)))
    except TypeError:  # an option without a hash
        return


def _as_one(s: Said, c: Known) -> Callable[..., Any] | None:
    """A known call as one function of tensors, other arguments, the scale, and whether it may be a step. None where it cannot be
    one (native_launcher.py)."""
    names = [*c.plan.tables.scalars]
    if c.checkpoints or names not in ([], ["scale"]):
        return None
    first, last = c.state
    about = Asked(s.others, s.recurrent, first >= 0 and s.tensors[first] is s.tensors[last], c.written,
                  numbers_for(c.plan.host, {})[0] if names else 0.0, lambda t: None, c.state, len(s.tensors))
    place = [0 if n is None else n for group in c.places for n in group]
    return call_launcher(c.plan, kernels_ahead(c.module), about, s.tensors, place, s.ends if c.ends is None else c.ends)


def forget() -> None:
    """Drop what is kept for further calls: for tests."""
    global recent
    recent = ()
    _known.clear()
