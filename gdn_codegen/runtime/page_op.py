"""The op of a build of any page: the generated function, which torch can also differentiate and compile.

Generated functions compute the forward pass only. A call with a tensor that requires grad, or under torch.compile, is one of the
torch op gdn_codegen::page (runtime/page_library.py). Its gradient comes from the two modules that are derived from the page.
A page may have several outputs, and any number of states.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import torch

from ..derived_pages import beside, find
from ..host.arguments import _check_flag
from ..host.host import _untraced
from ..host.tables import Tables
from ..host.tensors import _fail
from ..schedule.contract import STATE_FLAGS
from .build import Build
from .call.aliasing import shared
from .call.differentiable import NONE, differentiates
from .call.gradient_builds import check_target
from .call.launch import are_plain
from .call.normalise import SAVED, _word, check_located, check_plain
from .load import function, module
from .page_library import check_built, key_of, page, tensors_of

_FINAL = "output_final_state"


@lru_cache(maxsize=256)
def op(b: Build, save: str = "nothing") -> Callable[..., Any]:
    """The generated function of `b`, of which torch can compute gradients, and which torch.compile takes whole.

    save: what a call that is differentiated keeps beside its arguments, a key of SAVED. ValueError for another, and in a call for
    what has no gradient.
    """
    kind, rounded = _word("save", save, SAVED)
    fn, host = function(b), module(b).HOST
    t: Tables = host.tables
    names, read, key = tuple(inspect.signature(fn).parameters), tensors_of(t), key_of(b)
    saving_key, lent = key_of(_saving(b, kind, rounded)), frozenset((*t.outs, *(row[0] for row in t.final)))
    first, functional = names[0], not any(getattr(b.contract, word) for word in STATE_FLAGS)

    def call(*args: Any, **named: Any) -> Any:
        """The results of the generated function, which torch differentiates if a tensor among the arguments requires grad."""
        tensors = *args, *named.values()
        differentiated = differentiates(tensors)
        given = {**dict(zip(names, args, strict=False)), **named}
        if not (differentiated or torch.compiler.is_dynamo_compiling() or _dispatches(tensors)):
            check_located(first, given.get(first))
            if not lent.isdisjoint(given):
                _check_apart(lent, given)
            return fn(*args, **named)
        wrong = len(given) < len(args) + len(named) or any(n not in names for n in given)  # too many, twice, or unknown
        given = {n: y for n, y in given.items() if y is not None}
        if wrong or any(row[0] not in given for row in t.inputs):
            return fn(*args, **named)  # which says what is wrong
        if differentiated:
            _check(b, t, given)
            if not (torch.compiler.is_compiling() or _dispatches(tensors)):
                check_built(key, given, saving_key != key)
        elif not functional or any(n not in (*read, *t.scalars, _FINAL) for n in given):
            return _untraced(fn, *args, **named)
        final = bool(t.final) and _check_flag(_FINAL, given.get(_FINAL, False))
        read_here = [n for n in read if n in given]
        numbers = host.numbers_of([given.get(n) for n in t.scalars])
        made = page(saving_key if differentiated else key, [given[n] for n in read_here], read_here,
                    list(numbers), final)
        results = len(t.outputs) + (len(t.final) if final else 0)
        return (*made[:results], *[None] * (0 if final else len(t.final)))
    call.__code__ = call.__code__.replace(co_name=fn.__name__)  # torch compiles one code eight times at most
    return wraps(fn)(call)


def _dispatches(arguments: tuple[Any, ...]) -> bool:
    """Whether a mode of torch, or the class of a tensor, sees ops itself, as when shapes are traced. Then a call is one op."""
    return torch._C._len_torch_dispatch_stack() > 0 or not are_plain(arguments)


def _check_apart(lent: frozenset[str], given: dict[str, Any]) -> None:
    """ValueError where memory for a result, one of `lent`, is memory of another argument: kernels run in no order."""
    tensors = {n: y for n, y in given.items() if isinstance(y, torch.Tensor)}
    for n in sorted(lent & tensors.keys()):
        for m, y in tensors.items():
            if m != n and shared(tensors[n], y):
                _fail(n, f"memory of {m}", "memory of its own")


def _saving(b: Build, kind: str, rounded: bool) -> Build:
    """The build of a call that saves the states before chunks, or `b` if `kind` is "" or the page's gradient reads none."""
    if not kind or not any(y.index == "slot" for y in find(beside(b.algorithm, "gradient")).trace().role("input")):
        return b
    page = beside(b.algorithm, kind.removeprefix("."))
    states = [y.name for y in find(page).trace().role("output") if y.index == "slot"]
    dtypes = tuple((n, b.dtype) for n in states if rounded)
    return replace(b, algorithm=page, contract=replace(b.contract, dtypes=tuple(sorted((*b.contract.dtypes, *dtypes)))))


def _check(b: Build, t: Tables, given: dict[str, Any]) -> None:
    """ValueError for a call that has no gradient. given: its arguments but for None."""
    check_target(b.target)
    for word in STATE_FLAGS:
        if getattr(b.contract, word):
            _fail("contract", f"states with {word}", "states without it beside a tensor that requires grad, or a call under "
                  "torch.no_grad()")
    for name in (*t.outs, *(row[0] for row in t.final)):
        if name in given:
            _fail(name, "a tensor", NONE)
    for name in tensors_of(t):
        if name in given:
            check_plain(name, given[name])
