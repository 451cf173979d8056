"""FLA: `import gdn_codegen.integrations.fla`, before or after `import fla`. Read: fla-core 0.5.1, 0.5.2 and 0.6.0.

    fla/backends.py               BaseBackend, register(entry_point)                                         (0.6.0)
    fla/ops/NAME/__init__.py      the functions of ENTRIES: public, imported by name from fla/layers/*.py
    fla/ops/rwkv7/chunk.py        calls chunk_dplr_delta_rule; retention/*.py and lightning_attn/*.py those of simple_gla

Functions that FLA 0.6.0 dispatches get a backend, before all but Ascend's. The names of the others are replaced in each loaded
module that has them. What is called is the same: our op with FLA's arguments, or FLA's function where ours refuses the call.
`disable()` and `enable()` switch both off and on.
"""
from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from types import FunctionType, ModuleType
from typing import Any

import torch

from .. import channels, family, ops
from .calls import falling_back, record, refusal

VERSIONS = ("0.5.1", "0.5.2", "0.6.0")
#: Before FlashQLA and FlashKDA (3), after Triton-Ascend (0).
PRIORITY = 1
_OLD = "transpose_state_layout"  # FLA's older name of state_v_first; it warns of it
_GATE = ("A_log", "dt_bias", "chunk_size", _OLD)


@dataclass(frozen=True)
class Entry:
    """A public function of FLA's.

    where: its package in fla.ops. ours: our op with its arguments. also: keywords that it takes from **kwargs; FLA refuses or
    ignores others. sizes: the chunks that it takes, () if it does not say.
    """

    where: str
    ours: Callable[..., Any]
    also: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


def _dplr(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op of RWKV-7 with the order of FLA's dplr functions. Neither has a default of the other."""
    def call(q: Any, k: Any, v: Any, a: Any, b: Any, gk: Any, scale: Any = None, initial_state: Any = None,
             output_final_state: bool = False, reverse: bool = False, **others: Any) -> Any:
        if reverse is not False:
            raise ValueError(f"reverse: got {reverse!r}; accepted: False")
        return op(q, gk, k, v, a, b, scale, initial_state, output_final_state, **others)
    return call


#: By name, what is served.
ENTRIES = {
    "chunk_gated_delta_rule": Entry("gated_delta_rule", ops.chunk_gated_delta_rule, ("use_gate_in_kernel", *_GATE), (16, 32, 64)),
    "fused_recurrent_gated_delta_rule": Entry("gated_delta_rule", ops.fused_recurrent_gated_delta_rule, (_OLD,)),
    "chunk_kda": Entry("kda", channels.chunk_kda, _GATE, (32, 64)),
    "fused_recurrent_kda": Entry("kda", channels.fused_recurrent_kda, (_OLD,)),
    "chunk_gla": Entry("gla", channels.chunk_gla),
    "fused_recurrent_gla": Entry("gla", channels.fused_recurrent_gla, (_OLD,)),
    "chunk_delta_rule": Entry("delta_rule", family.chunk_delta_rule, ("chunk_size",), (16, 32, 64)),
    "fused_recurrent_delta_rule": Entry("delta_rule", family.fused_recurrent_delta_rule),
    "chunk_simple_gla": Entry("simple_gla", family.chunk_simple_gla, ("chunk_size",)),
    "fused_chunk_simple_gla": Entry("simple_gla", family.chunk_simple_gla),
    "fused_recurrent_simple_gla": Entry("simple_gla", family.fused_recurrent_simple_gla, (_OLD,)),
    "chunk_gdn2": Entry("gdn2", channels.chunk_gdn2, _GATE, (64,)),
    "fused_recurrent_gdn2": Entry("gdn2", channels.fused_recurrent_gdn2, (_OLD,)),
    "chunk_dplr_delta_rule": Entry("generalized_delta_rule.dplr", _dplr(channels.chunk_rwkv7)),
    "fused_recurrent_dplr_delta_rule": Entry("generalized_delta_rule.dplr", _dplr(channels.fused_recurrent_rwkv7)),
    "fused_mul_recurrent_rwkv7": Entry("rwkv7", channels.fused_mul_recurrent_rwkv7),
    "chunk_gated_delta_product": Entry("gated_delta_product", family.chunk_gated_delta_product),
}
#: What FLA 0.6.0 dispatches: by the name of an operation, or ("") of the function.
DISPATCHED = {"chunk_gated_delta_rule": "gated_delta_rule", "chunk_dplr_delta_rule": "generalized_delta_rule.dplr",
              "chunk_kda": "", "fused_recurrent_simple_gla": "", "fused_chunk_simple_gla": ""}


def taken(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Our op for FLA's function `name`. ValueError for a call that FLA does not take, or takes in another way.

    theirs: FLA's function. Its signature says the order of arguments, which differs between versions.
    """
    entry, parameters = ENTRIES[name], signature(theirs).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is not Parameter.VAR_KEYWORD)
    known = frozenset((*names, *entry.also))

    def call(*args: Any, **others: Any) -> Any:
        """FLA's arguments, by position or by name. ValueError: see `taken`."""
        given = {**dict(zip(names, args, strict=False)), **others}
        if len(given) < len(args) + len(others) or not known.issuperset(given):
            raise ValueError(f"arguments: got {len(args)} by position and {', '.join(others)}; accepted: each once, of "
                             f"{', '.join((*names, *entry.also))}")
        if entry.sizes and given.get("chunk_size", entry.sizes[0]) not in entry.sizes:
            raise ValueError(f"chunk_size: got {given['chunk_size']!r}; accepted: {', '.join(map(str, entry.sizes))}")
        _check_dtypes(given)
        if _OLD in given:
            if given.get("state_v_first"):
                raise ValueError(f"{_OLD}: got it with state_v_first=True; accepted: one of them")
            warnings.warn(f"{_OLD} is state_v_first", DeprecationWarning, stacklevel=4)
        return entry.ours(**given)
    return call


def _check_dtypes(given: dict[str, Any]) -> None:
    """ValueError for q, k and v of several dtypes: FLA's o then has q's dtype, ours v's."""
    found = {n: x.dtype for n in ("q", "r", "k", "v") if isinstance(x := given.get(n), torch.Tensor)}
    if len(set(found.values())) > 1:
        raise ValueError(f"q, k, v: got {', '.join(map(str, found.values()))}; accepted: one dtype")


_disabled: Callable[..., Callable[..., Any]] = torch.compiler.disable


# --- off and on -----------------------------------------------------------------------------------------------------------
class _State(threading.local):
    """passed_over: whether this thread is in a call that the backend has handed on."""

    passed_over = False


_state, _on = _State(), False
#: Ours for FLA's, and FLA's own, by name: of functions that FLA does not dispatch.
_replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def enabled() -> bool:
    """Whether FLA's functions call ours."""
    return _on


def enable() -> None:
    """Have FLA's functions call our ops. Names in modules that are loaded later are those of fla.ops, so ours."""
    global _on
    _on = True
    _swap({theirs: ours for ours, theirs in _replaced.values()})


def disable() -> None:
    """Give FLA its functions back, in all loaded modules."""
    global _on
    _on = False
    _swap(dict(_replaced.values()))


def _swap(new: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Bind each name of a loaded module that has one of these functions to the new one."""
    for module in [m for m in sys.modules.values() if isinstance(m, ModuleType)]:
        for name, x in list(vars(module).items()):
            if type(x) is FunctionType and x in new:  # isinstance asks objects, some of which warn
                vars(module)[name] = new[x]


@contextmanager
def _passing_over() -> Iterator[None]:
    before, _state.passed_over = _state.passed_over, True
    try:
        yield
    finally:
        _state.passed_over = before


# --- set up ---------------------------------------------------------------------------------------------------------------
def _found() -> dict[str, Callable[..., Any]]:
    """FLA's functions of ENTRIES. ImportError for an FLA that is absent, or of a version that was not read."""
    accepted = f"accepted: fla-core of version {', '.join(VERSIONS)}"
    try:
        version = importlib.import_module("fla").__version__
    except ModuleNotFoundError as e:
        if e.name != "fla":
            raise
        raise ImportError(f"fla: got none; {accepted}", name="fla") from e
    if version not in VERSIONS:
        raise ImportError(f"fla: got {version}; {accepted}", name="fla")
    return {n: getattr(importlib.import_module(f"fla.ops.{e.where}"), n) for n, e in ENTRIES.items()}


def _register(served: dict[str, Callable[..., Any]], theirs: dict[str, Callable[..., Any]]) -> None:
    """A backend of FLA 0.6.0 for these functions. It asks `refusal`, so that FLA logs why a call is left to others."""
    from fla.backends import BaseBackend, register
    asked = {n: taken(n, f) for n, f in theirs.items()}

    class GdnCodegenBackend(BaseBackend):  # type: ignore[misc]
        backend_type = "gdn_codegen"
        package_name = "gdn_codegen"
        priority = PRIORITY

        def is_enabled(self) -> bool:
            return _on and not _state.passed_over

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            if function_name not in asked:
                return False, "gdn_codegen has whole ops only"
            reason = refusal(asked[function_name], *args, **kwargs)
            if reason:
                record("fla", function_name, reason)
            return not reason, reason or None

        def get_implementation(self, function_name: str) -> Callable[..., Any] | None:
            return served.get(function_name)

    for name, function in theirs.items():
        register(DISPATCHED[name] or function)(GdnCodegenBackend)


def _after(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """FLA's dispatched function without our backend."""
    def call(*args: Any, **kwargs: Any) -> Any:
        with _passing_over():
            return theirs(*args, **kwargs)
    return call


def _while_on(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, and `theirs` after `disable`, for holders that no module's variable is, as other plug-ins."""
    @wraps(ours, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if _on else theirs)(*args, **kwargs)
    return call


def _set_up() -> None:
    """Make ours for all ENTRIES: those that this FLA dispatches are registered, the others wait for `enable`."""
    found = _found()
    registers = sys.modules["fla"].__version__ == "0.6.0" and os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1"
    dispatched = {n: found[n] for n in DISPATCHED} if registers else {}
    if dispatched:
        _register({n: falling_back("fla", n, taken(n, f), _after(f)) for n, f in dispatched.items()}, dispatched)
    for n, theirs in found.items():
        if n not in dispatched:
            call = _while_on(falling_back("fla", n, taken(n, theirs), theirs), theirs)
            # FLA keeps some of its functions out of graphs of torch.compile
            _replaced[n] = _disabled(call) if getattr(theirs, "_torchdynamo_disable", False) else call, theirs


_set_up()
enable()
