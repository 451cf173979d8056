"""Runs targets against the token recurrence in float64.

The reference is the algorithm's own page, interpreted in float64 with a chunk of one token, which is the recurrence. The tests
compare pages with recurrences written by hand. This file applies the contract's forms to inputs itself, in float64, and does not
use the passes that let kernels apply them.
"""
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ..ir.core import Program
from ..ir.interpret import TORCH, Problem, interpret
from ..ir.types import Tensor
from ..runtime.build import Build, lowered
from ..runtime.load import function
from ..runtime.progress import under_way
from .cases import F64, Case, inputs, read

#: How many times what is expected must fit into a dtype's range, so that what is summed up to it fits.
ROOM = 64
#: RMSE over RMS that a comparison may reach.
TOLERANCE = {"float16": 5e-3, "bfloat16": 5e-3, "float32": 1e-5}


def accepted(b: Build, case: Case, output: str = "") -> float:
    """The RMSE over RMS that a comparison of this output may reach. Equal keys lose a digit more in an inverse, and a final state
    in 16 bits has no more digits than these."""
    final = any(t.name == output for t in b.page.trace().role("output") if t.index == "sequence")
    return max(TOLERANCE[d] for d in (b.dtype, b.contract.state_dtype if final else b.dtype)) * (2 if case.alike else 1)


def reference(b: Build, case: Case, x: dict[str, torch.Tensor], chunk: int = 1) -> dict[str, torch.Tensor]:
    """Outputs of the page in float64, packed like the inputs; with a chunk of one token, of the token recurrence."""
    page = b.page
    p = page.trace()
    p = replace(p, dims=(("C", chunk), *((d, n) for d, n in b.sizes.items() if d != "C")))
    x = read(b, x)
    numbers = {n: v if v is not None else 1.0 for n, v in page.scalar_defaults(b.sizes).items()}  # `run` passes 1, too
    given: dict[str, torch.Tensor | None] = {t.name: None if t.optional and not case.initial else x[t.name]
                                             for t in p.role("input")}
    return interpret(p, Problem(list(case.lengths), case.heads, case.value_heads), given, numbers)


#: A recurrence of one sequence and value head, in float64: inputs by name, [T, dims] each, then states and numbers by name ->
#: the outputs [T, dims] and the final states, in the page's order.
Recurrence = Callable[..., Sequence[torch.Tensor]]


def from_recurrence(b: Build, case: Case, x: dict[str, torch.Tensor], recurrence: Recurrence) -> dict[str, torch.Tensor]:
    """What a function of the user's own makes of the inputs, packed like `reference`'s.

    It is called once per sequence and value head with the page's parameters by name, in float64: inputs [T, dims], carried states
    [dims] (zeros where a case has none), numbers. It returns a tuple: the outputs [T, dims], then the final states [dims], in the
    page's order. ValueError where it returns other shapes.
    """
    page, p, read_x = b.page, b.page.trace(), read(b, x)
    numbers = {n: 1.0 if v is None else v for n, v in page.scalar_defaults(b.sizes).items()}
    outputs = [t for t in p.role("output") if t.index == "token"]
    finals = [t for t in p.role("output") if t.index == "sequence"]
    wanted = *outputs, *finals
    _check_callable(recurrence, (*page.inputs, *page.states, *numbers))
    out = {t.name: torch.zeros(sum(case.lengths), case.value_heads, *t.tile.shape(b.sizes)[1:], dtype=F64) for t in outputs}
    out |= {t.name: torch.zeros(len(case.lengths), case.value_heads, *t.tile.shape(b.sizes), dtype=F64) for t in finals}
    start = 0
    for n, length in enumerate(case.lengths):
        for head in range(case.value_heads):
            given: dict[str, Any] = {}
            for name, (heads, _) in page.inputs.items():
                own = head if heads == "HV" else head * case.heads // case.value_heads
                whole = read_x[name]
                given[name] = (whole[start:start + length, own] if "C" in page.inputs[name][1] else whole[own]).clone()
            for state, t in zip(page.states, [t for t in p.role("input") if t.optional], strict=True):
                given[state] = read_x[t.name][n, head] * case.initial
            results = recurrence(**given, **numbers)
            if not isinstance(results, (tuple, list)) or len(results) != len(wanted):
                got = len(results) if isinstance(results, (tuple, list)) else type(results).__name__
                raise ValueError(f"reference: got {got} as its results; accepted: a tuple of {len(wanted)}: "
                                 f"{', '.join(t.name for t in wanted)}")
            for t, r in zip(wanted, results, strict=True):
                at = out[t.name][start:start + length, head] if t.index == "token" else out[t.name][n, head]
                if tuple(r.shape) != tuple(at.shape):
                    raise ValueError(f"reference: got {tuple(r.shape)} for {t.name}; accepted: {tuple(at.shape)}")
                at.copy_(r)
        start += length
    return out


def _check_callable(recurrence: Any, names: Sequence[str]) -> None:
    """ValueError unless `recurrence` is a function that takes parameters of these names."""
    if not callable(recurrence):
        raise ValueError(f"reference: got {type(recurrence).__name__}; accepted: a function of {', '.join(names)}")
    try:
        inspect.signature(recurrence).bind(**dict.fromkeys(names))
    except TypeError as e:
        raise ValueError(f"reference: got a function that does not take the page's parameters by name ({e}); accepted: a "
                         f"function of {', '.join(names)}") from e


@cache
def check_page(b: Build) -> None:
    """Raises ValueError if the page is no recurrence over tokens: if an output of a token depends on later tokens, or if the page
    computes something else in chunks of 16 tokens than in chunks of one."""
    p, case = b.page.trace(), Case((16,), 1, 1)
    x = inputs(b, p, case)
    later = {n: y.clone() for n, y in x.items()}
    for t in p.role("input"):
        if t.index == "token":
            later[t.name][8:] = x[t.name][:8]
    before, after, by_token = reference(b, case, x, 16), reference(b, case, later, 16), reference(b, case, x)
    for t in p.role("output"):
        if t.index == "token" and rms_error(after[t.name][:8], before[t.name][:8]) > 1e-9:
            raise ValueError(f"algorithm: got {p.name}, whose {t.name} of a token depends on later tokens of its chunk; "
                             "accepted: a causal page (mask scores by lower or strictly_lower, the argument of exp by "
                             "lower(x, fill=-inf))")
    for t in p.role("output"):
        off = rms_error(before[t.name], by_token[t.name])
        if not math.isfinite(off):
            raise ValueError(f"algorithm: got {p.name}, whose {t.name} is not finite in float64 for inputs as verify draws them; "
                             "accepted: a page of finite results (look at divisions, logarithms and numbers such as inf)")
        if off > 1e-9:
            raise ValueError(f"algorithm: got {p.name}, whose {t.name} in a chunk of 16 tokens is off by {off:.1e} (RMSE over "
                             "RMS) from that in chunks of one token, both in float64; accepted: a page that computes the same in "
                             "chunks of any length (look at masks, cumsum, last, and the order of operands)")


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMSE(got - want) / RMS(want); NaN where `got` has one. A reference of all zeros counts absolutely."""
    if not want.numel():
        return 0.0
    scale = want.double().pow(2).mean().sqrt().item()
    return (got.double() - want.double()).pow(2).mean().sqrt().item() / (scale or 1.0)


def to_layout(t: Tensor, x: torch.Tensor, b: Build, case: Case) -> torch.Tensor:
    """A packed token tensor as the caller passes it. Numbers of heads are passed as they are."""
    if t.index == "head":
        return x
    rows = len(case.lengths) if case.batched else 1
    x = x.reshape(rows, -1, *x.shape[1:]) if x.numel() else x.reshape(rows, x.shape[0] // rows, *x.shape[1:])
    return x if b.layout == "bthd" else x.transpose(1, 2).contiguous()


def _states(b: Build, initial: dict[str, torch.Tensor], case: Case,
            device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """States as the build's contract has them; of a pool, the slots of sequences' final states."""
    c, n, width = b.contract, len(case.lengths), max(case.lengths) + 1
    slots = torch.arange(n, 0, -1, device=device) if c.pool else None
    by_token = torch.arange(n * width, 0, -1, device=device).view(n, width) if c.slots or c.accepted else None
    first = slots if by_token is None else by_token[:, -1] if c.accepted else by_token[:, 0]
    out = {}
    for name, x in initial.items():
        if not case.initial and not (c.pool or c.in_place):
            continue
        x = (x if case.initial else torch.zeros_like(x)).to(device)
        x = x.transpose(-1, -2).contiguous() if c.state_layout == "vk" else x.clone()
        if slots is not None:
            pool = torch.zeros((slots if by_token is None else by_token).numel() + 2, *x.shape[1:], dtype=x.dtype, device=device)
            pool[first] = x
            x = pool
        out[name] = x
    if c.slots and by_token is not None:
        slots = by_token[torch.arange(n, device=device), torch.tensor([max(0, length - 1) for length in case.lengths])]
        slots = torch.where(torch.tensor(case.lengths, device=device) > 0, slots, by_token[:, -1 if c.accepted else 0])
    out |= {"state_indices": slots if by_token is None else by_token} if slots is not None else {}
    return out | _by_token(b, initial, n, width, device), slots


def _by_token(b: Build, initial: dict[str, torch.Tensor], n: int, width: int, device: str) -> dict[str, torch.Tensor]:
    """What a contract of states by token asks for besides: sequences start from their last slot, and tokens form a chain."""
    c, p, out = b.contract, lowered(b), {}
    if c.accepted:
        out["num_accepted_tokens"] = torch.full((n,), width, device=device)
    if c.parents:
        out["retrieve_parent_token"] = torch.arange(-1, width - 1, device=device).expand(n, width)
    if c.positions:  # a row for each chunk, whole or not
        out["checkpoint_rows"] = torch.arange(n * width, device=device).view(n, width)
    for t in p.role("output") if c.rows or c.positions else ():
        if t.index == "checkpoint":
            heads, tile = next(iter(initial.values())).shape[1], p.shape(t)
            rows = (n, width) if c.rows else (n * width,)
            out[t.name] = torch.zeros(*rows, heads, *tile, device=device, dtype=TORCH[c.state_dtype])
    return out


def run(b: Build, case: Case, x: dict[str, torch.Tensor], device: str = "cpu") -> dict[str, torch.Tensor]:
    """Outputs of the built op, packed like the reference's."""
    p = b.page.trace()
    given = {t.name: to_layout(t, x[t.name], b, case).to(device) for t in p.role("input") if not t.optional}
    states, slots = _states(b, {t.name: x[t.name] for t in p.role("input") if t.optional}, case, device)
    states |= {n: x[n].to(device) for n in x if n not in {t.name for t in p.role("input")}}
    ends = [0]
    for n in case.lengths:
        ends.append(ends[-1] + n)
    cu = None if case.batched else torch.tensor(ends, dtype=torch.int32, device=device)
    unset = {n: 1.0 for n, v in b.page.scalar_defaults(b.sizes).items() if v is None}
    results = function(b)(**given, **states, **unset, output_final_state=True, cu_seqlens=cu)
    outs = p.role("output")
    got = {}
    for t, r in zip(sorted(outs, key=lambda t: t.index != "token"), results, strict=False):  # checkpoints are not compared
        if r is None:  # the build freezes states
            continue
        if t.index == "sequence":
            r = r[slots] if b.contract.in_place and slots is not None else r
            r = r.transpose(-1, -2) if b.contract.state_layout == "vk" else r
        if t.index == "token":
            r = r if b.layout == "bthd" else r.transpose(1, 2)
            r = r.reshape(sum(case.lengths), *r.shape[2:])
        got[t.name] = r.cpu()
    return got


def one_head_count(p: Program, case: Case) -> Case:
    """The case with as many value heads as heads if no input of the page says of more."""
    return replace(case, value_heads=case.heads) if all(t.heads == "H" for t in p.role("input") if t.index == "token") else case


def compare(b: Build, case: Case, device: str = "cpu", recurrence: Recurrence | None = None) -> dict[str, float]:
    """RMSE over RMS of each output. recurrence: compared with instead of the page in chunks of one token.

    Nothing where what is expected leaves the range of the build's dtype, as a recurrence that grows with every token may.
    """
    lowered(b)  # it refuses what the page cannot be built for, in words of its own
    p = b.page.trace()
    case = one_head_count(p, case)
    x = inputs(b, p, case)
    check_page(b)
    want = from_recurrence(b, case, x, recurrence) if recurrence else reference(b, case, x)
    if any(y.numel() and y.abs().max() > torch.finfo(TORCH[b.dtype]).max / ROOM for y in want.values()):
        return {}
    got = run(b, case, x, device)
    return {n: rms_error(got[n], want[n]) for n in want if n in got}


#: The head of the lines that `verify` prints.
HEAD = f"{'target':10} {'module':34} {'lengths':16} {'gate':>6}  RMSE/RMS of outputs"


def lines(builds: Sequence[Build], cases: Sequence[Case], device: str = "cpu", recurrence: Recurrence | None = None,
          backward: bool = False) -> Iterator[tuple[str, bool]]:
    """The lines that `verify` prints, each as its case is done, and whether all comparisons hold. backward: the builds are those
    of gradients."""
    from . import verify_backward
    run_case, limit = (verify_backward.compare, verify_backward.accepted) if backward else (compare, accepted)
    for b in builds:
        for case in cases:
            lengths = "+".join(map(str, case.lengths)) if not case.batched else f"{len(case.lengths)}x{case.lengths[0]}"
            with under_way(f"{b.target} {b.name}, lengths {lengths}"):
                errors = run_case(b, case, device, recurrence)
            ok = all(e <= limit(b, case, n) for n, e in errors.items())
            shown = "  ".join(f"{n} {e:.1e}" for n, e in errors.items()) or f"the recurrence leaves the range of {b.dtype}"
            yield f"{b.target:10} {b.name:34} {lengths:16} {case.gates:>6}  {shown}  {'ok' if ok else 'FAILED'}", ok
