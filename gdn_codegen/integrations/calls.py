"""What plug-ins share: whether our op takes a call, functions that fall back to the host's own, and a record of both."""
from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..runtime.admit import Refused
from ..runtime.call.launch import kind

#: What our ops raise before they write anything: for arguments that they do not take, and where no build serves the call.
REFUSALS = (ValueError, Refused)
#: How many reasons are kept for a function. Reasons have shapes in them, so there may be many.
MOST = 64
#: Of a host's function (host, name), how many calls were served (reason "") or fell back, by the reason.
_calls: dict[tuple[str, str], Counter[str]] = {}
#: Types of the arguments of calls whose refusals are kept. A key must not keep other objects alive.
KEPT = (Tensor, type(None), bool, int, float, str, torch.dtype)
#: Of a kind of calls, why our op refuses it.
_refusals: dict[Any, str] = {}


def record(host: str, function: str, reason: str = "") -> None:
    """Count a call of a host's function. reason: why it went to the host's own function, "" if our op served it.

    With GDN_DEBUG=1 the first call of each reason is printed to stderr. Calls under torch.compile are not counted.
    """
    if torch.compiler.is_compiling():
        return
    counts = _calls.setdefault((host, function), Counter())
    if reason not in counts:
        if len(counts) >= MOST:
            reason = "other reasons"
        if os.environ.get("GDN_DEBUG", "0") not in ("", "0"):
            print(f"gdn_codegen: {host}: {function}: {_said(reason)}", file=sys.stderr)
    counts[reason] += 1


def _said(reason: str) -> str:
    return f"left to the host ({reason})" if reason else "served"


def report(host: str = "") -> str:
    """The calls of hosts' functions so far, of one host or of all: a line for each function and reason."""
    return "\n".join(f"{h}: {function}: {_said(reason)}: {n}" for (h, function), counts in _calls.items() if host in ("", h)
                     for reason, n in counts.items())


def reset() -> None:
    """Forget the calls of `report`."""
    _calls.clear()


def refusal(op: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Why our op refuses a call: the text of its ValueError; "" if it takes the call.

    The op runs on fake tensors of the same shapes, strides, dtypes and devices, which takes 1.5 ms for a new kind of calls. It
    neither chooses a build nor reads values of tensors. So a call with K or V that no build has, or with a bad cu_seqlens, is
    refused only when it is made (`falling_back`).
    """
    about: Any = (op, tuple(map(_kind, args)), tuple((n, _kind(x)) for n, x in kwargs.items()), torch.is_grad_enabled(),
                  os.environ.get("GDN_CODEGEN_BATCH_INVARIANT"))
    if not all(isinstance(x, KEPT) for x in (*args, *kwargs.values())):
        about = None
    found = _refusals.get(about)
    if found is not None:
        return found
    found = ""
    with FakeTensorMode():
        try:
            op(*map(_fake, args), **{n: _fake(x) for n, x in kwargs.items()})
        except REFUSALS as e:
            found = str(e).replace("FakeTensor", "Tensor")
    if about is not None:
        if len(_refusals) >= 1024:
            _refusals.clear()
        _refusals[about] = found
    return found


def _kind(x: Any) -> Any:
    """What of an argument `refusal` depends on. The type is part of it: True is no 1."""
    return (type(x), *kind(x), x.requires_grad) if isinstance(x, Tensor) else (type(x), x)


def _fake(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


def falling_back(host: str, function: str, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, or `theirs` where ours refuses the call. Both get the same arguments, those of the host's function.

    host, function: names for `record`. An error of another kind than REFUSALS is raised. The result has the name and the
    docstring of `theirs`.
    """
    @wraps(theirs, updated=())  # theirs may have marks of torch.compiler.disable, by which torch would call theirs
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            results = ours(*args, **kwargs)
        except REFUSALS as e:
            record(host, function, str(e))
            return theirs(*args, **kwargs)
        record(host, function)
        return results
    return call
