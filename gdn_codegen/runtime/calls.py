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
from .arguments import DTYPES, Given, fail
from .build import DEFAULT_SCHEDULE
from .dispatch import build, key, units
from .load import function

ALGORITHM = "gated_delta_rule"
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


def _check_step(x: Given) -> None:
    """A decoding step has few tokens a sequence. Where ends lie on a GPU nobody looks, and more are right too, only slow."""
    ends = x.cu_seqlens
    if ends is None:
        tokens = x.q.shape[1 if x.layout == "bthd" else 2] if x.q.ndim == 4 else 0
        if tokens > DECODE_CHUNK:
            fail("q", f"T = {tokens}", f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")
    elif ends.device.type == "cpu" and ends.ndim == 1 and ends.numel() > 1:
        longest = int(ends.diff().max())
        if longest > DECODE_CHUNK:
            fail("cu_seqlens", f"a sequence of {longest} tokens",
                 f"1 to {DECODE_CHUNK} tokens a sequence; chunk_gated_delta_rule takes more")


def run(x: Given) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o, the final state or None, state checkpoints or None."""
    pool, checkpoints = x.state_indices is not None, x.checkpoint_chunks > 0
    strided = not (x.q.is_contiguous() and x.k.is_contiguous() and x.v.is_contiguous())
    contract = _contract(x.gate, x.beta_form, x.l2norm, x.g.dtype, x.beta.dtype, x.state_v_first, x.state_dtype, pool, x.in_place,
                         checkpoints, strided)
    sequences = None if x.cu_seqlens is None else x.cu_seqlens.numel() - 1
    chunk_size, schedule = x.chunk_size or 64, x.schedule
    if x.decode:
        _check_step(x)
        chunk_size = DECODE_CHUNK
        if schedule is None and x.v.ndim == 4:
            heads = x.v.shape[2 if x.layout == "bthd" else 1]
            schedule = decode_plan(x.target, x.v.device, (sequences or x.v.shape[0]) * heads, x.v.shape[3])
    fn = _loaded(*key(ALGORITHM, x.q, x.v, x.target, chunk_size, x.layout, schedule, sequences, contract))
    options: dict[str, Any] = {}
    result = fn(x.q, x.k, x.v, x.g, x.beta, scale=x.scale, initial_state=x.initial_state,
                output_final_state=x.output_final_state, cu_seqlens=x.cu_seqlens, **options)
    return result[0], result[1], None
