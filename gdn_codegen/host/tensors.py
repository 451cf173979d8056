"""Tensors in a generated module: checks of arguments, strides and copies, and tensors that replace absent ones.

Below the line the file is copied into generated modules word for word. Nothing here knows a build: callers pass the tables.
"""
from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

# --- copied from here on ---
_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_kept: dict[Any, torch.Tensor] = {}


def _fail(argument: str, got: object, accepted: str) -> NoReturn:
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


# --- checks: each a ValueError that names the argument, what came, and what is accepted ------------------------------
def _check_tensor(name: str, x: Any, dtype: str, number: bool) -> None:
    """A tensor of `dtype`. number: one value for each token or head. A 16-bit one is accepted where the module takes float32."""
    if not isinstance(x, torch.Tensor):
        _fail(name, type(x).__name__, "a torch.Tensor")
    if x.dtype != _FLOATS[dtype] and not (number and dtype == "float32" and x.dtype in _FLOATS.values()):
        _fail(name, x.dtype, f"torch.{dtype} (this module was built for it)")


def _check_inputs(given: Sequence[Any], inputs: Sequence[tuple[str, str, tuple[int, ...], str]],
                  head_inputs: Sequence[tuple[str, float | None, str]], layout: str, compiled: Mapping[str, int],
                  batched: int) -> tuple[int, int, int, int, torch.device]:
    """B, T, H, HV and the device of a call's inputs.

    given: a tensor for each row of `inputs`, [B, T, heads, ...] or [B, heads, T, ...] by `layout`, then one [HV] or None for
      each row of `head_inputs`. compiled: head counts that the kernels have, by name. batched: value heads of a key head that
      one kernel instance handles.
    """
    seen: dict[str, int] = {}
    device = getattr(given[0], "device", None)
    for (name, heads, dims, dtype), x in zip(inputs, given, strict=False):
        _check_tensor(name, x, dtype, not dims)
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
        tokens, head = (1, 2) if layout == "bthd" else (2, 1)
        if x.ndim != 3 + len(dims):
            _fail(name, f"rank {x.ndim}", f"rank {3 + len(dims)}, layout {layout}")
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
    for (name, default, dtype), x in zip(head_inputs, given[len(inputs):], strict=True):
        if x is None and default is not None:
            continue
        _check_tensor(name, x, dtype, True)
        if tuple(x.shape) != (value_heads,):
            _fail(name, f"shape {tuple(x.shape)}", f"shape ({value_heads},), one number for each value head")
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
    return seen["B"], seen["T"], key_heads, value_heads, given[0].device


def _check_sequences(cu_seqlens: Any, batch: int, device: torch.device) -> int:
    """The number of sequences in cu_seqlens."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        _fail("cu_seqlens", getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__), "an int32 or int64 tensor")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        _fail("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "shape [N + 1] with N >= 1")
    if cu_seqlens.device != device:
        _fail("cu_seqlens", f"device {cu_seqlens.device}", f"device {device}")
    if batch != 1:
        _fail("cu_seqlens", f"inputs with B = {batch}", "inputs with B = 1: packed sequences")
    return cu_seqlens.numel() - 1


def _check_ends(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Check the values of cu_seqlens. On a GPU this waits for the device."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > tokens or any(a > b for a, b in itertools.pairwise(ends)):
        _fail("cu_seqlens", ends if len(ends) < 12 else f"{ends[:5]} ... {ends[-3:]}",
              f"values that start at 0, never fall and end at most at T = {tokens}")


def _check_state(name: str, x: Any, shape: tuple[int, ...], device: torch.device, dtypes: Sequence[torch.dtype],
                 written: bool = False) -> None:
    """Check a state [N, HV, ...] or a pool of states. written: True if the call writes to it. Then no two indices may share an
    element."""
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape:
        _fail(name, tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__, f"shape {shape}")
    if x.dtype not in dtypes:
        _fail(name, x.dtype, ", ".join(map(str, dtypes)))
    if x.device != device:
        _fail(name, f"device {x.device}", f"device {device}")
    if written and not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "no element in two places")


def _check_pool(name: str, x: Any, tile: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> int:
    """Elements from one slot to the next of a pool [slots, *tile]. There may be gaps between slots. Each slot has to be dense and
    aligned to 16 bytes."""
    if not isinstance(x, torch.Tensor) or tuple(x.shape[1:]) != tile or x.ndim != 1 + len(tile):
        _fail(name, tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__,
              f"shape [slots, {', '.join(map(str, tile))}]")
    _check_state(name, x, tuple(x.shape), device, (dtype,))
    dense, size = _dense(tile), math.prod(tile)
    inner = tuple(own if n == 1 else given for n, own, given in zip(tile, dense, x.stride()[1:], strict=True))
    stride = size if x.shape[0] < 2 else x.stride(0)
    if inner != dense or stride < size or stride * x.element_size() % 16:
        _fail(name, f"strides {x.stride()}", f"strides (n, {', '.join(map(str, dense))}), n at least {size} and "
                                             "n elements a multiple of 16 bytes")
    return stride


def _check_indices(indices: Any, sequences: int, device: torch.device) -> None:
    """Check state_indices: one slot number for each sequence."""
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64):
        _fail("state_indices", getattr(indices, "dtype", type(indices).__name__), "an int32 or int64 tensor")
    if tuple(indices.shape) != (sequences,):
        _fail("state_indices", f"shape {tuple(indices.shape)}", f"shape ({sequences},), one slot for each sequence")
    if indices.device != device:
        _fail("state_indices", f"device {indices.device}", f"device {device}")


def _check_slots(indices: torch.Tensor, slots: int, written: bool) -> None:
    """Check the values of state_indices. On a GPU this waits for the device. written: True if final states are written to these
    slots. Sequences run side by side, so two of them would race for one slot. They may share a slot that is only read."""
    seen = indices.tolist()
    if any(not -1 <= i < slots for i in seen):
        _fail("state_indices", seen if len(seen) < 12 else f"{seen[:5]} ... {seen[-3:]}",
              f"slots from 0 to {slots - 1}, or -1 to skip a sequence")
    owner: dict[int, int] = {}
    for n, i in enumerate(seen):
        if written and i >= 0 and owner.setdefault(i, n) != n:
            _fail("state_indices", f"slot {i} for sequences {owner[i]} and {n}",
                  "a different slot for each sequence whose state is written, or -1 to skip a sequence")


def _check_out(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Check the caller's memory for an output."""
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape:
        _fail(name, tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__, f"shape {shape}")
    if x.dtype != dtype or x.device != device:
        _fail(name, f"{x.dtype} on {x.device}", f"{dtype} on {device}")
    if x.stride(-1) != 1 or not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "a last dim that is dense, and no element in two places")


def _check_buffers(buffers: Sequence[Any], shapes: Sequence[tuple[str, tuple[int, ...], Any]], device: torch.device,
                   dtype: torch.dtype) -> list[bool]:
    """Check callers' buffers for results with these names and shapes. Returns, for each, True if kernels can use it directly."""
    for x, (name, shape, _) in zip(buffers, shapes, strict=True):
        if x is not None:
            _check_state(name, x, shape, device, (dtype,), written=True)
    return [x is None or _is_plain(x, dtype) for x in buffers]


# --- strides and copies ----------------------------------------------------------------------------------------------
def _is_apart(x: torch.Tensor) -> bool:
    """True if no two indices of `x` share an element: the stride of each dim exceeds the reach of all finer dims."""
    reach = 1
    for far, n in sorted((far, n) for far, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if far < reach:
            return x.numel() == 0
        reach += far * (n - 1)
    return True


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    out, far = [], 1
    for n in reversed(shape):
        out.append(far)
        far *= n or 1
    return tuple(reversed(out))


def _is_plain(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if `x` has this dtype and the strides of a contiguous tensor."""
    return x.dtype == dtype and x.stride() == _dense(x.shape)


def _plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`, contiguous, aligned to 16 bytes and with the strides of its shape: torch does not normalise those of
    size 1."""
    x = x.to(dtype).contiguous()
    return (x.clone() if x.data_ptr() % 16 else x).view(-1).view(x.shape)


def _flat(name: str, x: torch.Tensor) -> torch.Tensor:
    """A pool as a flat view of its elements from the first to the last, with the gaps between slots."""
    if x.data_ptr() % 16:
        _fail(name, f"an address of {x.data_ptr() % 16} past a multiple of 16 bytes", "memory aligned to 16 bytes")
    slots, each = x.shape[0], math.prod(x.shape[1:])
    return x.as_strided((min(slots, 1) * ((slots - 1) * x.stride(0) + each),), (1,))


def _steps(strides: Sequence[int], layout: str) -> tuple[int, ...]:
    """The strides of batch, token and head, in elements."""
    return strides[0], *(strides[1:3] if layout == "bthd" else strides[2:0:-1])


def _is_elsewhere(device: torch.device) -> bool:
    """True if `device` is a CUDA device other than the current one."""
    return device.type == "cuda" and torch._C._cuda_getDevice() != device.index


# --- tensors that a call makes ---------------------------------------------------------------------------------------
#: `_new(x)`: an uninitialised tensor with the shape, dtype and device of `x`. With `_kin(...)` as `x` it takes half the time of
#: `torch.empty`.
_new = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that calls share, in inference mode or not. Kernels do not write to it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _kin(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A one-element tensor expanded to a shape: an argument for `_new`."""
    return _made((1,), dtype, device).expand(shape)


def _stream(device: torch.device) -> Any:
    """The current stream: its address if torch gives it, because the object costs 4 us."""
    address = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return address(device.index) if address else torch.cuda.current_stream(device)


def _filled(make: Callable[..., torch.Tensor], *about: Any) -> torch.Tensor:
    """The tensor make(*about). Calls on one stream share it. The last item of `about` is the device. A captured graph makes a
    tensor of its own, and fills it each time it runs."""
    cuda = about[-1].type == "cuda"
    key = (make, *about, _stream(about[-1]) if cuda else None)
    kept = not (cuda and torch.cuda.is_current_stream_capturing())
    x = _kept.get(key) if kept else None
    if x is None:
        x = make(*about)
        if kept:
            if len(_kept) >= 64:
                _kept.clear()
            _kept[key] = x
    return x


def _equal_rows(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """cu_seqlens of rows of equal length: int32 [batch + 1]."""
    if not tokens:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def _picker(at: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the tensors at these indices, as a tuple. `itemgetter` is faster, but gives a single item bare."""
    return operator.itemgetter(*at) if len(at) > 1 else lambda memory: tuple(memory[i] for i in at)
