"""A settled call: which contract it has, which build serves it, and the run."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...host.arguments import _check_detached
from ...host.host import Host
from ...host.tensors import _fail
from ...schedule.contract import Contract
from ..admit import Refused, admit, captures
from ..build import Build
from ..load import module
from . import choose_decode
from .aliasing import reach
from .choose import DEFAULT_CHUNK, build, key, refuse
from .compiling import DoesNotCompile, compiling
from .dtypes import adapted, adapts
from .native_launcher import call_launcher, kernels_ahead
from .normalise import (
    DTYPES,
    Options,
    Tensors,
    Words,
    check_chunks,
    check_written,
    reads,
    settled,
    transformed,
)

Results = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass
class Settled:
    """What the options, shapes, strides, dtypes and devices of a call decide."""

    words: Words
    module: Any  # serves the call; None if the call is repeated in other dtypes (runtime/call/dtypes.py)
    plan: Any  # the module's Plan; None without a module
    numbers: tuple[float, ...]  # if no scale is given
    sorts: list[type]  # types of the options
    given: tuple[int, ...]  # indices of the optional tensors that are given
    reaches: tuple[int, ...]  # bytes from the first element of each tensor to the end of its last
    came_again: bool = False
    again: Callable[..., Any] | None = None  # the call as one function. It takes long to make, so only a repeated call gets one


_kept: dict[Any, Settled] = {}
#: The function of the last call. The next call is mostly of the same kind, as in all layers of a model.
_last: Callable[..., Any] | None = None

#: Classes of tensors whose values are those in their memory.
PLAIN = Tensor, torch.nn.Parameter
ALGORITHM = "gated_delta_rule"
DECODE_CHUNK = choose_decode.CHUNK


@lru_cache(maxsize=1024)
def _contract(gate: str, beta_form: str, l2norm: bool, unit_keys: bool, given: tuple[tuple[str, torch.dtype], ...],
              state_v_first: bool, state_dtype: str, pool: bool, in_place: bool, checkpoints: bool, strided: bool) -> Contract:
    q = "l2norm" if l2norm else ""
    inputs = {"g": gate, "beta": beta_form, "q": q, "k": q or ("unit" if unit_keys else "")}
    dtypes = {n: DTYPES[d] for n, d in given if d in DTYPES and d != torch.float32}
    return Contract(tuple(sorted((n, form) for n, form in inputs.items() if form)), tuple(sorted(dtypes.items())),
                    "vk" if state_v_first else "kv", state_dtype, pool, in_place, checkpoints, strided)


def _chosen(step: bool, *wanted: Any) -> Build:
    """The build for a key, or for a decoding step of it."""
    return (choose_decode.build(*wanted) if step else None) or build(*wanted)


@lru_cache(maxsize=1024)
def _loaded(step: bool, *wanted: Any) -> Any:
    """The generated module for a key. It is cached, so that a call costs a look-up."""
    return module(_chosen(step, *wanted))


def _admitted(t: Tensors, x: Words, checkpoints: Tensor | None, step: bool, *wanted: Any) -> Any:
    """The generated module of a build, after admission. None if the build is refused: dispatch then chooses another build. For a
    named schedule there is no other, and the error is raised."""
    b, m, device = _chosen(step, *wanted), _loaded(step, *wanted), wanted[2]
    at, asked = 2 if x.layout == "bthd" else 1, _wanted(t, x)
    try:
        with compiling(m, device.type):
            admit(b, m, device, (t.q.shape[at], t.v.shape[at]), (t.cu_seqlens is not None, t.initial_state is not None, asked),
                  lambda: m.HOST.prepare(*_given(t, x, checkpoints), asked, t.state_indices, x.checkpoint_chunks))
    except (Refused, DoesNotCompile) as e:
        if x.schedule is not None or not refuse(b, device, str(e)):
            raise
        warnings.warn(f"{e}. Calls take another build", RuntimeWarning, stacklevel=2)
        choose_decode.choice.cache_clear()
        _loaded.cache_clear()
        return None
    return m


def _check_step(t: Tensors, layout: str) -> None:
    """Raises ValueError if a sequence has more tokens than a decoding step takes. cu_seqlens on a GPU is not read: a longer
    sequence is then computed correctly, but slowly."""
    ends = t.cu_seqlens
    if ends is None:
        tokens = t.q.shape[1 if layout == "bthd" else 2]
        if tokens > DECODE_CHUNK:
            _fail("q", f"T = {tokens}", f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")
    elif ends.ndim == 1 and ends.numel() > 1 and reads(ends):
        longest = int(ends.diff().max())
        if longest > DECODE_CHUNK:
            _fail("cu_seqlens", f"a sequence of {longest} tokens",
                 f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")


def _requires_grad(x: Any) -> bool:
    return x is not None and getattr(x, "requires_grad", False)


def _wants_gradients(t: tuple[Any, ...]) -> bool:
    q, k, v, g, beta, a_log, dt_bias, initial, *_ = t
    return (q.requires_grad or k.requires_grad or v.requires_grad or g.requires_grad or beta.requires_grad
            or _requires_grad(initial) or _requires_grad(a_log) or _requires_grad(dt_bias))


def check_values(t: Tensors, x: Words, few: bool) -> None:
    """Check what shapes and dtypes do not show: gradients, factors below 0, tables of chunks, and tokens of a decoding step."""
    if torch.is_grad_enabled() and _wants_gradients(t):
        _check_detached(zip(Tensors._fields, t, strict=True))
    if x.gate == "linear" and reads(t.g) and bool((t.g < 0).any()):
        _fail("g", f"{t.g.min().item():g} with gate='linear'", "factors of 0 or more")
    if t.chunk_indices is not None or t.chunk_offsets is not None:
        check_chunks(t.chunk_indices, t.chunk_offsets, t.cu_seqlens, x.chunk_size)
    if few and t.q.ndim == 4:
        _check_step(t, x.layout)


def chunk_of(x: Words) -> int | None:
    """Tokens of a chunk, if the call gives them or checkpoints need them; else None."""
    return DECODE_CHUNK if x.decode else x.chunk_size or (DEFAULT_CHUNK if x.checkpoint_chunks else None)


def _strided(t: Tensors) -> bool:
    """True if kernels can read or write some tensor without a copy only if they get its strides."""
    if t.out is None and (t.q.is_contiguous() and t.k.is_contiguous() and t.v.is_contiguous() and t.g.is_contiguous()
                          and t.beta.is_contiguous()):
        return False
    return any(x is not None and not x.is_contiguous() and (x.ndim < 4 or x.stride(-1) == 1) for x in (*t[:5], t.out))


def _sequences(t: Tensors) -> int | None:
    return None if t.cu_seqlens is None else t.cu_seqlens.numel() - 1


def _serves(t: Tensors, x: Words, strided: bool, checkpoints: Tensor | None = None) -> Any:
    """The generated module for a call."""
    given = tuple((n, y.dtype) for n, y in (("g", t.g), ("beta", t.beta), ("A_log", t.A_log), ("dt_bias", t.dt_bias))
                  if y is not None)
    contract = _contract(x.gate, x.beta_form, x.l2norm, x.unit_keys, given, x.state_v_first, x.state_dtype,
                         t.state_indices is not None, x.in_place, x.checkpoint_chunks > 0, strided)
    wanted = key(ALGORITHM, t.q, t.v, x.target, chunk_of(x), x.layout, x.schedule, _sequences(t), contract)
    m = None
    while m is None:
        m = _admitted(t, x, checkpoints, x.decode and x.schedule is None, *wanted)
    return m


def _given(t: Tensors, x: Words, checkpoints: Tensor | None) -> tuple[Any, ...]:
    """A call's tensors as modules take them: inputs, states, outputs, ends, buffers."""
    buffers = () if x.in_place else (t.final_state,)
    return (t[:7] if x.gate == "raw" else t[:5], (t.initial_state,), (t.out,), t.cu_seqlens,
            (*buffers, checkpoints) if x.checkpoint_chunks else buffers)


def _wanted(t: Tensors, x: Words) -> bool:
    return x.in_place or x.output_final_state or t.final_state is not None


def run(t: Tensors, x: Words, scale: float | None, checkpoints: Tensor | None = None) -> Results:
    """o, the final state or None, state checkpoints or None."""
    m, wanted = _serves(t, x, _strided(t), checkpoints), _wanted(t, x)
    given, *others = _given(t, x, checkpoints)
    host = m.HOST
    memory = host.run(given, host.numbers_of((scale,)), *others, wanted, t.state_indices, x.checkpoint_chunks)
    o, final, *states = host.results(memory, wanted)
    return o, final, states[0] if states else None


def _kind(x: Any) -> Any:
    return x.shape, x.stride(), x.dtype, x.device


def _as_one(s: Settled, t: Tensors, x: tuple[Any, ...], scale: float | None) -> Callable[..., Any] | None:
    """A settled call as one function of Tensors, Options, scale and decode: what the op returns, or None where something else
    came. None where it cannot be one (runtime/call/native_launcher.py)."""
    words, m, host = s.words, s.module, s.plan.host
    if words.checkpoint_chunks:
        return None
    at = Tensors._fields.index
    buffers = () if words.in_place else (at("final_state"),)
    place = (*range(7 if words.gate == "raw" else 5), at("initial_state"), at("out"), *buffers, at("state_indices"))
    run = call_launcher(s.plan, kernels_ahead(m), t[:at("chunk_indices")], place, at("cu_seqlens"))
    if run is None:
        return None
    options, known, numbers, one_state = x, scale, host.numbers_of((scale,)), t.initial_state is t.final_state
    initial, final, out, ends, chunks = map(at, ("initial_state", "final_state", "out", "cu_seqlens", "chunk_indices"))
    sorts, given = s.sorts, s.given

    def again(t: tuple[Any, ...], x: tuple[Any, ...], scale: float | None, decode: bool) -> Any:
        if ([*map(type, x)] != sorts or x != options or decode != words.decode or (t[initial] is t[final]) != one_state
                or not _is_memory(t, given) or (torch.is_grad_enabled() and _wants_gradients(t))):
            return None
        if t[out] is not None or t[final] is not None or words.in_place:
            check_written(t, words.in_place, s.reaches)
        if t[chunks] is not None or t[chunks + 1] is not None:
            check_chunks(t[chunks], t[chunks + 1], t[ends], words.chunk_size)
        return run(t[:chunks], numbers if scale == known else host.numbers_of((scale,)))

    return again


def _settle(about: Any, t: Tensors, x: Options, scale: float | None, decode: bool, few: bool) -> tuple[Any, ...] | None:
    """The results of the first call of a kind, whose decisions are kept. None for tensors of a class that dispatches ops
    itself, as fake tensors do."""
    if any(isinstance(y, Tensor) and type(y) not in PLAIN for y in t):
        return None
    words, reaches = settled(t, x, decode), tuple(map(reach, t[:12]))
    check_written(t, words.in_place, reaches)
    check_values(t, words, few)
    sorts, given = [*map(type, x)], tuple(n for n, y in enumerate(t[:12]) if n > 4 and y is not None)
    if adapts(t, x):
        kept = Settled(words, None, None, (), sorts, given, reaches)
        results = _adapted(t, x, scale, decode, few)
    else:
        m, wanted = _serves(t, words, _strided(t)), _wanted(t, words)
        host: Host = m.HOST
        numbers = host.numbers_of((scale,))
        inputs, states, outs, ends, buffers = _given(t, words, None)
        with compiling(m, t.q.device.type):
            plan = host.prepare(inputs, states, outs, ends, buffers, wanted, t.state_indices, words.checkpoint_chunks)
            kept = Settled(words, m, plan, host.numbers_of((None,)), sorts, given, reaches)
            results = host.results(plan.call(inputs, numbers, states, outs, ends, buffers, t.state_indices), wanted)
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
    q, k, v, g, beta = t[:5]
    if not (type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor) and any(type(y) not in PLAIN for y in t[:5]):
        return False
    if q.is_neg() or k.is_neg() or v.is_neg() or g.is_neg() or beta.is_neg():
        return False
    for n in given:
        if type(t[n]) not in PLAIN or t[n].is_neg():
            return False
    return not transformed()


def eager(t: tuple[Any, ...], x: tuple[Any, ...], scale: float | None, decode: bool, few: bool) -> tuple[Any, ...] | None:
    """The results of the op for Tensors and Options. None for tensors of a class that dispatches ops itself.

    One look-up finds all decisions that a call of the same kind made before. Each microsecond here delays every call.
    """
    global _last
    last = _last
    if last is not None:
        results = last(t, x, scale, decode)
        if results is not None:
            return results  # type: ignore[no-any-return]
    try:
        q, k, v, g, beta, a_log, dt_bias, initial, indices, ends, final, out, *tables = t
        about: Any = (x, decode, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                      v.shape, v.stride(), v.dtype, v.device, g.shape, g.stride(), g.dtype, g.device,
                      beta.shape, beta.stride(), beta.dtype, beta.device,
                      None if a_log is None else _kind(a_log), None if dt_bias is None else _kind(dt_bias),
                      None if initial is None else _kind(initial), None if indices is None else _kind(indices),
                      None if ends is None else _kind(ends), None if final is None else _kind(final),
                      None if out is None else _kind(out), initial is final)
        found = _kept.get(about)
    except (AttributeError, TypeError, RuntimeError):  # no plain tensor where one is due, or an option without a hash: settling
        # says so
        about = found = None
    if found is None or [*map(type, x)] != found.sorts or not _is_memory(t, found.given):  # to a key 1 is True, and 64.0 is 64
        return _settle(about, Tensors(*t), Options(*x), scale, decode, few)
    if few or tables[0] is not None or tables[1] is not None or found.words.gate == "linear" or (
            torch.is_grad_enabled() and _wants_gradients(t)):
        check_values(Tensors(*t), found.words, few)
    if out is not None or final is not None or found.words.in_place:
        check_written(t, found.words.in_place, found.reaches)
    if found.module is None:
        return _adapted(Tensors(*t), Options(*x), scale, decode, few)
    if not found.came_again:
        found.came_again, found.again = True, _as_one(found, Tensors(*t), x, scale)
    if found.again is not None:
        _last = found.again
        results = found.again(t, x, scale, decode)
        if results is not None:
            return results  # type: ignore[no-any-return]
    words, plan = found.words, found.plan
    host = plan.host
    buffers = () if words.in_place else (final,)
    memory = plan.call(t[:7] if words.gate == "raw" else t[:5],
                       found.numbers if scale is None else host.numbers_of((scale,)),
                       (initial,), (out,), ends, (*buffers, None) if words.checkpoint_chunks else buffers, indices)
    return host.results(memory, plan.wanted)  # type: ignore[no-any-return]


def forget() -> None:
    """Drop what is kept for further calls: for tests."""
    global _last
    _last = None
    _kept.clear()
    _loaded.cache_clear()
