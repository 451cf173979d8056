"""Mamba-2's ops, with the names and argument orders of mamba-ssm's functions."""
from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from .host.arguments import _check_flag, _check_integers, _check_rank
from .host.tensors import _fail
from .runtime.build import CHUNKS
from .runtime.call.members import call
from .runtime.call.normalise import check_plain, reads, shape_of
from .schedule import Schedule

#: What mamba-ssm calls inputs and states of the page.
_CALLED = {"q": "C", "k": "B", "v": "x", "initial_state": "initial_states"}
_CALLED_BY_STEP = {**_CALLED, "initial_state": "state", "state_indices": "state_batch_indices"}


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


def selective_state_update(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, state_batch_indices: Tensor | None = None, *,
        target: str = "auto", schedule: str | Schedule | None = None) -> Tensor:
    """One token of Mamba-2 for each row; updates `state` in place. Returns out [B, HV, P]. Forward only.

    state: [B, HV, P, N], or with state_batch_indices [B] a pool [slots, HV, P, N], of which row i has slot
    state_batch_indices[i]; -1 skips the row. x, dt: [B, HV, P]; A: [HV, P, N]; B, C: [B, G, N], where HV is a multiple of the
    groups G; D, dt_bias: [HV, P]. Mamba-2 has one number for each head: dt, A, D and dt_bias have to be expanded from it
    (stride 0 along P and N). dt_softplus: softplus(dt + dt_bias) is taken, else dt + dt_bias.

    Raises ValueError that names the bad argument. z and Mamba-1's numbers for each channel are refused.
    """
    if z is not None:
        _fail("z", "a value", "None: multiply the result by silu(z)")
    rows: dict[str, tuple[Any, int]] = {"state": (state, 4), "x": (x, 3), "B": (B, 3), "C": (C, 3)}
    for name, (y, rank) in rows.items():
        check_plain(name, y)
        _check_rank(name, y, rank, "of mamba-ssm with heads")
    share, decay, skip, bias = (_of_heads(n, y, rank) for n, y, rank in
                                (("dt", dt, 3), ("A", A, 3), ("D", D, 2), ("dt_bias", dt_bias, 2)))
    if not _check_flag("dt_softplus", dt_softplus) and bias is not None:
        share, bias = share.float() + bias.float(), None
    inputs = {"q": C[:, None], "k": B[:, None], "v": x[:, None], "dt": share[:, None], "A": decay, "D": skip}
    o, *_ = call(
        "mamba2", inputs | ({"dt_bias": bias} if dt_softplus else {}), {},
        dict(initial_state=state, output_final_state=True, state_indices=state_batch_indices, inplace_final_state=True,
             state_v_first=True, target=target, schedule=schedule),
        {}, "dt=softplus" if dt_softplus else "", _CALLED_BY_STEP, recurrent=True)
    out: Tensor = o.squeeze(1)
    return out


def _of_heads(name: str, y: Any, rank: int) -> Any:
    """The numbers of heads that `y` was expanded from: [B, HV] or [HV]. None for D or dt_bias that a caller leaves out.
    ValueError for others. rank: of y."""
    if y is None and name not in ("dt", "A"):
        return None
    check_plain(name, y)
    _check_rank(name, y, rank, "of mamba-ssm with heads")
    channels = range(2 if name == "dt" else 1, rank)
    if any(y.shape[a] != 1 and y.stride(a) != 0 for a in channels):
        _fail(name, f"strides {y.stride()}", "stride 0 along P and N: one number for each head, as Mamba-2 has")
    for _ in channels:
        y = y[..., 0]
    return y


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
