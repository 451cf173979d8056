"""Tensors and numbers in a generated module: what kernels can read of tensors, strides and copies, tensors for absent ones.

Below the line the file is copied into generated modules word for word. Nothing here knows a build: callers pass the tables.
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

# --- copied from here on ---
_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_kept: dict[Any, torch.Tensor] = {}
_counts: dict[Any, torch.Tensor] = {}


def _fail(argument: str, got: object, accepted: str) -> NoReturn:
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


# --- what kernels can read -------------------------------------------------------------------------------------------
def _is_transformed() -> bool:
    """Whether tensors of torch.func's transforms, or dual ones, may be among those of a call."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def _check_memory(name: str, x: torch.Tensor) -> None:
    """A dense tensor whose values are those in its memory, because kernels see memory alone."""
    if x.is_nested or x.layout != torch.strided:
        _fail(name, "a nested tensor" if x.is_nested else x.layout, "a dense tensor")
    if torch.compiler.is_compiling():
        return
    if torch._C._is_tracing():
        _fail(name, "a tensor of torch.jit.trace, which does not see kernels", "a call under torch.compile or torch.export")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        _fail(name, "a tensor of vmap, grad, jvp or another transform", "a plain tensor: backward() and torch.autograd.grad "
              "differentiate the op, transforms do not")
    if torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        _fail(name, "a dual tensor of forward-mode differentiation", "its primal, because the op computes gradients only")
    if x.is_neg():
        _fail(name, "a view with torch's negative bit", "x.resolve_neg(), which copies it")


# --- numbers ---------------------------------------------------------------------------------------------------------
def _python_number(x: Any) -> Any:
    """The int or float that a scalar of numpy holds, or an array or tensor of rank 0 on the CPU. `x` itself if it is anything
    else: also a tensor whose value a trace does not know, or whose gradient the number would lose."""
    if type(x) in (int, float) or x is None:
        return x
    if isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor or x.ndim or x.device.type != "cpu" or x.requires_grad or _is_transformed():
            return x
        seen = torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack()
        return x if seen else x.item()
    kind = getattr(getattr(x, "dtype", None), "kind", "") if getattr(x, "ndim", None) == 0 else ""
    return float(x) if kind == "f" else int(x) if kind in ("i", "u") else x


def _integer(x: Any) -> Any:
    """The int that an integer of numpy holds, `x` itself if it is anything else. What a call decides by its options is kept, so
    arrays and tensors, whose values may change, are no options."""
    if type(x) is int or x is None or isinstance(x, torch.Tensor) or type(x).__hash__ is None:
        return x
    return _python_number(x)


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


def _unread_rows(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """In place of cu_seqlens of equal rows, for kernels over single tokens: they compute it, and do not read this. So a captured
    graph does not fill it."""
    return torch.empty(batch + 1, dtype=torch.int32, device=device)


def _in_order(count: int, device: torch.device) -> Any:
    """The numbers 0, 1, ... as int32 [count]. All streams and captured graphs share them, so they are never freed. None while a
    graph is captured and they do not exist."""
    size = max(1024, 1 << (count - 1).bit_length())
    if (size, device) not in _counts:
        cuda = device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            _counts[size, device] = torch.arange(size, dtype=torch.int32, device=device)
        if cuda:
            torch.cuda.current_stream(device).synchronize()
    return _counts[size, device][:count]


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def _picker(at: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the tensors at these indices, as a tuple. `itemgetter` is faster, but gives a single item bare."""
    return operator.itemgetter(*at) if len(at) > 1 else lambda memory: tuple(memory[i] for i in at)
