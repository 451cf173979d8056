"""Checks of a call's arguments. Each raises a ValueError that names the argument, what came, and what is accepted.

Below the line the file is copied into generated modules word for word. The package's ops leave tensors to these checks. Of what
they refuse before there is a module (runtime/call/normalise.py) they use the same functions, so both say the same.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .tensors import _FLOATS, _check_memory, _dense, _fail, _integer, _is_apart, _is_plain, _is_transformed, _python_number

# --- copied from here on ---
#: What the integers of a tensor say.
_WHAT = {"state_indices": "slot", "num_accepted_tokens": "number", "intermediate_state_indices": "row",
         "retrieve_parent_token": "parent", "checkpoint_rows": "row"}
_ANY_FLOAT = tuple(_FLOATS.values())
_LARGEST = torch.finfo(torch.float32).max


# --- one argument ----------------------------------------------------------------------------------------------------
def _check_tensor(name: str, x: Any) -> None:
    """A tensor, whatever its dtype."""
    if not isinstance(x, torch.Tensor):
        _fail(name, type(x).__name__, "a torch.Tensor")


def _check_dtype(name: str, dtype: Any, accepted: Sequence[torch.dtype], why: str = "") -> None:
    """One of some dtypes. why: what the text adds to them."""
    if dtype not in accepted:
        _fail(name, dtype, ", ".join(map(str, accepted)) + why)


def _check_built_for(name: str, x: Any, dtype: str, number: bool) -> None:
    """A tensor of `dtype`. number: one value for each token or head. 16-bit ones are accepted where the module takes float32."""
    _check_tensor(name, x)
    widens = number and dtype == "float32"
    _check_dtype(name, x.dtype, *((_ANY_FLOAT,) if widens else ((_FLOATS[dtype],), " (this module was built for it)")))


def _check_integers(name: str, x: Any) -> None:
    """A tensor of integers."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
        _fail(name, getattr(x, "dtype", type(x).__name__), "an int32 or int64 tensor")


def _check_rank(name: str, x: torch.Tensor, rank: int, layout: str) -> None:
    """A tensor of so many dims."""
    if x.ndim != rank:
        _fail(name, f"rank {x.ndim}", f"rank {rank}, layout {layout}")


def _check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    """A tensor on this device."""
    if x.device != device:
        _fail(name, f"device {x.device}", f"device {device}")


def _check_number(name: str, x: Any) -> float:
    """`x` as a float. A tensor on a GPU is refused, because reading it would wait for its device."""
    number = _python_number(x)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        _fail(name, type(x).__name__, "a number, or None")
    if not abs(number) <= _LARGEST:
        _fail(name, number if isinstance(number, float) else f"an int of {len(str(number))} digits",
              "a number that float32 holds")
    return float(number)


def _check_flag(name: str, x: Any) -> bool:
    """`x`, which must be True or False."""
    if x is not True and x is not False:
        _fail(name, type(x).__name__ if isinstance(x, torch.Tensor) else repr(x), "True or False")
    return bool(x)


def _check_chunks(name: str, x: Any, least: int) -> int:
    """`x` as a number of chunks."""
    chunks = _integer(x)
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not least <= chunks < 2**31:
        _fail(name, repr(x), f"a number of chunks from {least} to {2**31 - 1}")
    return chunks


def _check_given(tensors: Iterable[tuple[str, Any]]) -> None:
    """No tensor that kernels cannot read, and none that requires grad where torch records. tensors: (name, tensor or None)."""
    recorded, seen = torch.is_grad_enabled(), _is_transformed() or torch._C._is_tracing()
    for name, x in tensors:
        if isinstance(x, torch.Tensor):
            if recorded and x.requires_grad:
                _fail(name, "a tensor that requires grad", "inference only: call under torch.no_grad(), or detach it")
            if seen or x.is_neg() or x.is_nested or x.layout != torch.strided:  # each call waits for these
                _check_memory(name, x)


# --- the arguments of a call -----------------------------------------------------------------------------------------
def _check_inputs(given: Sequence[Any], inputs: Sequence[tuple[str, str, tuple[int, ...], str]],
                  head_inputs: Sequence[tuple[str, float | None, tuple[int, ...], str]], layout: str, compiled: Mapping[str, int],
                  batched: int) -> tuple[int, int, int, int, torch.device]:
    """B, T, H, HV and the device of a call's inputs.

    given: a tensor for each row of `inputs`, [B, T, heads, ...] or [B, heads, T, ...] by `layout`, then one [HV, ...] or None for
      each row of `head_inputs`. compiled: head counts that the kernels have, by name. batched: value heads of a key head that
      one kernel instance handles.
    """
    seen: dict[str, int] = {}
    device = getattr(given[0], "device", None)
    for (name, heads, dims, dtype), x in zip(inputs, given, strict=False):
        _check_built_for(name, x, dtype, not dims)
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
        tokens, head = (1, 2) if layout == "bthd" else (2, 1)
        _check_rank(name, x, 3 + len(dims), layout)
        if tuple(x.shape[3:]) != dims:
            _fail(name, f"shape {tuple(x.shape)}", f"last dim {dims[0]} (this module was built for it)")
        if compiled and x.shape[head] != compiled[heads]:
            _fail(name, f"shape {tuple(x.shape)}", f"{heads} = {compiled[heads]} heads (this module was built for them)")
        for key, size in (("B", x.shape[0]), ("T", x.shape[tokens]), (heads, x.shape[head])):
            if seen.setdefault(key, size) != size:
                _fail(name, f"shape {tuple(x.shape)}", f"{key} = {seen[key]}, as the inputs before it have")
    value_heads = seen.get("HV", seen.get("H", 0))
    key_heads = seen.get("H", value_heads)
    if min(key_heads, value_heads) < 1 or value_heads % key_heads:
        _fail("heads", f"H = {key_heads}, HV = {value_heads}", "HV a multiple of H, both at least 1")
    if value_heads // key_heads % batched:
        _fail("heads", f"H = {key_heads}, HV = {value_heads}",
              f"HV a multiple of {batched} H: an instance of this module has {batched} value heads of one key head")
    for (name, default, dims, dtype), x in zip(head_inputs, given[len(inputs):], strict=False):
        if x is None and default is not None:
            continue
        _check_built_for(name, x, dtype, True)
        if tuple(x.shape) != (value_heads, *dims):
            _fail(name, f"shape {tuple(x.shape)}",
                  f"shape {(value_heads, *dims)}, one {'vector' if dims else 'number'} for each value head")
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
    return seen["B"], seen["T"], key_heads, value_heads, given[0].device


def _check_sequences(cu_seqlens: Any, batch: int, device: torch.device) -> int:
    """The number of sequences in cu_seqlens."""
    _check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        _fail("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "shape [N + 1] with N >= 1")
    _check_device("cu_seqlens", cu_seqlens, device)
    if batch != 1:
        _fail("cu_seqlens", f"inputs with B = {batch}", "inputs with B = 1, because cu_seqlens packs the sequences into one row")
    sequences: int = cu_seqlens.numel() - 1
    return sequences


def _check_ends(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Check the values of cu_seqlens. On a GPU this waits for the device."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > tokens or any(a > b for a, b in itertools.pairwise(ends)):
        _fail("cu_seqlens", ends if len(ends) < 12 else f"{ends[:5]} ... {ends[-3:]}",
              f"values that start at 0, never fall and end at most at T = {tokens}")


def _check_state(name: str, x: Any, shape: tuple[int, ...], device: torch.device, dtypes: Sequence[torch.dtype],
                 written: bool = False) -> None:
    """Check a state [N, HV, ...]. written: True if the call writes to it. Then no two indices may share an element."""
    _check_tensor(name, x)
    if tuple(x.shape) != shape:
        _fail(name, tuple(x.shape), f"shape {shape}")
    _check_dtype(name, x.dtype, dtypes)
    _check_device(name, x, device)
    if written and not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "elements that do not overlap")


def _check_pool(name: str, x: Any, tile: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> int:
    """Elements from one slot to the next of a pool [slots, *tile]. There may be gaps between slots. Each slot has to be dense and
    aligned to 16 bytes."""
    _check_tensor(name, x)
    if tuple(x.shape[1:]) != tile or x.ndim != 1 + len(tile):
        _fail(name, tuple(x.shape), f"shape [slots, {', '.join(map(str, tile))}]")
    _check_dtype(name, x.dtype, (dtype,))
    _check_device(name, x, device)
    dense, size = _dense(tile), math.prod(tile)
    inner = tuple(own if n == 1 else given for n, own, given in zip(tile, dense, x.stride()[1:], strict=True))
    stride = size if x.shape[0] < 2 else x.stride(0)
    if inner != dense or stride < size or stride * x.element_size() % 16:
        _fail(name, f"strides {x.stride()}", f"strides (n, {', '.join(map(str, dense))}), n at least {size} and "
                                             "n elements a multiple of 16 bytes")
    return stride


def _check_indices(name: str, indices: Any, sequences: int, device: torch.device, least: int = -1) -> None:
    """Check a tensor of integers: one for each sequence, or `least` or more for each if that is not -1."""
    _check_integers(name, indices)
    shape = tuple(indices.shape)
    if least < 0 and shape != (sequences,):
        _fail(name, f"shape {shape}", f"shape ({sequences},), one {_WHAT[name]} for each sequence")
    if least >= 0 and not (indices.ndim == 2 and shape[0] == sequences and shape[1] >= least):
        _fail(name, f"shape {shape}", f"shape ({sequences}, {least} or more), one {_WHAT[name]} for each token of each sequence")
    _check_device(name, indices, device)


def _check_rows(name: str, x: Any, tile: tuple[int, ...], tokens: int, device: torch.device, dtype: torch.dtype) -> int:
    """Elements from one row to the next of a buffer [rows, tokens or more, *tile] for states by token."""
    _check_tensor(name, x)
    if x.ndim != 2 + len(tile) or tuple(x.shape[2:]) != tile or x.shape[1] < tokens:
        _fail(name, f"shape {tuple(x.shape)}", f"shape [rows, {tokens} or more, {', '.join(map(str, tile))}]")
    return _check_pool(name, x, tuple(x.shape[1:]), device, dtype)


def _check_slots(seen: Sequence[int], name: str, slots: int, written: bool) -> None:
    """Check the values of a tensor with the slot or row of each sequence. written: True if states are written there. Sequences
    run side by side, so two of them would race for one slot. They may share a slot that is only read."""
    what = _WHAT[name]
    if any(not -1 <= i < slots for i in seen):
        _fail(name, seen if len(seen) < 12 else f"{seen[:5]} ... {seen[-3:]}",
              f"{what}s from 0 to {slots - 1}, or -1 to skip a sequence")
    owner: dict[int, int] = {}
    for n, i in enumerate(seen):
        if written and i >= 0 and owner.setdefault(i, n) != n:
            _fail(name, f"{what} {i} for sequences {owner[i]} and {n}",
                  f"a different {what} for each sequence whose state is written, or -1 to skip a sequence")


def _check_accepted(accepted: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
    """Check the values of num_accepted_tokens. slots: those of each sequence."""
    for n, (count, own) in enumerate(zip(accepted, slots, strict=True)):
        if not 1 <= count <= len(own):
            _fail("num_accepted_tokens", f"{count} for sequence {n}", f"1 to {len(own)}, as many as state_indices has slots")


def _check_slots_by_token(slots: Sequence[Sequence[int]], first: Sequence[int], lengths: Sequence[int], pool: int, written: bool
                          ) -> None:
    """Check the values of state_indices [N, tokens]. first: the slot of each sequence's initial state. written: True if states
    are written to the slots. Then no other token may write a slot, and no other sequence may start from it."""
    owner: dict[int, tuple[int, int]] = {}
    for n, (own, at, length) in enumerate(zip(slots, first, lengths, strict=True)):
        if length > len(own):
            _fail("state_indices", f"{len(own)} slots for the {length} tokens of sequence {n}", "a slot for each token")
        for i in (at, *own[:length]):
            if not -1 <= i < pool:
                _fail("state_indices", f"slot {i} for sequence {n}", f"slots from 0 to {pool - 1}, or -1")
        for t, i in enumerate(own[:length] if written else ()):
            if i >= 0 and owner.setdefault(i, (n, t)) != (n, t):
                _fail("state_indices", f"slot {i} for token {owner[i][1]} of sequence {owner[i][0]} and token {t} of {n}",
                      "a different slot for each token of each sequence, or -1 to store no state")
    for n, at in enumerate(first):
        if at in owner and owner[at][0] != n:
            _fail("state_indices", f"slot {at}, from which sequence {n} starts, for a token of sequence {owner[at][0]}",
                  "a different slot for each token of each sequence")


def _check_parents(parents: Sequence[Sequence[int]], lengths: Sequence[int], kept: Sequence[Sequence[bool]]) -> None:
    """Check the values of retrieve_parent_token. kept: for each token of each sequence, whether its state is stored. The parent
    of a first token is not read."""
    for n, (own, length, there) in enumerate(zip(parents, lengths, kept, strict=True)):
        if length > len(own):
            _fail("retrieve_parent_token", f"{len(own)} parents for {length} tokens of sequence {n}", "a parent for each token")
        for t in range(1, length):
            if not -1 <= own[t] < t or (0 <= own[t] < t - 1 and not there[own[t]]):
                _fail("retrieve_parent_token", f"{own[t]} for token {t} of sequence {n}",
                      f"an earlier token whose state is stored, from 0 to {t - 1}, or -1 for the initial state")


def _check_out(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Check the caller's memory for an output."""
    _check_tensor(name, x)
    if tuple(x.shape) != shape:
        _fail(name, tuple(x.shape), f"shape {shape}")
    if x.dtype != dtype or x.device != device:
        _fail(name, f"{x.dtype} on {x.device}", f"{dtype} on {device}")
    if x.stride(-1) != 1 or not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "a last dim that is dense, and elements that do not overlap")


def _check_buffers(buffers: Sequence[Any], shapes: Sequence[tuple[str, tuple[int, ...], Any]], device: torch.device,
                   dtype: torch.dtype) -> list[bool]:
    """Check callers' buffers for results with these names and shapes. Returns, for each, True if kernels can use it directly."""
    for x, (name, shape, _) in zip(buffers, shapes, strict=True):
        if x is not None:
            _check_state(name, x, shape, device, (dtype,), written=True)
    return [x is None or _is_plain(x, dtype) for x in buffers]
