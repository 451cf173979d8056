"""Calls of pages other than Gated DeltaNet's.

The options are those of Gated DeltaNet's ops, and so are their checks, dispatch and admission. What a page takes follows from the
page: its inputs, and from their dims K, V, the heads and which of them are numbers. What one call decides is kept for those of
its kind (known_members.py). torch.compile and tracers get a torch op (runtime/member_library.py).
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ... import algorithms
from ...host.arguments import _check_number, _check_rank
from ...host.tensors import _fail
from ...ir.decays import log_decays
from ...ir.page import Algorithm
from ...schedule.contract import Contract
from . import known_members
from .aliasing import shared
from .arguments import BUFFER, INPUTS, Options, Tensors, name_of
from .differentiable import differentiable, differentiates
from .dtypes import with_states
from .known_keywords import spelled
from .launch import are_plain, planned
from .normalise import check_chunks, check_plain, is_step, reads, request_of, shape_of
from .positions import check
from .request import DECODE_CHUNK, DTYPES, SAVING, Inputs, Request, call_for
from .run import run
from .stored_states import check_undifferentiated, stores

#: How options are where a call does not say otherwise.
OPEN = Options(False, False, False, None, "log", "given", False, False, None, None, "auto", None)
#: Options that ask for what kernels do to an input, the inputs, and the values that do not.
FORMS = {"beta_form": (("beta",), ("given", "")), "use_qk_l2norm_in_kernel": (("q", "k"), (False,)),
         "unit_keys": (("k",), (False,))}


def _options(algorithm: str, inputs: dict[str, Any], named: dict[str, Any], others: dict[str, Any], step: bool
             ) -> tuple[Tensors, Options]:
    """Tensors and options of a call, without its inputs. ValueError for a keyword that the op does not take. step: whether the
    call is a decoding step."""
    given = tuple([named.get(n) for n in Tensors._fields])
    options = tuple([named.get(n, y) for n, y in zip(Options._fields, OPEN, strict=True)])
    t, x = spelled(given, options, others, DECODE_CHUNK if step else 0, ours=True)
    for name, y in zip(Tensors._fields[:INPUTS], t, strict=False):
        if y is not None:
            _fail(name, "a value", f"no value: {algorithm} has the inputs {', '.join(inputs)}")
    return Tensors(*t), Options(*x)


def check_forms(page: Algorithm, gate: str, *said: Any) -> None:
    """ValueError for forms of inputs that the page has not. said: values of the options of FORMS, in their order."""
    if gate not in ("log", "") and not _gate(page):
        _fail("gate", repr(gate), f"'log': {page.name} has no log decays of tokens among its inputs")
    for x, (option, (read, plain)) in zip(said, FORMS.items(), strict=True):
        lacks = [n for n in read if "C" not in page.inputs.get(n, ("", ()))[1]]
        if x not in plain and lacks:
            _fail(option, repr(x), f"{plain[0]!r}: {page.name} has no input {lacks[0]}")


@cache
def _gates(page: Algorithm) -> frozenset[str]:
    """The page's inputs that are logs of decays. Their dtype is not that of the others."""
    return frozenset(log_decays(page.trace()))


def _gate(page: Algorithm) -> str:
    """The page's log decays of tokens, "" for none."""
    return next((n for n in page.inputs if n in _gates(page) and "C" in page.inputs[n][1]), "")


def _checked(page: Algorithm, inputs: dict[str, Any], t: Tensors, layout: str) -> dict[str, Tensor]:
    """The inputs, in dtypes that kernels take. ValueError for what is no tensor of the right rank and dtype."""
    ranks = {n: 2 + len(page.inputs[n][1]) if "C" in page.inputs.get(n, ("", ()))[1] else 1 for n in inputs}
    for name, y in (*inputs.items(), *((n, y) for n, y in zip(t._fields, t, strict=True) if y is not None)):
        check_plain(name, y)
    for name, y in inputs.items():
        if ranks[name] > 1:  # the module checks the shape of a number for each head
            _check_rank(name, y, ranks[name], layout)
        if y.dtype not in DTYPES:
            _fail(name, y.dtype, ", ".join(map(str, DTYPES)))
    gates = _gates(page)
    matrices = [n for n, rank in ranks.items() if rank == 4 and n not in gates]
    last = matrices[-1] if "v" not in matrices else "v"
    dtype = inputs[last].dtype
    for name in matrices:
        if inputs[name].dtype not in (dtype, torch.float32):
            _fail(name, inputs[name].dtype, f"{dtype}, that of {last}"
                  + (", or torch.float32, which is rounded to it" if dtype != torch.float32 else ""))
    return {n: y.to(dtype) if n in matrices else y for n, y in inputs.items()}


def _about(page: Algorithm, inputs: dict[str, Any], x: Request) -> Inputs:
    """What the choice of a build depends on. ValueError if no input says how large K or V is."""
    sizes: dict[str, int] = {}
    heads: dict[str, int] = {}
    dtype, shape = torch.float32, torch.Size()
    gates = _gates(page)
    tokens = {p.name: p for p in page.trace().role("input") if p.index == "token"}
    numbers = [(n, y) for n, y in inputs.items()
               if (len(tokens[n].dims) == 1 or n in gates if n in tokens else y is not None and y.ndim == 1)]
    for p in (p for p in tokens.values() if len(p.dims) > 1):
        y = inputs[p.name]
        sizes[str(p.dims[1])] = y.shape[3]
        heads.setdefault(p.heads, y.shape[x.axes[1]])
        shape, dtype = y.shape, dtype if p.name in gates else y.dtype
    value_heads = heads.get("HV") or heads["H"]
    return Inputs(tuple(inputs[n] for n in tokens), tuple(y for n, y in inputs.items() if n not in tokens),
                  tuple((n, y.dtype) for n, y in numbers if y is not None), dtype, (sizes["K"], sizes["V"]),
                  (heads.get("H", value_heads), value_heads), (shape[0], shape[x.axes[0]]))


def _check_written(inputs: dict[str, Tensor | None], t: Tensors, x: Request) -> None:
    """ValueError where a tensor that the call writes shares memory with another that it reads or writes."""
    state = "initial_state" if x.in_place else "final_state"
    others = {n: y for n, y in (*inputs.items(), *((name_of(n, t), y) for n, y in enumerate(t))) if y is not None}
    for name in ("out", state, name_of(BUFFER, t)):
        for other, y in others.items():
            same = {name, other} == {"initial_state", "final_state"} and y is others.get(name)
            if name in others and other != name and not same and shared(others[name], y):
                _fail(name, f"memory of {other}", "memory of its own")


def _check_values(about: Inputs, inputs: dict[str, Any], t: Tensors, x: Request) -> None:
    """Checks what shapes and dtypes do not show: factors below 0, tables of chunks, positions, memory that the call writes."""
    for n, form in Contract.parse(x.forms).inputs:
        if form == "linear" and reads(inputs[n]) and bool((inputs[n] < 0).any()):
            _fail(n, f"{inputs[n].min().item():g} with gate='linear'", "factors of 0 or more")
    check_chunks(t.chunk_indices, t.chunk_offsets, t.cu_seqlens, x.chunk_size)
    if t.checkpoint_positions is not None or t.checkpoint_slots is not None or x.aligned_positions:
        check(about, t, x)
    _check_written(inputs, t, x)


def prepared(page: Algorithm, inputs: dict[str, Any], t: Tensors, x: Request) -> tuple[Inputs, Tensors, Request]:
    """What a call comes to: its inputs in dtypes that kernels take, its other tensors, and a Request that names the page and the
    forms of its inputs. ValueError names an argument that the page does not take so."""
    order = sorted(page.inputs, key=lambda n: "C" not in page.inputs[n][1])  # modules take what heads have last
    raw = {"A_log": t.A_log, "dt_bias": t.dt_bias} if x.gate == "raw" else {}
    inputs = {n: inputs[n] for n in (*order, *(n for n in inputs if n not in order))} | raw
    forms = ",".join(filter(None, (x.forms, f"{_gate(page)}={x.gate}" if x.gate else "")))
    absent = {n for n, y in inputs.items() if y is None and (n in page.defaults or n not in page.inputs)}
    checked = _checked(page, {n: y for n, y in inputs.items() if n not in absent}, t, x.layout)
    inputs = {n: checked.get(n) for n in inputs}
    x = replace(x, algorithm=page.name + (SAVING if x.saves else ""), gate="", forms=forms)
    t, about = t._replace(A_log=None, dt_bias=None), _about(page, inputs, x)
    _check_values(about, inputs, t, x)
    return about, t, x


@contextmanager
def by_names(called: Mapping[str, str]) -> Iterator[None]:
    """A ValueError names inputs and states as the callers of the op do. called: by our name, the caller's."""
    try:
        yield
    except ValueError as e:
        said = re.sub(r"^\w+(?=: got)|(?<=that of )\w+", lambda m: called.get(m[0], m[0]), str(e))
        if said == str(e):
            raise
        raise ValueError(said) from e


def call(algorithm: str, inputs: dict[str, Any], numbers: dict[str, Any], named: dict[str, Any], others: dict[str, Any],
         forms: str = "", called: Mapping[str, str] = MappingProxyType({}), recurrent: bool = False) -> tuple[Any, ...]:
    """o, the final state or None, and the checkpoints if the call has some.

    algorithm: the page. inputs: its inputs by name, then the tensors of `forms`. None leaves out what may be absent. forms: input
    forms, as a contract has them. numbers: those of the caller; None means the page's default. named: arguments of the op that
    are Tensors or Options, by name. others: all other keywords of the call. called: what callers call inputs and states.
    recurrent: whether a call of few tokens is a decoding step.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return _traced(algorithm, inputs, numbers, named, others, forms, dict(called), recurrent)
    said = known_members.said(algorithm, inputs, numbers, named, others, forms, recurrent)
    results: tuple[Any, ...] | None = known_members.again(said)
    if results is not None:
        return results
    if not are_plain(said.tensors):
        return _traced(algorithm, inputs, numbers, named, others, forms, dict(called), recurrent)
    if differentiates(said.tensors):
        return _differentiated(algorithm, inputs, numbers, named, others, forms, dict(called), recurrent)
    with by_names(called):
        page, step = algorithms.find(algorithm), _is_step(inputs, named, others, recurrent)
        given = _options(algorithm, inputs, named, others, step)

        if stores(*given):  # what kernels are given is other memory than the caller's
            _check_written(inputs, given[0], request_of(*given, step))

        def run(t: Tensors, x: Options) -> tuple[Any, ...]:
            check_forms(page, x.gate, x.beta_form, x.use_qk_l2norm_in_kernel, x.unit_keys)
            about, t, asked = prepared(page, inputs, t, replace(request_of(t, x, step), forms=forms))
            if t.checkpoint_positions is not None:
                return eager(about, t, asked, numbers)
            m, plan, results = planned(about, t, call_for(about, t, asked),
                                       partial(known_members.numbers_for, given=numbers))
            if x is given[1]:  # else states have other dtypes than the caller's
                known_members.keep(said, about, t, asked, m, plan)
            return results
        return with_states(*given, run)


def eager(about: Inputs, t: Tensors, x: Request, numbers: dict[str, Any], checkpoints: Tensor | None = None) -> tuple[Any, ...]:
    """The results of a call of which nothing is kept."""
    results = run(about, t, x, partial(known_members.numbers_for, given=numbers), checkpoints)
    return results if x.checkpoint_chunks or x.saves else results[:2]


def _is_step(inputs: dict[str, Any], named: dict[str, Any], others: dict[str, Any], recurrent: bool) -> bool:
    return recurrent and is_step(shape_of(*next(iter(inputs.items()))), named.get("cu_seqlens"), others)


def _asked(algorithm: str, inputs: dict[str, Any], t: Tensors, x: Options, forms: str, called: dict[str, str], step: bool
           ) -> Request:
    """The Request of a call, also where it is differentiated."""
    asked = replace(request_of(t, x, step), algorithm=algorithm, forms=forms)
    if differentiates((*inputs.values(), t.A_log, t.dt_bias, t.initial_state)):
        check_undifferentiated(t, x)
        return differentiable(t, asked, x.save, called)
    return asked


def _differentiated(algorithm: str, inputs: dict[str, Any], numbers: dict[str, Any], named: dict[str, Any],
                    others: dict[str, Any], forms: str, called: dict[str, str], recurrent: bool) -> tuple[Any, ...]:
    """`call` of plain tensors of which some require grad."""
    from ..gradient_library import differentiated
    from .gradient import check_built
    step = _is_step(inputs, named, others, recurrent)
    t, x = _options(algorithm, inputs, named, others, step)
    _check_plain_ones(inputs, t, called)
    asked = _asked(algorithm, inputs, t, x, forms, called, step)
    by = inputs | ({"A_log": t.A_log, "dt_bias": t.dt_bias} if asked.gate == "raw" else {})
    with by_names(called):
        check_forms(algorithms.find(algorithm), x.gate, x.beta_form, x.use_qk_l2norm_in_kernel, x.unit_keys)
        check_built(by, t, asked)
    if asked.saves:
        return _traced(algorithm, inputs, numbers, named, others, forms, called, recurrent)
    plain = _plain(numbers)
    return differentiated(lambda: call(algorithm, inputs, plain, named, others, forms, called, recurrent), by, t, asked,
                          plain.get("scale"))


def _plain(numbers: dict[str, Any]) -> dict[str, float | None]:
    """The numbers of a call, as torch's ops take them."""
    return {n: None if y is None else _check_number(n, y) for n, y in numbers.items()}


def _check_plain_ones(inputs: dict[str, Any], t: Tensors, called: dict[str, str]) -> None:
    for name, y in (*inputs.items(), *t._asdict().items()):
        if y is not None:
            check_plain(called.get(name, name), y)


def _traced(algorithm: str, inputs: dict[str, Any], numbers: dict[str, Any], named: dict[str, Any], others: dict[str, Any],
            forms: str, called: dict[str, str], recurrent: bool) -> tuple[Any, ...]:
    """`call` under torch.compile, of tensors that dispatch ops themselves, and of those that require grad: by way of a torch
    op."""
    from ..member_library import compiled
    step = _is_step(inputs, named, others, recurrent)
    t, x = _options(algorithm, inputs, named, others, step)

    _check_plain_ones(inputs, t, called)

    plain = _plain(numbers)

    def run(t: Tensors, x: Options) -> tuple[Any, ...]:
        return compiled(inputs, plain, t, _asked(algorithm, inputs, t, x, forms, called, step), called)
    return with_states(t, x, run)
