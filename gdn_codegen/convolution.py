"""The short causal convolution that layers have before the family's ops: FLA's `causal_conv1d`, and the functions of the package
causal-conv1d.

y_t = act(bias + sum over i < W of weight[W - 1 - i] x_(t-i)) for each channel, with W = 2, 3 or 4. x before a sequence's start
is 0, or comes from a state. The page is `causal_conv1d`, with groups of channels for heads, so that tensors [B, T, D] are read in
place. Kernels sum in float32 and round once. All ops are differentiable, by x, weight, bias and states (docs/training.md).
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .algorithms import find
from .host.arguments import _check_flag, _check_integers
from .host.tensors import _fail, _integer
from .pages import compile as compiled
from .runtime.build import CHUNKS, HEAD_DIMS
from .runtime.call.normalise import check_cpu_ends, check_floats, check_plain, reads, shape_of
from .runtime.call.request import DTYPES
from .runtime.targets import choose, runs
from .schedule import Schedule, varied
from .schedule.contract import Contract

ACTIVATIONS = ("silu", "swish")
#: Taps that kernels have.
WIDTHS = (2, 3, 4)
#: Channels of an instance, the preferred ones first.
GROUPS = (64, 128, 32, *sorted((n for n in HEAD_DIMS if n not in (64, 128, 32)), reverse=True))
#: The schedule where chunks need no state, by target: a kernel over chunks, and one that runs the last chunk of each sequence.
APART = {"triton": varied("fused", kernels=(("@output",), ("@state",)), warps=2)}
#: Tokens of a chunk, by target and device, where they are not 64 if the caller names none (docs/performance/members.md).
CHUNK = {("triton", "cuda"): 16}
#: What FLA calls its own kernels. All give the same results.
BACKENDS = ("triton", "cuda", "mix")


def causal_conv1d(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
        initial_state: Tensor | None = None, output_final_state: bool | None = False, activation: str | None = None,
        backend: str | None = "triton", cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None, cp_context: None = None, *, target: str = "auto", chunk_size: int | None = None,
        schedule: str | Schedule | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """FLA's short convolution (0.6.0). Returns (y, final state or None); y has x's shape and dtype.

    x: [B, T, D], or [B, T, ...] with D channels in all; float16, bfloat16 or float32. weight: [D, W], W = 2, 3 or 4; bias: [D];
    any float dtype. D is 16, or a multiple of 4 from 32 to 256, or a multiple of such a number.
    residual: of x's shape. It is added to the result: one more pass over it, in torch, after it was rounded.
    initial_state: [N, D, W], the last inputs before the sequence, the latest last. output_final_state: return them after the
    sequence, in x's dtype.
    activation: "silu" or "swish", which are the same, or None.
    cu_seqlens: int32 or int64 [N + 1]. Packs N sequences into B = 1. cu_seqlens_cpu: a copy on the CPU.
    target, chunk_size, schedule: as for `chunk_gated_delta_rule`. backend and chunk_indices change no result.

    Raises ValueError that names the bad argument.
    """
    for name in kwargs:
        _fail(name, "a value", "no such keyword")
    if backend not in BACKENDS:
        _fail("backend", repr(backend), ", ".join(BACKENDS))
    if cp_context is not None:
        _fail("cp_context", "a value", "None: sequences are on one device")
    check_cpu_ends(cu_seqlens_cpu, cu_seqlens)
    W = _check_weight(weight)
    shape = shape_of("x", x)
    if len(shape) < 3:
        _fail("x", f"rank {len(shape)}", "rank 3, [B, T, D], or more")
    if residual is not None and shape_of("residual", residual) != shape:
        _fail("residual", f"shape {tuple(residual.shape)}", f"shape {tuple(shape)}, that of x")
    check_floats("residual", residual, x)
    if initial_state is not None:
        N = shape[0] if cu_seqlens is None else shape_of("cu_seqlens", cu_seqlens).numel() - 1
        if shape_of("initial_state", initial_state) != (N, *shape_of("weight", weight)):
            _fail("initial_state", f"shape {tuple(initial_state.shape)}", f"shape ({N}, D, {W}), with D channels of weight")
    final = output_final_state is not None and _check_flag("output_final_state", output_final_state)
    y, after = _convolved(x.flatten(2), weight, bias, initial_state, final, activation, cu_seqlens, target, chunk_size, schedule,
                          W)
    y = y.view(shape)
    return y if residual is None else (y + residual).to(x.dtype), after


def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
        activation: str | None = None, *, target: str = "auto", chunk_size: int | None = None,
        schedule: str | Schedule | None = None) -> Any:
    """causal-conv1d's function. Returns y, or (y, final states) with return_final_states.

    x, y: [B, D, T]. weight, bias, activation: as for `causal_conv1d`. Rows of channels of one token lie together in kernels; x in
    another order is copied.
    seq_idx: int32 [B, T], the number of each token's sequence: a sequence ends where it changes. y is 0 at numbers below 0, which
    are padding. The call reads it, and waits for its device. States are refused beside it.
    initial_states, final_states_out: [B, D, W - 1], the latest input last. final_states_out: a buffer for the final states.

    Raises ValueError that names the bad argument.
    """
    W = _check_weight(weight)
    if len(shape_of("x", x)) != 3:
        _fail("x", f"rank {x.ndim}", "rank 3, [B, D, T]")
    B, D, T = x.shape
    _check_flag("return_final_states", return_final_states)
    for name, y in (("initial_states", initial_states), ("final_states_out", final_states_out)):
        if y is not None and shape_of(name, y) != (B, D, W - 1):
            _fail(name, f"shape {tuple(y.shape)}", f"shape {(B, D, W - 1)}, [B, D, W - 1]")
        if y is not None and seq_idx is not None:
            _fail(name, "a tensor beside seq_idx", "None: a row has several sequences")
    check_floats("final_states_out", final_states_out, x, written=True)
    if final_states_out is not None and final_states_out.requires_grad and final_states_out.is_leaf and torch.is_grad_enabled():
        _fail("final_states_out", "a leaf that requires a gradient",
              "a buffer that requires none, or a call under torch.no_grad()")
    if return_final_states and seq_idx is not None:
        _fail("return_final_states", "True beside seq_idx", "False: a row has several sequences")
    if final_states_out is not None and not return_final_states:
        _fail("final_states_out", "a buffer with return_final_states=False", "return_final_states=True, or None")
    rows, ends = x.transpose(1, 2), None
    if seq_idx is not None:
        rows, ends = rows.reshape(1, B * T, D), _ends(seq_idx, B, T)
    y, final = _convolved(rows, weight, bias, initial_states, return_final_states, activation, ends, target, chunk_size, schedule,
                          W - 1)
    y = y.view(B, T, D).transpose(1, 2)
    if seq_idx is not None:
        y = y.masked_fill((seq_idx < 0)[:, None], 0)
    if final is None:
        return y
    return y, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
        x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
        cache_seqlens: None = None, conv_state_indices: Tensor | None = None, pad_slot_id: int = -1, *, target: str = "auto",
        chunk_size: int | None = None, schedule: str | Schedule | None = None) -> Tensor:
    """causal-conv1d's decoding step: updates states in place, and returns y, of x's shape.

    x: [batch, D], or [batch, D, T] with several tokens of each sequence. weight, bias, activation: as for `causal_conv1d`.
    conv_state: [batch, D, L] with L of W - 1 or more, the latest input last, in x's dtype. The last L inputs replace it: two
    passes of torch over it.
    conv_state_indices: int32 or int64 [batch]. conv_state is then a pool [slots, D, L], and these are the slots, none of them
    twice; -1 (pad_slot_id) skips a sequence: nothing is written, and its y is 0. cache_seqlens, for states that are ring buffers,
    must be None.

    Raises ValueError that names the bad argument.
    """
    W = _check_weight(weight)
    if pad_slot_id != -1:
        _fail("pad_slot_id", repr(pad_slot_id), "-1")
    if cache_seqlens is not None:
        _fail("cache_seqlens", "a value", "None: the latest input of a state is its last")
    if len(shape_of("x", x)) not in (2, 3):
        _fail("x", f"rank {x.ndim}", "rank 2, [batch, D], or rank 3, [batch, D, T]")
    tokens = x if x.ndim == 3 else x[..., None]
    B, D, T = tokens.shape
    if len(shape_of("conv_state", conv_state)) != 3 or conv_state.shape[1] != D or conv_state.shape[2] < W - 1:
        _fail("conv_state", f"shape {tuple(conv_state.shape)}", f"shape [batch, {D}, L], L at least {W - 1}")
    if conv_state.dtype != x.dtype:
        _fail("conv_state", conv_state.dtype, f"{x.dtype}, that of x")
    check_floats("conv_state", conv_state, x, written=True)
    if conv_state_indices is not None:
        _check_integers("conv_state_indices", conv_state_indices)
        if tuple(conv_state_indices.shape) != (B,):
            _fail("conv_state_indices", f"shape {tuple(conv_state_indices.shape)}", f"shape ({B},)")
    elif conv_state.shape[0] != B:
        _fail("conv_state", f"shape {tuple(conv_state.shape)}", f"shape ({B}, {D}, L), or conv_state_indices")
    absent, slots = None, None
    if conv_state_indices is not None:
        _check_slots(conv_state_indices, conv_state)
        absent, slots = (conv_state_indices < 0)[:, None, None], conv_state_indices.long().clamp(min=0)
    state = conv_state if slots is None else conv_state[slots]
    before = state[..., state.shape[2] - W + 1:]
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x, weight, bias, conv_state)):
        before = before.clone()  # the gradient needs what is overwritten
    y, _ = _convolved(tokens.transpose(1, 2), weight, bias, before, False, activation, None, target, chunk_size, schedule, 0)
    y = y.transpose(1, 2)
    with torch.no_grad():
        last = torch.cat([state, tokens], -1)[..., T:]
        if slots is None:
            conv_state.copy_(last)
        elif B:
            _put(conv_state, slots, state, last, absent)
    return (y if absent is None else y.masked_fill(absent, 0)).reshape(x.shape)


def _check_slots(indices: Tensor, pool: Tensor) -> None:
    """ValueError where values are read, and a slot does not exist, or two sequences have one."""
    if not reads(indices):
        return
    seen, count = indices.tolist(), pool.shape[0]
    if any(not -1 <= i < count for i in seen):
        _fail("conv_state_indices", seen[:8], f"slots from 0 to {count - 1}, or -1 to skip a sequence")
    taken = [i for i in seen if i >= 0]
    if len({*taken}) < len(taken):
        _fail("conv_state_indices", seen[:8], "a different slot for each sequence, or -1 to skip it")


def _put(pool: Tensor, slots: Tensor, state: Tensor, last: Tensor, absent: Any) -> None:
    """Write the states of sequences that are there to their slots, without reading a value. The others write the same as the
    first of these, to the same slot; if none is there, what is in slot 0 already."""
    there = absent[:, 0, 0].logical_not()
    as_well = torch.where(there, torch.arange(len(slots), device=slots.device), there.int().argmax())
    pool[slots[as_well]] = torch.where(absent, state, last)[as_well]


def _check_weight(weight: Any) -> int:
    """The taps. ValueError for a weight that no kernel takes."""
    check_plain("weight", weight)
    if weight.ndim != 2 or weight.shape[1] not in WIDTHS:
        _fail("weight", f"shape {tuple(weight.shape)}", "shape [D, W] with W of 2, 3 or 4")
    return int(weight.shape[1])


def _ends(seq_idx: Any, B: int, T: int) -> Tensor:
    """cu_seqlens of the numbers of tokens' sequences, [B, T], where rows follow one another. Waits for the device."""
    _check_integers("seq_idx", seq_idx)
    if tuple(seq_idx.shape) != (B, T):
        _fail("seq_idx", f"shape {tuple(seq_idx.shape)}", f"shape {(B, T)}, [B, T]")
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx.diff() != 0
    first = starts.flatten().nonzero().flatten()
    if not B * T:  # one sequence without tokens
        first = starts.new_zeros(1, dtype=torch.int64)
    return torch.cat([first, first.new_full((1,), B * T)]).to(torch.int32)


def _group(D: int) -> int:
    """The channels of a head. ValueError if kernels have none that divide D."""
    found = next((n for n in GROUPS if D and D % n == 0), 0)
    return found or _fail("x", f"{D} channels", "16, a multiple of 4 from 32 to 256, or a multiple of such a number")


def _convolved(x: Tensor, weight: Any, bias: Tensor | None, before: Tensor | None, final: bool, activation: Any,
               cu_seqlens: Tensor | None, target: str, chunk_size: Any, schedule: Any, kept: int) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D], and the last `kept` inputs of each sequence if `final`, [N, D, kept]. before: the inputs before it."""
    for name, given in (("x", x), ("weight", weight), ("bias", bias), ("initial_state", before), ("cu_seqlens", cu_seqlens)):
        if given is None:
            continue
        check_plain(name, given)
        if given.device != x.device:
            _fail(name, f"device {given.device}", f"device {x.device}, that of x")
        if name != "cu_seqlens" and not given.is_floating_point():
            _fail(name, given.dtype, "a dtype of floats")
    if activation is not None and activation not in ACTIVATIONS:
        _fail("activation", repr(activation), "silu, swish, or None")
    if x.dtype not in DTYPES:
        _fail("x", x.dtype, ", ".join(map(str, DTYPES)))
    (D, W), T = weight.shape, x.shape[1]
    if x.shape[2] != D:
        _fail("weight", f"shape {tuple(weight.shape)}", f"shape ({x.shape[2]}, {W}), with x's channels")
    if bias is not None and tuple(bias.shape) != (D,):
        _fail("bias", f"shape {tuple(bias.shape)}", f"shape ({D},)")
    chunk_size = _integer(chunk_size)
    if chunk_size not in (None, *CHUNKS):
        _fail("chunk_size", repr(chunk_size), f"None, {', '.join(map(str, CHUNKS))}")
    groups = (D // _group(D), _group(D))
    rows = x.view(*x.shape[:2], *groups)
    key = (x.device.type, target, DTYPES[x.dtype], groups[1], chunk_size, schedule, not rows.is_contiguous())
    if torch.compiler.is_compiling() or key not in _BUILT:  # a trace must not look at what it is about to add to
        _build(*key)
    taps = weight.float().t().reshape(W, *groups)
    more = {f"w{n}": taps[W - 1 - n] for n in range(2, W)}
    if bias is not None:
        more["bias"] = bias.float().reshape(groups)
    if before is not None:
        last = before.float().permute(2, 0, 1).reshape(before.shape[2], -1, *groups)
        more |= {f"initial_s{n}": last[len(last) - n] for n in range(1, len(last) + 1)}
    wanted = final and kept > 0
    y, *after = _BUILT[key](rows, taps[W - 1], taps[W - 2], **more, linear=float(activation is None), cu_seqlens=cu_seqlens,
                   output_final_state=wanted)
    state = torch.stack(after[:kept][::-1], -1).flatten(1, 2).to(x.dtype) if wanted else None
    return y.flatten(2).view(x.shape[0], T, D), state


def _target(device: str, target: str) -> str:
    """The target for tensors of `device`. On a GPU "auto" is Triton where it runs, since its kernels take a third of
    the time of TileLang's."""
    return "triton" if target == "auto" and device == "cuda" and runs("triton", device) else choose(device, target)


#: The page's ops by what they are built for: device, target, dtype, channels of a head, chunk, schedule, and whether x is a view.
_BUILT: dict[tuple[Any, ...], Any] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _build(device: str, target: str, dtype: str, width: int, chunk_size: int | None, schedule: Any, strided: bool) -> None:
    """Build the page's op for heads of so many channels. torch.compile calls this, and does not trace it."""
    chosen = _target(device, target)
    chunk = chunk_size or CHUNK.get((chosen, device), 64)
    plan = schedule or (APART.get(chosen, "fused") if chunk > 1 else "fused")
    _BUILT[device, target, dtype, width, chunk_size, schedule, strided] = compiled(
        find("causal_conv1d"), target=chosen, dtype=dtype, head_dim_k=width, head_dim_v=width, chunk=chunk, schedule=plan,
        contract=Contract(strided=strided))
