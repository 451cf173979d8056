"""Whether tensors share memory."""
from __future__ import annotations

from torch import Tensor

#: Steps of one tensor that are looked at one by one within the reach of another.
FEW = 8
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
