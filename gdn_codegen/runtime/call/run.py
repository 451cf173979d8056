"""Runs one call of which nothing is kept: those of the torch ops, and those that store states at positions."""
from __future__ import annotations

from functools import cache

from torch import Tensor

from .aliasing import check_written, reach
from .arguments import IN_KERNELS, Tensors
from .given import given_to, integers_of
from .launch import chosen, numbers_for, serves
from .positions import Pieces, buffer, pool_of, slots_by_chunk, store, writes_slots
from .request import Request, call_of

Results = tuple[Tensor, Tensor | None, Tensor | None]


def run(t: Tensors, x: Request, scale: float | None, checkpoints: Tensor | None = None) -> Results:
    """o, the final state or None, state checkpoints or None."""
    if t.checkpoint_positions is not None and t.checkpoint_positions.numel() and t.q.numel():
        return _run_aligned(t, x, scale) if writes_slots(t, x) else _run_with_pieces(t, x, scale)
    t = t._replace(checkpoint_positions=None, checkpoint_slots=None)
    call = call_of(t, x)
    host = serves(t, call, checkpoints).HOST
    given, *others = given_to(t, x, checkpoints)
    memory = host.run(given, numbers_for(host, scale), *others, call.wanted, integers_of(t, x), x.checkpoint_chunks,
                      x.longest)
    o, final, *states = host.results(memory, call.wanted)
    return o, final, states[0] if states else None


def run_checked(t: Tensors, x: Request, scale: float | None, checkpoints: Tensor | None = None) -> Results:
    """The same, after a check of what the call writes."""
    check_written(t, x.in_place, tuple(map(reach, t[:IN_KERNELS])))
    return run(t, x, scale, checkpoints)


def _run_aligned(t: Tensors, x: Request, scale: float | None) -> Results:
    """`run`, and states after chunks to slots of the pool."""
    call, pool, slots = call_of(t, x), pool_of(t, x), cache(lambda chunk: slots_by_chunk(t, x, chunk))
    host = serves(t, call, pool, lambda chunk: (slots(chunk),)).HOST
    given, *others = given_to(t, x, pool)
    memory = host.run(given, numbers_for(host, scale), *others, call.wanted, (*integers_of(t, x), slots(host.tables.chunk)),
                      longest=x.longest)
    o, final = host.results(memory, call.wanted)[:2]
    return o, final, None


def _run_with_pieces(t: Tensors, x: Request, scale: float | None) -> Results:
    """`run`, and states at positions to slots of the pool."""
    call, states, pieces = call_of(t, x), buffer(t, pool_of(t, x)), cache(lambda chunk: Pieces.of(t, x, chunk))
    assert t.checkpoint_positions is not None
    rows = states[:t.checkpoint_positions.numel()]
    host = serves(t, call, rows, lambda chunk: (pieces(chunk).rows,)).HOST
    those, numbers = pieces(host.tables.chunk), numbers_for(host, scale)
    given, *others = given_to(t, x, rows)
    memory = host.run(given, numbers, *others, call.wanted, (*integers_of(t, x), those.rows), longest=x.longest)
    store(t, x, numbers, chosen(call), those, states)
    o, final = host.results(memory, call.wanted)
    return o, final, None
