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
from .arguments import DTYPES, Tensors, Words, fail, reads
from .build import DEFAULT_SCHEDULE
from .dispatch import build, key, units
from .load import function

ALGORITHM = "gated_delta_rule"
#: Where rows of checkpoints need to know it.
DEFAULT_CHUNK = 64
#: Of a decoding step: chunks of so many tokens, which is the most that a sequence may bring.
DECODE_CHUNK = 16
#: The fewest columns of the state that a decoding kernel's instance holds.
DECODE_COLUMNS = 32


@lru_cache(maxsize=1024)
def _contract(gate: str, beta_form: str, l2norm: bool, g_dtype: torch.dtype, beta_dtype: torch.dtype, state_v_first: bool,
              state_dtype: str, pool: bool, in_place: bool, checkpoints: bool, strided: bool) -> Contract:
    inputs = {"g": gate, "beta": beta_form, "q": "l2norm" * l2norm, "k": "l2norm" * l2norm}
    dtypes = {n: DTYPES[d] for n, d in (("g", g_dtype), ("beta", beta_dtype)) if d in DTYPES and d != torch.float32}
    return Contract(tuple(sorted((n, form) for n, form in inputs.items() if form)), tuple(sorted(dtypes.items())),
                    "vk" if state_v_first else "kv", state_dtype, pool, in_place, checkpoints, strided)


@lru_cache(maxsize=256)
def _columns(plan: Schedule, columns: int) -> Schedule:
    return replace(plan, v_block=columns)


def decode_plan(target: str, device: torch.device, walks: int, head_dim_v: int) -> Schedule:
    """The schedule of a decoding step: one kernel, its columns split until walks fill the GPU."""
    plan, columns = named(DEFAULT_SCHEDULE), head_dim_v
    while walks * (head_dim_v // columns) < units(device) and columns % 2 == 0 and columns // 2 >= DECODE_COLUMNS:
        columns //= 2
    return plan if columns == head_dim_v or target == "pto" else _columns(plan, columns)


@lru_cache(maxsize=1024)
def _loaded(*wanted: Any) -> Callable[..., Any]:
    """The op of a build. Kept, so that a call costs a look-up."""
    return function(build(*wanted))


def check_step(t: Tensors, layout: str) -> None:
    """A decoding step has few tokens a sequence. Where ends lie on a GPU nobody looks, and more are right too, only slow."""
    ends = t.cu_seqlens
    if ends is None:
        tokens = t.q.shape[1 if layout == "bthd" else 2] if t.q.ndim == 4 else 0
        if tokens > DECODE_CHUNK:
            fail("q", f"T = {tokens}", f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")
    elif ends.ndim == 1 and ends.numel() > 1 and reads(ends):
        longest = int(ends.diff().max())
        if longest > DECODE_CHUNK:
            fail("cu_seqlens", f"a sequence of {longest} tokens",
                 f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")


def chunk_of(x: Words) -> int | None:
    """Tokens of a chunk, where the call says or rows of checkpoints need to know."""
    return DECODE_CHUNK if x.decode else x.chunk_size or (DEFAULT_CHUNK if x.checkpoint_chunks else None)


def _strided(t: Tensors) -> bool:
    """Whether kernels can read or write some tensor where it lies, but only by its strides."""
    if t.out is None and (t.q.is_contiguous() and t.k.is_contiguous() and t.v.is_contiguous() and t.g.is_contiguous()
                          and t.beta.is_contiguous()):
        return False
    return any(x is not None and not x.is_contiguous() and (x.ndim < 4 or x.stride(-1) == 1) for x in (*t[:5], t.out))


def run(t: Tensors, x: Words, scale: float | None, checkpoints: Tensor | None = None
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o, the final state or None, state checkpoints or None."""
    contract = _contract(x.gate, x.beta_form, x.l2norm, t.g.dtype, t.beta.dtype, x.state_v_first, x.state_dtype,
                         t.state_indices is not None, x.in_place, x.checkpoint_chunks > 0, _strided(t))
    sequences = None if t.cu_seqlens is None else t.cu_seqlens.numel() - 1
    schedule = x.schedule
    if x.decode and schedule is None and t.v.ndim == 4:
        walks = (sequences or t.v.shape[0]) * t.v.shape[2 if x.layout == "bthd" else 1]
        schedule = decode_plan(x.target, t.v.device, walks, t.v.shape[3])
    fn = _loaded(*key(ALGORITHM, t.q, t.v, x.target, chunk_of(x) or 64, x.layout, schedule, sequences, contract))
    options: dict[str, Any] = {}
    if x.gate == "raw":
        options["A_log"], options["dt_bias"] = t.A_log, t.dt_bias
    if contract.pool:
        options["state_indices"] = t.state_indices
    if t.final_state is not None and not x.in_place:
        options["final_state"] = t.final_state
    if t.out is not None:
        options["out"] = t.out
    if contract.checkpoints:
        options["checkpoint_chunks"], options["state_checkpoints"] = x.checkpoint_chunks, checkpoints
    result = fn(t.q, t.k, t.v, t.g, t.beta, scale=scale, initial_state=t.initial_state,
                output_final_state=x.output_final_state, cu_seqlens=t.cu_seqlens, **options)
    return result[0], result[1], result[2] if contract.checkpoints else None
