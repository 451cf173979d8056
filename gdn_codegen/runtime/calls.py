"""A settled call: which contract it has, which build serves it, and the run."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..schedule import Schedule, named
from ..schedule.contract import Contract
from .arguments import DTYPES, Options, Tensors, Words, check_chunks, fail, reads, requires_grad, settled
from .build import DEFAULT_SCHEDULE
from .dispatch import DEFAULT_CHUNK, build, fits, key, units
from .load import function

Results = tuple[Tensor, Tensor | None, Tensor | None]
#: What options and kinds of tensors decide: a module's function, and the call's words.
_kept: dict[Any, tuple[Callable[..., Any], Words]] = {}

ALGORITHM = "gated_delta_rule"
#: Of a decoding step: chunks of so many tokens, which is the most that a sequence may bring.
DECODE_CHUNK = 16
#: The fewest columns of the state that a decoding kernel's instance holds.
DECODE_COLUMNS = 32


@lru_cache(maxsize=1024)
def _contract(gate: str, beta_form: str, l2norm: bool, unit_keys: bool, given: tuple[tuple[str, torch.dtype], ...],
              state_v_first: bool, state_dtype: str, pool: bool, in_place: bool, checkpoints: bool, strided: bool) -> Contract:
    inputs = {"g": gate, "beta": beta_form, "q": "l2norm" * l2norm, "k": "l2norm" if l2norm else "unit" * unit_keys}
    dtypes = {n: DTYPES[d] for n, d in given if d in DTYPES and d != torch.float32}
    return Contract(tuple(sorted((n, form) for n, form in inputs.items() if form)), tuple(sorted(dtypes.items())),
                    "vk" if state_v_first else "kv", state_dtype, pool, in_place, checkpoints, strided)


@lru_cache(maxsize=256)
def _columns(plan: Schedule, columns: int) -> Schedule:
    return replace(plan, v_block=columns)


def decode_plan(target: str, device: torch.device, walks: int, head_dim_v: int) -> Schedule:
    """The schedule of a decoding step: one kernel, its columns split until walks fill the GPU."""
    plan, columns = named(DEFAULT_SCHEDULE), head_dim_v
    while walks * (head_dim_v // columns) < units(device) and columns > DECODE_COLUMNS:
        half = columns // 2 if columns & (columns - 1) == 0 else 64 if columns > 64 else 32  # which divides its tiles
        columns = max(half, DECODE_COLUMNS)
    return plan if columns == head_dim_v or target == "pto" else _columns(plan, columns)


@lru_cache(maxsize=1024)
def _loaded(*wanted: Any) -> Callable[..., Any]:
    """The op of a build. Kept, so that a call costs a look-up."""
    return function(build(*wanted))


def _check_step(t: Tensors, layout: str) -> None:
    """A decoding step has few tokens a sequence. Where ends lie on a GPU nobody looks, and more are right too, only slow."""
    ends = t.cu_seqlens
    if ends is None:
        tokens = t.q.shape[1 if layout == "bthd" else 2]
        if tokens > DECODE_CHUNK:
            fail("q", f"T = {tokens}", f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")
    elif ends.ndim == 1 and ends.numel() > 1 and reads(ends):
        longest = int(ends.diff().max())
        if longest > DECODE_CHUNK:
            fail("cu_seqlens", f"a sequence of {longest} tokens",
                 f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")


def check_values(t: Tensors, x: Words, few: bool) -> None:
    """What kinds of tensors do not say: gradients, tables of chunks, how many tokens a decoding step has."""
    if torch.is_grad_enabled() and (t.q.requires_grad or t.k.requires_grad or t.v.requires_grad or t.g.requires_grad
                                    or t.beta.requires_grad or requires_grad(t.initial_state) or requires_grad(t.A_log)
                                    or requires_grad(t.dt_bias)):
        name = next(n for n, y in zip(Tensors._fields, t, strict=True) if requires_grad(y))
        fail(name, "a tensor that requires grad", "inference only: call under torch.no_grad(), or detach it")
    if t.chunk_indices is not None or t.chunk_offsets is not None:
        check_chunks(t.chunk_indices, t.chunk_offsets, t.cu_seqlens, x.chunk_size)
    if few and t.q.ndim == 4:
        _check_step(t, x.layout)


def chunk_of(x: Words) -> int | None:
    """Tokens of a chunk, where the call says or rows of checkpoints need to know."""
    return DECODE_CHUNK if x.decode else x.chunk_size or (DEFAULT_CHUNK if x.checkpoint_chunks else None)


def _strided(t: Tensors) -> bool:
    """Whether kernels can read or write some tensor where it lies, but only by its strides."""
    if t.out is None and (t.q.is_contiguous() and t.k.is_contiguous() and t.v.is_contiguous() and t.g.is_contiguous()
                          and t.beta.is_contiguous()):
        return False
    return any(x is not None and not x.is_contiguous() and (x.ndim < 4 or x.stride(-1) == 1) for x in (*t[:5], t.out))


def _sequences(t: Tensors) -> int | None:
    return None if t.cu_seqlens is None else t.cu_seqlens.numel() - 1


def _function(t: Tensors, x: Words, strided: bool) -> Callable[..., Any]:
    """The module's function for a call."""
    given = tuple((n, y.dtype) for n, y in (("g", t.g), ("beta", t.beta), ("A_log", t.A_log), ("dt_bias", t.dt_bias))
                  if y is not None)
    contract = _contract(x.gate, x.beta_form, x.l2norm, x.unit_keys, given, x.state_v_first, x.state_dtype,
                         t.state_indices is not None, x.in_place, x.checkpoint_chunks > 0, strided)
    sequences = _sequences(t)

    def wanted(schedule: str | Schedule | None) -> tuple[Any, ...]:
        return key(ALGORITHM, t.q, t.v, x.target, chunk_of(x), x.layout, schedule, sequences, contract)

    if x.decode and x.schedule is None and t.v.ndim == 4:
        walks = (sequences or t.v.shape[0]) * t.v.shape[2 if x.layout == "bthd" else 1]
        step = wanted(decode_plan(x.target, t.v.device, walks, t.v.shape[3]))
        if fits(build(*step)):
            return _loaded(*step)
    return _loaded(*wanted(x.schedule))


def _launched(fn: Callable[..., Any], t: Tensors, x: Words, scale: float | None, checkpoints: Tensor | None) -> Results:
    options: dict[str, Any] = {}
    if x.gate == "raw":
        options["A_log"], options["dt_bias"] = t.A_log, t.dt_bias
    if t.state_indices is not None:
        options["state_indices"] = t.state_indices
    if t.final_state is not None and not x.in_place:
        options["final_state"] = t.final_state
    if t.out is not None:
        options["out"] = t.out
    if x.checkpoint_chunks:
        options["checkpoint_chunks"], options["state_checkpoints"] = x.checkpoint_chunks, checkpoints
    result = fn(t.q, t.k, t.v, t.g, t.beta, scale=scale, initial_state=t.initial_state,
                output_final_state=x.output_final_state, cu_seqlens=t.cu_seqlens, **options)
    return result[0], result[1], result[2] if x.checkpoint_chunks else None


def run(t: Tensors, x: Words, scale: float | None, checkpoints: Tensor | None = None) -> Results:
    """o, the final state or None, state checkpoints or None."""
    return _launched(_function(t, x, _strided(t)), t, x, scale, checkpoints)


def eager(t: Tensors, x: Options, scale: float | None, decode: bool, few: bool) -> tuple[Results, Words]:
    """`run` of a call that is not settled yet: whatever options and kinds of tensors decide is looked up at once."""
    about: Any = None
    try:
        q, _, v, g, beta, a_log, dt_bias, initial, indices, ends, final, *_ = t
        strided = _strided(t)
        about = (x, decode, q.shape, q.dtype, q.device, v.shape, g.dtype, beta.dtype, strided,
                 a_log if a_log is None else a_log.dtype, dt_bias if dt_bias is None else dt_bias.dtype,
                 initial if initial is None else initial.dtype, final if final is None else final.dtype, initial is final,
                 indices is None, ends if ends is None else ends.shape)
        found = _kept.get(about)
    except (AttributeError, TypeError):  # no tensor where one is due, or an option without a hash: settling says so
        found = None
    if found is None:
        words = settled(t, x, decode)
        found = _function(t, words, strided), words
        if len(_kept) >= 4096:
            _kept.clear()
        _kept[about] = found
    check_values(t, found[1], few)
    return _launched(found[0], t, found[1], scale, None), found[1]


def forget() -> None:
    """Drop what is kept for further calls: for tests."""
    _kept.clear()
    _loaded.cache_clear()
