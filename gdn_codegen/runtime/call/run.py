"""Runs one call of which nothing is kept: those of the torch ops, and those that store states at positions."""
from __future__ import annotations

from functools import cache

from torch import Tensor

from .aliasing import check_written, reach
from .arguments import IN_KERNELS, Tensors
from .given import given_to, in_page_order, integers_of, kept_in_order
from .launch import Numbers, chosen, numbers_for, serves
from .positions import Pieces, buffer, pool_of, slots_by_chunk, storing, writes_slots
from .request import Inputs, Request, call_for, inputs_of

Results = tuple[Tensor, Tensor | None, Tensor | None]


def run(about: Inputs, t: Tensors, x: Request, numbers: Numbers, checkpoints: Tensor | None = None) -> Results:
    """o, the final state or None, state checkpoints or None."""
    if t.checkpoint_positions is not None and t.checkpoint_positions.numel() and about.inputs[0].numel():
        at_once = writes_slots(about.inputs[0].device, x) or (x.aligned_positions and t.intermediate_states_buffer is not None)
        return (_run_aligned if at_once else _run_with_pieces)(about, t, x, numbers)
    if t.checkpoint_positions is not None:
        t = t._replace(checkpoint_positions=None, checkpoint_slots=None, intermediate_states_buffer=None)
    call = call_for(about, t, x)
    host = serves(about, t, call, checkpoints).HOST
    given, *others = given_to(about, t, x, checkpoints)
    memory = host.run(given, numbers(host), *others, call.wanted, integers_of(t, x), x.checkpoint_chunks,
                      x.longest)
    o, final, *states = host.results(memory, call.wanted)
    if host.tables.saved:
        states = [kept_in_order(in_page_order(*host.tables.saved, *states))]
    return o, final, states[0] if states else None


def run_checked(t: Tensors, x: Request, scale: float | None, checkpoints: Tensor | None = None) -> Results:
    """The same for Gated DeltaNet, after a check of what the call writes."""
    check_written(t, x.in_place, tuple(map(reach, t[:IN_KERNELS])))
    return run(inputs_of(t, x), t, x, lambda host: numbers_for(host, scale), checkpoints)


def _run_aligned(about: Inputs, t: Tensors, x: Request, numbers: Numbers) -> Results:
    """`run`, and states after chunks to slots of the pool."""
    call, pool, slots = call_for(about, t, x), pool_of(t, x), cache(lambda chunk: slots_by_chunk(about, t, chunk))
    host = serves(about, t, call, pool, lambda chunk: (slots(chunk),)).HOST
    given, *others = given_to(about, t, x, pool)
    memory = host.run(given, numbers(host), *others, call.wanted,
                      (*integers_of(t, x), slots(host.tables.chunk)), longest=x.longest)
    o, final = host.results(memory, call.wanted)[:2]
    return o, final, None


def _run_with_pieces(about: Inputs, t: Tensors, x: Request, numbers: Numbers) -> Results:
    """`run`, and states at positions to slots of the pool."""
    call, states, pieces = call_for(about, t, x), buffer(t, pool_of(t, x)), cache(lambda chunk: Pieces.of(about, t, chunk))
    assert t.checkpoint_positions is not None
    rows = states[:t.checkpoint_positions.numel()]
    host = serves(about, t, call, rows, lambda chunk: (pieces(chunk).rows,)).HOST
    those, values = pieces(host.tables.chunk), numbers(host)
    given, *others = given_to(about, t, x, rows)
    store = storing(about, t, x, values, chosen(call), those, states)
    memory = host.run(given, values, *others, call.wanted, (*integers_of(t, x), those.rows), longest=x.longest)
    store()
    o, final = host.results(memory, call.wanted)
    return o, final, None
