"""Calls of pages other than Gated DeltaNet's.

The options are those of Gated DeltaNet's ops, and so are their checks, dispatch and admission. What a page takes follows from the
page: its inputs, and from their dims K, V, the heads and which of them are numbers. Nothing is kept between calls but what a
module keeps. torch.compile and tracers get a torch op (runtime/member_library.py).
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ... import algorithms
from ...host.arguments import _check_detached, _check_rank
from ...host.tensors import _fail
from ...ir.builder import Algorithm
from ...ir.decays import log_decays
from .aliasing import shared
from .arguments import INPUTS, Options, Tensors
from .dtypes import with_states
from .given import buffers_of, integers_of
from .known_keywords import spelled
from .launch import admitted
from .normalise import check_chunks, check_plain, is_step, reads, request_of, shape_of
from .request import DECODE_CHUNK, DTYPES, Inputs, Request, call_for

#: How options are where a call does not say otherwise.
OPEN = Options(False, False, False, None, "log", "given", False, False, None, None, "auto", None)
#: Options that ask for what kernels do to an input, and the inputs.
FORMS = {"gate": ("g",), "beta_form": ("beta",), "use_qk_l2norm_in_kernel": ("q", "k"), "unit_keys": ("k",)}
#: Arguments that Gated DeltaNet's ops alone have.
ABSENT = ("checkpoint_positions", "checkpoint_slots", "aligned_positions")


def _options(page: Algorithm, named: dict[str, Any], others: dict[str, Any], step: bool) -> tuple[Tensors, Options]:
    """Tensors and options of a call, without its inputs. ValueError for a keyword that the op does not take. step: whether the
    call is a decoding step."""
    given = tuple(named.pop(n, None) for n in Tensors._fields)
    t, x = spelled(given, tuple(OPEN._replace(**named)), others, DECODE_CHUNK if step else 0, ours=True)
    tensors, options = Tensors(*t), Options(*x)
    for name in (*Tensors._fields[:INPUTS], *ABSENT):
        if getattr(tensors, name, None) is not None or getattr(options, name, False):
            _fail(name, "a value", f"no value: {page.name} has the inputs {', '.join(page.inputs)}" if name not in ABSENT else
                  "no value, because only chunk_gated_delta_rule has this argument")
    for option, read in FORMS.items():
        said, lacks = getattr(options, option), [n for n in read if "C" not in page.inputs.get(n, ("", ()))[1]]
        if said != getattr(OPEN, option) and lacks:
            _fail(option, repr(said), f"{getattr(OPEN, option)!r}: {page.name} has no input {lacks[0]}"
                  + (" of tokens" if lacks[0] in page.inputs else ""))
    return tensors, options


@cache
def _gates(page: Algorithm) -> frozenset[str]:
    """The page's inputs that are logs of decays. Their dtype is not that of the others."""
    return frozenset(log_decays(page.trace()))


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
    if torch.is_grad_enabled():
        _check_detached((*inputs.items(), ("initial_state", t.initial_state), ("A_log", t.A_log), ("dt_bias", t.dt_bias)))
    gates = _gates(page)
    matrices = [n for n, rank in ranks.items() if rank == 4 and n not in gates]
    last = matrices[-1] if "v" not in matrices else "v"
    dtype = inputs[last].dtype
    for name in matrices:
        if inputs[name].dtype not in (dtype, torch.float32):
            _fail(name, inputs[name].dtype, f"{dtype}, that of {last}"
                  + (", or torch.float32, which is rounded to it" if dtype != torch.float32 else ""))
    return {n: y.to(dtype) if n in matrices else y for n, y in inputs.items()}


def _about(page: Algorithm, inputs: dict[str, Any], t: Tensors, x: Request) -> Inputs:
    """What the choice of a build depends on. ValueError if no input says how large K or V is."""
    sizes: dict[str, int] = {}
    heads: dict[str, int] = {}
    numbers = [("A_log", t.A_log), ("dt_bias", t.dt_bias)]
    dtype, shape = torch.float32, torch.Size()
    gates = _gates(page)
    tokens = {p.name: p for p in page.trace().role("input") if p.index == "token"}
    numbers += [(n, y) for n, y in inputs.items()
                if (len(tokens[n].dims) == 1 or n in gates if n in tokens else y is not None and y.ndim == 1)]
    for p in (p for p in tokens.values() if len(p.dims) > 1):
        y = inputs[p.name]
        sizes[str(p.dims[1])] = y.shape[3]
        heads.setdefault(p.heads, y.shape[x.axes[1]])
        shape, dtype = y.shape, dtype if p.name in gates else y.dtype
    value_heads = heads.get("HV") or heads["H"]
    return Inputs(tuple(inputs[n] for n in tokens), tuple((n, y.dtype) for n, y in numbers if y is not None), dtype,
                 (sizes["K"], sizes["V"]), (heads.get("H", value_heads), value_heads), (shape[0], shape[x.axes[0]]))


def _check_written(inputs: dict[str, Tensor | None], t: Tensors, x: Request) -> None:
    """ValueError where a tensor that the call writes shares memory with another that it reads or writes."""
    state = "initial_state" if x.in_place else "final_state"
    others = {n: y for n, y in (*inputs.items(), *t._asdict().items()) if y is not None}
    for name in ("out", state):
        for other, y in others.items():
            same = {name, other} == {"initial_state", "final_state"} and y is others.get(name)
            if name in others and other != name and not same and shared(others[name], y):
                _fail(name, f"memory of {other}", "memory of its own")


def _check_values(inputs: dict[str, Any], t: Tensors, x: Request) -> None:
    """Checks what shapes and dtypes do not show: factors below 0, tables of chunks, memory that the call writes."""
    if x.gate == "linear" and reads(inputs["g"]) and bool((inputs["g"] < 0).any()):
        _fail("g", f"{inputs['g'].min().item():g} with gate='linear'", "factors of 0 or more")
    check_chunks(t.chunk_indices, t.chunk_offsets, t.cu_seqlens, x.chunk_size)
    _check_written(inputs, t, x)


def call(algorithm: str, inputs: dict[str, Any], numbers: dict[str, Any], named: dict[str, Any], others: dict[str, Any],
         forms: str = "", called: Mapping[str, str] = MappingProxyType({}), recurrent: bool = False) -> tuple[Any, ...]:
    """`eager`, or under torch.compile an op, where it takes the call's arguments."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        from ..member_library import compiled, takes
        if takes({**named, **others}):
            return compiled(algorithm, inputs, numbers, {**named, **others}, forms, dict(called), recurrent)
    made: tuple[Any, ...] = eager(algorithm, inputs, numbers, named, others, forms, called, recurrent)
    return made


@torch.compiler.disable  # type: ignore[untyped-decorator]
def eager(algorithm: str, inputs: dict[str, Any], numbers: dict[str, Any], named: dict[str, Any], others: dict[str, Any],
          forms: str = "", called: Mapping[str, str] = MappingProxyType({}), recurrent: bool = False) -> tuple[Any, ...]:
    """o, the final state or None, and the checkpoints if the call has some.

    algorithm: the page. inputs: its inputs by name, then the tensors of `forms`. None leaves out what may be absent. forms: input
    forms, as a contract has them. numbers: those of the caller; None means the page's default. named: arguments of the op that
    are Tensors or Options, by name. others: all other keywords of the call. called: what callers call inputs and states.
    recurrent: whether a call of few tokens is a decoding step.
    """
    page = algorithms.find(algorithm)
    try:
        step = recurrent and is_step(shape_of(*next(iter(inputs.items()))), named.get("cu_seqlens"), others)
        return _called(page, inputs, numbers, _options(page, dict(named), others, step), forms, step)
    except ValueError as e:
        said = re.sub(r"^\w+(?=: got)|(?<=that of )\w+", lambda m: called.get(m[0], m[0]), str(e)) if called else str(e)
        if said == str(e):
            raise
        raise ValueError(said) from e


def _called(page: Algorithm, inputs: dict[str, Any], numbers: dict[str, Any], given: tuple[Tensors, Options], forms: str,
            step: bool) -> tuple[Any, ...]:
    """`call`, with tensors and options apart."""
    t, x = given
    order = sorted(page.inputs, key=lambda n: "C" not in page.inputs[n][1])  # modules take what heads have last
    inputs = {n: inputs[n] for n in (*order, *(n for n in inputs if n not in order))}

    def run(t: Tensors, x: Options) -> tuple[Any, ...]:
        return _run(page, inputs, numbers, t, replace(request_of(t, x, step), algorithm=page.name, forms=forms))
    return with_states(t, x, run)


def _run(page: Algorithm, inputs: dict[str, Any], numbers: dict[str, Any], t: Tensors, asked: Request) -> tuple[Any, ...]:
    """`call`, with options in one spelling."""
    absent = {n for n, y in inputs.items() if y is None and (n in page.defaults or n not in page.inputs)}
    checked = _checked(page, {n: y for n, y in inputs.items() if n not in absent}, t, asked.layout)
    inputs = {n: checked.get(n) for n in inputs}
    _check_values(inputs, t, asked)
    about = call_for(_about(page, inputs, t, asked), t, asked)
    raw = (t.A_log, t.dt_bias) if asked.gate == "raw" else ()
    buffers = tuple(t[n] for n in buffers_of(asked))
    given = ((*inputs.values(), *raw), (t.initial_state,), (t.out,), t.cu_seqlens,
             (*buffers, None) if asked.checkpoint_chunks else buffers)
    after = about.wanted, integers_of(t, asked), asked.checkpoint_chunks, asked.longest
    m = None
    while m is None:
        m = admitted(about, lambda m: m.HOST.prepare(*given, *after))
    host = m.HOST
    memory = host.run(given[0], host.numbers_of([numbers[n] for n in host.tables.scalars]), *given[1:], *after)
    results: tuple[Any, ...] = host.results(memory, about.wanted)
    return results
