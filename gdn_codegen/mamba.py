"""Mamba-2's op, with the name and argument order of mamba-ssm's function."""
from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from .host.arguments import _check_flag, _check_integers
from .host.tensors import _fail
from .runtime.build import CHUNKS
from .runtime.call.members import call
from .runtime.call.normalise import reads, shape_of
from .schedule import Schedule

#: What mamba-ssm calls inputs and states of the page.
_CALLED = {"q": "C", "k": "B", "v": "x", "initial_state": "initial_states"}


def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, inf),
        return_final_states: bool = False, return_varlen_states: bool = False, *,
        target: str = "auto", schedule: str | Schedule | None = None) -> Any:
    """Mamba-2's state space duality (arXiv:2405.21060). Returns out, or (out, states) where states are asked for. Forward only.

    x: [B, T, HV, P]; dt: [B, T, HV]; A: [HV]; B, C: [B, T, G, N], where HV is a multiple of the groups G; D, dt_bias: [HV].
    chunk_size: tokens of a chunk, where kernels have such chunks (16, 32, 64, 128). Only rounding depends on it.
    dt_softplus: softplus(dt + dt_bias) is taken, else max(dt + dt_bias, 0).
    initial_states: [B, HV, P, N]. return_final_states: return the states after the rows, float32.
    cu_seqlens: [S + 1]. Packs S sequences into B = 1. seq_idx, the number of each token's sequence, has to be given as well; its
    values are compared with cu_seqlens for CPU tensors, or with GDN_CODEGEN_CHECK=1. Then initial_states are [S, HV, P, N], and
    return_varlen_states returns the states after the sequences.

    Raises ValueError that names the bad argument. z, D [HV, P] and other limits of dt are refused.
    """
    _check_mamba(x, D, z, seq_idx, cu_seqlens, chunk_size, dt_limit, return_final_states, return_varlen_states)
    wanted = _check_flag("return_final_states", return_final_states) or return_varlen_states
    form = "softplus" if _check_flag("dt_softplus", dt_softplus) else "rectified"
    o, final, *_ = call(
        "mamba2", {"q": C, "k": B, "v": x, "dt": dt, "A": A, "D": D, "dt_bias": dt_bias}, {},
        dict(initial_state=initial_states, output_final_state=wanted, cu_seqlens=cu_seqlens, state_v_first=True,
             chunk_size=chunk_size if chunk_size in CHUNKS[1:] else None, target=target, schedule=schedule), {},
        f"dt={form}", _CALLED)
    return (o, final) if wanted else o


def _check_mamba(x: Tensor, D: Any, z: Any, seq_idx: Any, cu_seqlens: Any, chunk_size: Any, dt_limit: Any, final: bool,
                 varlen: bool) -> None:
    """ValueError for arguments of mamba-ssm's function that this one does not take, or not together."""
    _check_flag("return_varlen_states", varlen)
    if z is not None:
        _fail("z", "a value", "None: multiply the result by silu(z)")
    if isinstance(D, Tensor) and D.ndim == 2:
        _fail("D", f"shape {tuple(D.shape)}", "shape [HV], one number for each head")
    if not isinstance(dt_limit, (tuple, list)) or tuple(dt_limit) != (0.0, inf):
        _fail("dt_limit", dt_limit, "(0.0, inf)")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        _fail("chunk_size", repr(chunk_size), "a number of tokens, at least 1")
    if cu_seqlens is None:
        if seq_idx is not None or varlen:
            _fail("seq_idx" if seq_idx is not None else "return_varlen_states", "a value" if seq_idx is not None else True,
                  "cu_seqlens as well, which packs sequences")
        return
    if seq_idx is None:
        _fail("cu_seqlens", "a value without seq_idx", "both: mamba-ssm's function takes sequences from seq_idx")
    if final:
        _fail("return_final_states", True, "return_varlen_states with cu_seqlens, for the states of all sequences")
    for name, y in (("cu_seqlens", cu_seqlens), ("seq_idx", seq_idx)):
        _check_integers(name, y)
    if tuple(seq_idx.shape) != tuple(shape_of("x", x)[:2]):
        _fail("seq_idx", f"shape {tuple(seq_idx.shape)}", f"shape {tuple(x.shape[:2])}, that of tokens")
    if reads(cu_seqlens, seq_idx):
        want = torch.repeat_interleave(cu_seqlens.diff().clamp(min=0)).to(seq_idx)
        if not torch.equal(seq_idx[0], want):
            _fail("seq_idx", seq_idx[0].tolist()[:8], f"the sequences of cu_seqlens: {want.tolist()[:8]}...")
