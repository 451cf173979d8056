"""Runs normalised calls: finds the contract and the build of a call, keeps them for calls of the same kind, and launches."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...host.host import Host
from ...host.tensors import _fail, _is_transformed
from ..admit import Refused, admit, captures
from ..build import Build
from ..load import module
from . import choose_decode
from .aliasing import check_written, reach, written
from .arguments import IN_KERNELS, INITIAL, INPUTS, OUT, RAW_INPUTS, Options, Tensors
from .choose import choice, refuse
from .compiling import DoesNotCompile, compiling
from .device import Facts
from .differentiable import differentiates
from .dtypes import adapted, adapts
from .given import buffers_of, given_to, integers_of, places_of_integers
from .native_launcher import Asked, NotReady, call_launcher, kernels_ahead
from .normalise import check_chunks, reads, settled
from .positions import check
from .request import DECODE_CHUNK, DTYPES, Call, Inputs, Request, call_of, inputs_of


@dataclass
class Settled:
    """What the options, shapes, strides, dtypes and devices of a call decide."""

    asked: Request
    module: Any  # of the call; None if the call is repeated in other dtypes (runtime/call/dtypes.py)
    plan: Any  # the module's Plan; None without a module
    numbers: tuple[float, ...]  # if no scale is given
    sorts: list[type]  # types of the options
    given: tuple[int, ...]  # indices of the optional tensors that are given
    reaches: tuple[int, ...]  # bytes from the first element of each tensor to the end of its last
    buffers: tuple[int, ...]  # indices of the memory for final states and states by token
    integers: tuple[int, ...]  # indices of the tensors of integers
    came_again: bool = False
    again: Callable[..., Any] | None = None  # the call as one function. It takes long to make, so only a repeated call gets one


#: From a module's Host, the numbers that its kernels take.
Numbers = Callable[[Host], tuple[float, ...]]
_kept: dict[Any, Settled] = {}
#: Functions of the kinds of calls that came last, RECENT at most: (tensors, options, scale, decode) -> results, or None if the
#: call is of another kind. The next call is mostly of the same kind, as in all layers of a model.
recent: tuple[Callable[..., Any], ...] = ()
RECENT = 4

#: Classes of tensors whose values are those in their memory.
PLAIN = Tensor, torch.nn.Parameter


def chosen(call: Call, on: Facts | None = None) -> Build:
    """The build for a call, or for a decoding step if the call is one and names no schedule. ValueError where no target keeps
    states by token. on: the device, where it need not be here; None for the call's own."""
    step = choose_decode.choice(call, on) if call.request.decode and call.request.schedule is None else None
    if step is None and call.request.by_token and call.request.schedule is None:
        _fail("target", repr(call.request.target), f"triton or tilelang, which keep states by token ({call.request.by_token})")
    return (step or choice(call, on)).build


def admitted(call: Call, prepare: Callable[[Any], object]) -> Any:
    """The generated module for a call, after admission. prepare: plans the call of a module. None if its build is refused:
    dispatch then chooses another build. For a named schedule there is no other, and the error is raised."""
    b = chosen(call)
    m = module(b)
    try:
        with compiling(m, call.device.type):
            admit(b, m, call, lambda: prepare(m))
    except (Refused, DoesNotCompile) as e:
        if call.request.schedule is not None or not refuse(b, call.device, str(e)):
            raise
        warnings.warn(f"{e}. Calls take another build", RuntimeWarning, stacklevel=2)
        choose_decode.kept_choice.cache_clear()
        return None
    return m


def _check_step(t: Tensors, layout: str) -> None:
    """Raises ValueError if a sequence has more tokens than a decoding step takes. cu_seqlens on a GPU is not read: a longer
    sequence is then computed correctly, but slowly."""
    ends = t.cu_seqlens
    if ends is None:
        tokens = t.q.shape[1 if layout == "bthd" else 2]
        if tokens > DECODE_CHUNK:
            _fail("q", f"T = {tokens}", f"1 to {DECODE_CHUNK} tokens per sequence; chunk_gated_delta_rule takes more")
    elif ends.ndim == 1 and ends.numel() > 1 and ends.dtype in (torch.int32, torch.int64) and reads(ends):
        longest = int(ends.diff().max())
        if longest > DECODE_CHUNK:
            _fail("cu_seqlens", f"a sequence of {longest} tokens",
                 f"1 to {DECODE_CHUNK} tokens per sequence; chunk_gated_delta_rule takes more")


def _requires_grad(x: Any) -> bool:
    return x is not None and getattr(x, "requires_grad", False)


def wants_gradients(t: tuple[Any, ...]) -> bool:
    """`differentiates` for the tensors of a call, written out."""
    q, k, v, g, beta, a_log, dt_bias, initial, *_ = t
    return (q.requires_grad or k.requires_grad or v.requires_grad or g.requires_grad or beta.requires_grad
            or _requires_grad(initial) or _requires_grad(a_log) or _requires_grad(dt_bias))


def check_values(t: Tensors, x: Request, few: bool) -> None:
    """Check what shapes and dtypes do not show: factors below 0, tables of chunks, and tokens of a decoding step.

    Tensors of a shape or dtype that the module refuses pass."""
    if x.gate == "linear" and t.g.dtype in DTYPES and reads(t.g) and bool((t.g < 0).any()):
        _fail("g", f"{t.g.min().item():g} with gate='linear'", "factors of 0 or more")
    if t.chunk_indices is not None or t.chunk_offsets is not None:
        check_chunks(t.chunk_indices, t.chunk_offsets, t.cu_seqlens, x.chunk_size)
    if few and t.q.ndim == 4:
        _check_step(t, x.layout)
    if t.checkpoint_positions is not None or t.checkpoint_slots is not None or x.aligned_positions:
        check(inputs_of(t, x), t, x)


def serves(about: Inputs, t: Tensors, call: Call, checkpoints: Tensor | None = None,
           more: Callable[[int], tuple[Any, ...]] = lambda chunk: ()) -> Any:
    """The generated module for a call. more: from the tokens of a chunk, further tensors of integers."""
    x = call.request

    def prepare(m: Any) -> object:
        integers = *integers_of(t, x), *more(m.HOST.tables.chunk)
        return m.HOST.prepare(*given_to(about, t, x, checkpoints), call.wanted, integers, x.checkpoint_chunks, x.longest)
    m = None
    while m is None:
        m = admitted(call, prepare)
    return m


def numbers_for(host: Host, scale: float | None) -> tuple[float, ...]:
    """The numbers that kernels take: the scale, which is checked, or the page's default."""
    return host.numbers_of((None,)) if scale is None else (scale,)


def planned(about: Inputs, t: Tensors, call: Call, numbers: Numbers) -> tuple[Any, Any, tuple[Any, ...]]:
    """The module of a call, its plan, and the results."""
    x, m = call.request, serves(about, t, call)
    host: Host = m.HOST
    inputs, states, outs, ends, buffers = given_to(about, t, x, None)
    with compiling(m, call.device.type):
        integers = integers_of(t, x)
        plan = host.prepare(inputs, states, outs, ends, buffers, call.wanted, integers, x.checkpoint_chunks, x.longest)
        memory = plan.call(inputs, numbers(host), states, outs, ends, buffers, integers)
        return m, plan, host.results(memory, call.wanted)


def kind(x: Any) -> Any:
    """What of a tensor a call depends on, but for its values."""
    return x.shape, x.stride(), x.dtype, x.device


def _as_one(s: Settled, t: Tensors, x: tuple[Any, ...], decode: bool) -> Callable[..., Any] | None:
    """A settled call as one function of Tensors, Options, scale and decode: what the op returns, or None where something else
    came. None where it cannot be one (runtime/call/native_launcher.py), or where each call looks at values of g."""
    asked, m = s.asked, s.module
    if asked.checkpoint_chunks or (asked.gate == "linear" and reads(t.g)):
        return None
    at = Tensors._fields.index
    place = (*range(RAW_INPUTS if asked.gate == "raw" else INPUTS), INITIAL, OUT, *s.buffers, *s.integers)
    one_state = t.initial_state is t.final_state

    def look(t: tuple[Any, ...]) -> None:
        check_chunks(t[at("chunk_indices")], t[at("chunk_offsets")], t[at("cu_seqlens")], asked.chunk_size)

    about = Asked(x, decode, one_state, tuple(written(t, asked.in_place)), s.numbers[0], look)
    return call_launcher(s.plan, kernels_ahead(m), about, t[:IN_KERNELS], place, at("cu_seqlens"))


def are_plain(t: tuple[Any, ...]) -> bool:
    """Whether no tensor is of a class that may dispatch ops itself."""
    return all(type(y) in PLAIN or not isinstance(y, Tensor) for y in t)


def _settle(about: Any, t: Tensors, x: Options, scale: float | None, decode: bool, few: bool) -> tuple[Any, ...] | None:
    """The results of the first call of a kind, whose decisions are kept. None for tensors of a class that dispatches ops
    itself, as fake tensors do, and for calls that are differentiated."""
    if not are_plain(t) or differentiates(t[:RAW_INPUTS + 1]):
        return None
    asked, reaches = settled(t, x, decode), tuple(map(reach, t[:IN_KERNELS]))
    check_written(t, asked.in_place, reaches)
    sorts, given = [*map(type, x)], tuple(n for n, y in enumerate(t[:IN_KERNELS]) if n >= INPUTS and y is not None)
    if adapts(t, x):
        kept = Settled(asked, None, None, (), sorts, given, reaches, (), ())
        results = _adapted(t, x, scale, decode, few)
    else:
        check_values(t, asked, few)
        m, plan, results = planned(inputs_of(t, asked), t, call_of(t, asked), lambda host: numbers_for(host, scale))
        kept = Settled(asked, m, plan, m.HOST.numbers_of((None,)), sorts, given, reaches, buffers_of(asked),
                       places_of_integers(t, asked))
    if about is not None and not captures(t.q.device):  # a captured call may not have been admitted
        if len(_kept) >= 1024:
            _kept.clear()
        _kept[about] = kept
    return results


def _adapted(t: Tensors, x: Options, scale: float | None, decode: bool, few: bool) -> tuple[Any, ...]:
    return adapted(t, x, lambda t, x: eager(t, x, scale, decode, few) or ())


def _is_memory(t: tuple[Any, ...], given: tuple[int, ...]) -> bool:
    """True if the values of a call's tensors are those in their memory: no subclass, no negative bit, no transform.

    given: indices of the optional tensors that are given. The conditions are written out, because each call waits for them.
    """
    q, k, v, g, beta = t[:INPUTS]
    if not (type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor) and any(type(y) not in PLAIN for y in t[:INPUTS]):
        return False
    if q.is_neg() or k.is_neg() or v.is_neg() or g.is_neg() or beta.is_neg():
        return False
    for n in given:
        if type(t[n]) not in PLAIN or t[n].is_neg():
            return False
    return not _is_transformed()


def eager(t: tuple[Any, ...], x: tuple[Any, ...], scale: float | None, decode: bool, few: bool) -> tuple[Any, ...] | None:
    """The results of the op for Tensors and Options. None for tensors of a class that dispatches ops itself, and for calls that
    are differentiated.

    One look-up finds all decisions that a call of the same kind made before. Each microsecond here delays every call.
    """
    try:
        q, k, v, g, beta, a_log, dt_bias, initial, indices, accepted, parents, rows, ends, final, out, kept, *tables = t
        about: Any = (x, decode, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                      v.shape, v.stride(), v.dtype, v.device, g.shape, g.stride(), g.dtype, g.device,
                      beta.shape, beta.stride(), beta.dtype, beta.device,
                      None if a_log is None else kind(a_log), None if dt_bias is None else kind(dt_bias),
                      None if initial is None else kind(initial), None if indices is None else kind(indices),
                      None if ends is None else kind(ends), None if final is None else kind(final),
                      None if out is None else kind(out), None if accepted is None else kind(accepted),
                      None if parents is None else kind(parents), None if rows is None else kind(rows),
                      None if kept is None else kind(kept), initial is final)
        found = _kept.get(about)
    except (AttributeError, TypeError, RuntimeError):  # no plain tensor where one is due, or an option without a hash: settling
        # says so
        about = found = None
    if found is None or [*map(type, x)] != found.sorts or not _is_memory(t, found.given):  # to a key 1 is True, and 64.0 is 64
        return _settle(about, Tensors(*t), Options(*x), scale, decode, few)
    if torch.is_grad_enabled() and wants_gradients(t):
        return None
    if out is not None or final is not None or kept is not None or found.asked.in_place:
        check_written(t, found.asked.in_place, found.reaches)
    if found.module is None:
        return _adapted(Tensors(*t), Options(*x), scale, decode, few)
    if few or tables[0] is not None or tables[1] is not None or found.asked.gate == "linear":
        check_values(Tensors(*t), found.asked, few)
    if not found.came_again:
        with suppress(NotReady):
            found.again = _as_one(found, Tensors(*t), x, decode)
            found.came_again = True
    if found.again is not None:
        ask_first(found.again)
        results = found.again(t, x, scale, decode)
        if results is not None:
            return results  # type: ignore[no-any-return]
    asked, plan = found.asked, found.plan
    host = plan.host
    buffers = tuple([t[n] for n in found.buffers])
    memory = plan.call(t[:RAW_INPUTS] if asked.gate == "raw" else t[:INPUTS],
                       found.numbers if scale is None else (scale,),
                       (initial,), (out,), ends, (*buffers, None) if asked.checkpoint_chunks else buffers,
                       tuple([t[n] for n in found.integers]))
    return host.results(memory, plan.wanted)  # type: ignore[no-any-return]


def ask_first(again: Callable[..., Any]) -> None:
    """Ask this function of a kind of calls before the others."""
    global recent
    recent = again, *[f for f in recent if f is not again][:RECENT - 1]


def forget() -> None:
    """Drop what is kept for further calls: for tests."""
    global recent
    recent = ()
    _kept.clear()
