"""Mamba-2's ops, with the names and argument orders of mamba-ssm's functions.

Both take the keywords of `chunk_gated_delta_rule` that suit their inputs, as the ops of family.py do. States are [HV, P, N]
unless state_v_first=False. z multiplies the result by silu(z): one more pass over it, in torch, after it was rounded.
"""
from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from .host.arguments import _ANY_FLOAT, _check_dtype, _check_flag, _check_integers
from .host.tensors import _fail, _integer, _python_number
from .runtime.build import CHUNKS
from .runtime.call.members import call
from .runtime.call.normalise import check_floats, check_plain, reads, shape_of, token_axis

#: What mamba-ssm calls inputs and states of the page, in each op.
_CALLED = {"q": "C", "k": "B", "v": "x", "initial_state": "initial_states"}
_IN_STEPS = _CALLED | {"initial_state": "state", "state_indices": "state_batch_indices"}
#: Our arguments that the op has under another name, or not at all, and what it accepts instead.
_NOT_HERE = {"initial_state": "initial_states, as mamba-ssm calls it", "scale": "no value: multiply C by it",
             "output_final_state": "return_final_states, as mamba-ssm calls it"}


def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, inf),
        return_final_states: bool = False, return_varlen_states: bool = False, **kwargs: Any) -> Any:
    """Mamba-2's state space duality (arXiv:2405.21060). Returns out, or (out, states) where states are asked for, and the
    checkpoints with checkpoint_chunks.

    x, z: [B, T, HV, P]; dt: [B, T, HV]; A: [HV]; B, C: [B, T, G, N], where HV is a multiple of the groups G; D, dt_bias: [HV].
    chunk_size: tokens of a chunk, where kernels have such chunks (16, 32, 64, 128). Only rounding depends on it.
    dt_softplus: softplus(dt + dt_bias) is taken, else max(dt + dt_bias, 0). dt_limit: its least and most value. Other limits than
    (0, inf) are applied in torch, before the kernel.
    initial_states: [B, HV, P, N]. return_final_states: return the states after the rows, float32.
    seq_idx: [1, T], the number of each token's sequence: packs S sequences into B = 1. cu_seqlens: [S + 1], where they end.
    Without it the call reads seq_idx, and waits for its device; beside it the values of seq_idx are compared with it for CPU
    tensors, or with GDN_CODEGEN_CHECK=1. Then initial_states are [S, HV, P, N], return_final_states returns the state after the
    last sequence, and with cu_seqlens return_varlen_states those after all.

    Raises ValueError that names the bad argument. D [HV, P] and limits of dt below 0 are refused.
    """
    chunk_size = _integer(chunk_size)
    dt_limit = tuple(map(_python_number, dt_limit)) if isinstance(dt_limit, (tuple, list)) else dt_limit
    _check_mamba(x, D, seq_idx, cu_seqlens, chunk_size, dt_limit, return_final_states, return_varlen_states, token_axis(kwargs))
    _check_gate(z, x, kwargs.get("out"))
    for name in _NOT_HERE.keys() & kwargs.keys():
        _fail(name, "a value", _NOT_HERE[name])
    wanted = _check_flag("return_final_states", return_final_states) or return_varlen_states
    if seq_idx is not None and cu_seqlens is None:
        cu_seqlens = ends_of(seq_idx)
    form = "softplus" if _check_flag("dt_softplus", dt_softplus) else "rectified"
    if tuple(dt_limit) != (0.0, inf):
        dt, dt_bias, form = _limited(dt, dt_bias, dt_softplus, dt_limit, token_axis(kwargs)), None, "rectified"
    o, final, *marks = call(
        "mamba2", {"q": C, "k": B, "v": x, "dt": dt, "A": A, "D": D, "dt_bias": dt_bias}, {},
        dict(initial_state=initial_states, output_final_state=wanted, cu_seqlens=cu_seqlens, state_v_first=True,
             chunk_size=chunk_size if chunk_size in CHUNKS[1:] else None), kwargs, f"dt={form}", _CALLED)
    if return_final_states and cu_seqlens is not None:
        final = final[-1:]
    o = _gated(o, z)
    return (o, final, *marks) if wanted or marks else o


def selective_state_update(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, state_batch_indices: Tensor | None = None, *,
        cu_seqlens: Tensor | None = None, out: Tensor | None = None, pad_slot_id: int = -1, **kwargs: Any) -> Tensor:
    """Mamba-2's decoding step: updates states in place, and returns out, of x's shape.

    x, z: [batch, HV, P]; B, C: [batch, G, N]; state: [batch, HV, P, N]. Several tokens of each sequence, up to 16, come as
    [batch, T, HV, P] and [batch, T, G, N], or with cu_seqlens packed as [tokens, HV, P] and [tokens, G, N].
    dt, A, D, dt_bias: one number for each head, [.., HV], [HV], [HV] and [HV], or what mamba-ssm's callers expand of them,
    [.., HV, P], [HV, P, N], [HV, P] and [HV, P] with strides of 0. dt_softplus: softplus(dt + dt_bias) is taken, else
    dt + dt_bias.
    state_batch_indices: [batch]. state is then a pool [slots, HV, P, N]; -1 (pad_slot_id) skips a sequence.
    disable_state_update=True leaves the states. The arguments for draft tokens are those of `recurrent_gated_delta_rule`.

    Raises ValueError that names the bad argument. States of dims without heads, and numbers for each channel, are refused.
    """
    _check_gate(z, x, out)
    if pad_slot_id != -1:
        _fail("pad_slot_id", repr(pad_slot_id), "-1")
    check_plain("state", state)
    rank = len(shape_of("x", x))
    if rank != (4 if cu_seqlens is None and rank != 3 else 3):
        _fail("x", f"rank {rank}", "rank 3, [batch, HV, P], or rank 4, [batch, T, HV, P]; rank 3 with cu_seqlens")
    axis = token_axis(kwargs)
    dt, A = _of_heads("dt", dt, rank - 1), _of_heads("A", A, 1)
    D, dt_bias = (None if y is None else _of_heads(n, y, 1) for n, y in (("D", D), ("dt_bias", dt_bias)))
    form = {"dt_bias": dt_bias} if _check_flag("dt_softplus", dt_softplus) else {}
    if dt_bias is not None and not form:
        dt = _with_bias(dt, dt_bias, 1 if rank == 3 and cu_seqlens is None else axis)
    tokens = {"q": C, "k": B, "v": x, "dt": dt}
    for name, y in tokens.items():
        if len(shape_of(_IN_STEPS.get(name, name), y)) != rank - (name == "dt"):
            _fail(_IN_STEPS.get(name, name), f"rank {y.ndim}", f"rank {rank - (name == 'dt')}, as x has rank {rank}")
    at = None if rank == 4 else axis if cu_seqlens is None else 0  # where one token, or one row, is put before

    def rows(y: Tensor) -> Tensor:
        return y if at is None else y.unsqueeze(at)
    in_place = state_batch_indices is None and not kwargs.get("disable_state_update")
    o = call("mamba2", {**{n: rows(y) for n, y in tokens.items()}, "A": A, "D": D, **form}, {},
             dict(initial_state=state, state_indices=state_batch_indices, cu_seqlens=cu_seqlens, state_v_first=True,
                  inplace_final_state=True if in_place else None, out=None if out is None else rows(out)), kwargs,
             "dt=softplus" if form else "", _IN_STEPS, recurrent=True)[0]
    return _gated(o if at is None else o.squeeze(at), z) if out is None else out


def _of_heads(name: str, x: Any, rank: int) -> Tensor:
    """The numbers of heads, where x has more dims only because they were expanded."""
    dims = range(rank, len(shape_of(name, x)))
    if any(x.stride(n) and x.shape[n] != 1 for n in dims):
        _fail(name, f"shape {tuple(x.shape)} with strides {x.stride()}", "one number for each head: strides of 0 after the heads")
    for _ in dims:
        x = x.select(-1, 0)
    return x  # type: ignore[no-any-return]


def _check_gate(z: Any, x: Any, out: Any) -> None:
    """ValueError for a gate beside a buffer for o, whose rows of no sequence have to stay as they are."""
    if z is not None and out is not None:
        _fail("z", "a value beside out", "one of them: multiply out by silu(z)")
    if z is not None:  # before a state is updated
        check_plain("z", z)
        if z.shape != shape_of("x", x):
            _fail("z", f"shape {tuple(z.shape)}", f"shape {tuple(x.shape)}, that of x")
        check_floats("z", z, x)


def _with_bias(dt: Tensor, dt_bias: Tensor | None, tokens: int) -> Tensor:
    """dt + dt_bias in float32. tokens: 2 where heads lie before tokens in dt, 1 where they lie last. ValueError for numbers that
    kernels would refuse."""
    for name, y in (("dt", dt), ("dt_bias", dt_bias)):
        if y is None:
            continue
        check_plain(name, y)
        _check_dtype(name, y.dtype, _ANY_FLOAT)
        if y.device != dt.device:
            _fail(name, f"device {y.device}", f"device {dt.device}, that of dt")
    if dt_bias is None:
        return dt.float()
    heads = dt.shape[-tokens]
    if tuple(dt_bias.shape) != (heads,):
        _fail("dt_bias", f"shape {tuple(dt_bias.shape)}", f"shape ({heads},)")
    return dt.float() + (dt_bias.float() if tokens == 1 else dt_bias.float()[:, None])


def _gated(o: Tensor, z: Tensor | None) -> Tensor:
    """o silu(z)."""
    return o if z is None else (o * silu(z.float())).to(o.dtype)


def _check_mamba(x: Tensor, D: Any, seq_idx: Any, cu_seqlens: Any, chunk_size: Any, dt_limit: Any, final: bool, varlen: bool,
                 tokens: int) -> None:
    """ValueError for arguments of mamba-ssm's function that this one does not take, or not together. tokens: their axis in x."""
    _check_flag("return_varlen_states", varlen)
    if isinstance(D, Tensor) and D.ndim == 2:
        _fail("D", f"shape {tuple(D.shape)}", "shape [HV], one number for each head")
    numbers = isinstance(dt_limit, (tuple, list)) and all(isinstance(y, (int, float)) for y in dt_limit)
    if not numbers or len(dt_limit) != 2 or not 0 <= dt_limit[0] <= dt_limit[1]:
        _fail("dt_limit", dt_limit, "two numbers, of which the first is 0 or more and the second no less")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        _fail("chunk_size", repr(chunk_size), "a number of tokens, at least 1")
    if cu_seqlens is None and varlen:
        _fail("return_varlen_states", True, "cu_seqlens as well, which packs sequences")
    if cu_seqlens is not None and seq_idx is None:
        _fail("cu_seqlens", "a value without seq_idx", "both: mamba-ssm's function takes sequences from seq_idx")
    if seq_idx is None:
        return
    if final and varlen:
        _fail("return_final_states", True, "False beside return_varlen_states, which has the states of all sequences")
    for name, y in (("cu_seqlens", cu_seqlens), ("seq_idx", seq_idx)):
        if y is not None:
            _check_integers(name, y)
    shape = (1, *shape_of("x", x)[tokens:tokens + 1])
    if tuple(seq_idx.shape) != shape:
        _fail("seq_idx", f"shape {tuple(seq_idx.shape)}", f"shape {shape}, that of tokens: sequences lie in one row")
    if cu_seqlens is not None and reads(cu_seqlens, seq_idx):
        want = torch.repeat_interleave(cu_seqlens.diff().clamp(min=0)).to(seq_idx)
        if not torch.equal(seq_idx[0], want):
            _fail("seq_idx", seq_idx[0].tolist()[:8], f"the sequences of cu_seqlens: {want.tolist()[:8]}...")


def _limited(dt: Tensor, dt_bias: Tensor | None, softly: bool, limit: tuple[float, float], tokens: int) -> Tensor:
    """dt after its bias, the softplus if there is one, and the limits, in float32. tokens: their axis."""
    check_plain("dt", dt)
    if dt.ndim != 3:
        _fail("dt", f"rank {dt.ndim}", "rank 3")
    dt = _with_bias(dt, dt_bias, tokens)
    return (softplus(dt) if softly else dt).clamp(*limit)


def ends_of(seq_idx: Tensor) -> Tensor:
    """cu_seqlens of the numbers of tokens' sequences, [1, T]: a sequence ends where the number changes. Waits for the device."""
    starts = seq_idx[0].diff().nonzero().flatten() + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), seq_idx.shape[1])])
