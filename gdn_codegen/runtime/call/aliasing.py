"""Whether tensors share memory, and whether those of a call may."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from ...host.tensors import _fail
from .arguments import BUFFER, FINAL, IN_KERNELS, INITIAL, OUT, Tensors, name_of

#: Steps of one tensor that are looked at one by one within the reach of another.
FEW = 8
#: How the error for a buffer that shares memory ends.
_APART = {"initial_state": ", because the final state overwrites it", "final_state": ", or inplace_final_state=True", "out": "",
          "intermediate_states_buffer": ""}
Steps = list[tuple[int, int]]


def shared(x: Tensor, y: Tensor) -> bool:
    """True if two tensors certainly share elements. Views in each other's gaps do not. For views whose strides have no common
    structure this is not known, and the result is False."""
    if not x.numel() or not y.numel() or x.device != y.device:
        return False
    a, b = x.data_ptr(), y.data_ptr()
    if a == b or (x.is_contiguous() and y.is_contiguous()):
        return a < b + y.nbytes and b < a + x.nbytes
    return _meet(a, _steps(x), b, _steps(y))


def reach(x: Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if x is None or not x.numel():
        return 0
    return x.element_size() * (1 + sum(far * (n - 1) for far, n in zip(x.stride(), x.shape, strict=True)))


def _steps(x: Tensor) -> Steps:
    """(stride in bytes, size) of each dim, the largest stride first. Dims without gaps between them are merged."""
    found: Steps = []
    for far, n in sorted(((far, n) for far, n in zip(x.stride(), x.shape, strict=True) if n > 1 and far), reverse=True):
        if found and found[-1][0] == far * n * x.element_size():
            found[-1] = far * x.element_size(), n * found[-1][1]
        else:
            found.append((far * x.element_size(), n))
    if found and found[-1][0] == x.element_size():
        far, n = found.pop()
        return [*found, (1, far * n)]
    return [*found, (1, x.element_size())]


def _reach(steps: Steps) -> int:
    return 1 + sum(far * (n - 1) for far, n in steps)


def _meet(a: int, x: Steps, b: int, y: Steps) -> bool:
    """Whether bytes at `a` and steps from it are bytes at `b` and steps from it."""
    if a + _reach(x) <= b or b + _reach(y) <= a:
        return False
    (far, n), (other, m) = x[0], y[0]
    if len(x) == len(y) == 1:
        return True
    if other > far:
        return _meet(b, y, a, x)
    inner, low = x[1:], -(m - 1) if far == other else 0
    rest = y[1:] if far == other else y
    first, last = -((a + _reach(inner) - 1 - b) // far), (b + _reach(rest) - 1 - a) // far
    some = range(max(first, low), min(last, n - 1) + 1)
    if len(some) > FEW:
        return len(rest) == 1  # which covers a whole step
    return any(_meet(a + i * far, inner, b, rest) for i in some)


def written(t: tuple[Any, ...], in_place: bool) -> list[int]:
    """Indices of the given tensors that the call writes."""
    state = FINAL if t[FINAL] is not None and t[FINAL] is not t[INITIAL] else INITIAL if in_place else None
    return [n for n in (OUT, state, BUFFER) if n is not None and t[n] is not None]


def check_written(t: tuple[Any, ...], in_place: bool, reaches: tuple[int, ...]) -> None:
    """ValueError where a tensor that the call writes shares memory with another that it reads or writes: kernels run side by
    side, in no order.

    t: the call's Tensors as a tuple. reaches: bytes from each tensor's first element to its last. They depend on its kind alone,
    so most calls compare only addresses.
    """
    for n in written(t, in_place):
        x: Any = t[n]
        first = x.data_ptr()
        last = first + reaches[n]
        for m, y in enumerate(t[:IN_KERNELS]):
            if y is None or m == n or (n == INITIAL and m == FINAL):
                continue
            at = y.data_ptr()
            if at < last and first < at + reaches[m] and shared(x, y):
                _fail(name_of(n, t), f"memory of {name_of(m, t)}", f"memory of its own{_APART[Tensors._fields[n]]}")
