"""A plan's call: the host's work between the caller's tensors and the kernels, done anew for each call.

Below the line the file is copied into generated modules word for word. Every microsecond here is one that each call waits.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .plan import Plan
from .tables import Tables
from .tensors import (
    _check_ends,
    _check_slots,
    _equal_rows,
    _fail,
    _filled,
    _flat,
    _full,
    _is_elsewhere,
    _new,
    _picker,
    _plain,
)


# --- copied from here on ---
def _aligned(given: Sequence[Any], outs: Sequence[Any]) -> list[bool]:
    """Which of these begin at a multiple of 16 bytes."""
    return [x is None or x.data_ptr() % 16 == 0 for x in (*given, *outs)]


def _plain_ones(tensors: Iterable[tuple[Any, bool]], dtype: torch.dtype) -> list[Any]:
    """Of each, the tensor itself where kernels take it, or a copy that they take. tensors: (tensor, whether its strides fit)."""
    return [x if fits and x.data_ptr() % 16 == 0 else _plain(x, dtype) for x, fits in tensors]


def _in_pools(t: Tables, states: Sequence[Any], buffers: Sequence[Any], held: Sequence[Any]) -> list[Any]:
    """Pools as kernels take them: of initial states, then of final ones, which the caller gave or the call made."""
    if any(x is not None and x.data_ptr() == y.data_ptr() for x in buffers[:len(t.final)] for y in states):
        _fail(t.final[0][0], "the memory of an initial state",
              "another pool; a build with state=pool/in_place writes where it reads")
    return [_flat(row[0], x) for row, x in (*zip(t.initial, states, strict=True), *zip(t.final, held, strict=False))]


def _take_outs(memory: list[Any], first: int, outs: Sequence[Any], fits: Sequence[bool], aligned: int) -> list[tuple[int, Any]]:
    """Put callers' memory for outputs among the call's tensors, from place `first` on; those that are written elsewhere first,
    and their places."""
    copied = []
    for at, (x, fit) in enumerate(zip(outs, fits, strict=True), first):
        if x is not None:
            memory[at] = x if fit and x.data_ptr() % aligned == 0 else _plain(x, x.dtype)
            if memory[at] is not x:
                copied.append((at, x))
    return copied


def _give_back(memory: list[Any], wanted: Iterable[tuple[int, Any]]) -> None:
    """Put callers' tensors in place of the call's, with what kernels wrote. wanted: (place, tensor)."""
    for at, x in wanted:
        if memory[at].data_ptr() != x.data_ptr():
            x.copy_(memory[at])
        memory[at] = x


def _fill(p: Plan, memory: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> None:
    """What the call made, before kernels write to it: NaN where tests want it, and zeros in rows that no sequence covers."""
    if p.host.poison:
        for x, buffer in itertools.zip_longest(memory[p.tables.place("final").start:], buffers):
            if buffer is None:
                x.fill_(float("nan"))
    if p.clears and not p.tables.cleared:
        for x, out in zip(memory[p.host.outputs], outs, strict=True):
            if out is None:
                x.zero_()


def _looked_at(p: Plan, given: Sequence[Any], cu_seqlens: Any, buffers: Sequence[Any], indices: Any) -> Sequence[Any]:
    """Check values, where that is wanted; the inputs, with what stands for absent ones."""
    if p.check_ends:
        _check_ends(cu_seqlens, p.tokens)
    if p.check_slots:
        written = p.tables.in_place or any(x is not None for x in buffers[:len(p.tables.final)])
        _check_slots(indices, min(p.pool_slots), written)
    if p.lacking:
        given = list(given)
        for at, *about in p.lacking:
            given[at] = _filled(_full, *about)
    return given


def _slots_of(p: Plan, indices: Any, buffers: Sequence[Any]) -> list[Any]:
    """The slots of initial states and, where they are not the same memory, of final ones. A final state that is no pool has a
    tile a sequence."""
    slots = indices if p.indices_as_they_are and indices.data_ptr() % 16 == 0 else _plain(indices, torch.int32)
    if p.tables.in_place:
        return [slots]
    return [slots, _filled(_equal_rows, p.sequences, 1, p.device)[:-1] if buffers[0] is None else slots]


def caller(p: Plan, given: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> Callable[..., list[Any]]:
    """The call of a plan, which these arguments are of: (given, numbers, states, outs, cu_seqlens, buffers, indices) -> the
    call's tensors, as Tables.tensors names them."""
    host, t, device, batch, tokens, state = p.host, p.tables, p.device, p.batch, p.tokens, p.state
    pool, expected, state_kin, as_they_are, kin = t.pool, p.expected, p.state_kin, p.as_they_are, p.kin
    unread, fits, ends_are_plain = p.unread, p.fits, p.ends_as_they_are
    picked = [(launch, _picker(tensors), numbers) for launch, tensors, numbers in p.launches]
    unwanted = [x for x, _ in state_kin] if all(x is not None for x, _ in state_kin) else None
    any_out, lends = any(x is not None for x in outs), any(x is not None for x in buffers)
    moved, zeroes = lends or pool or t.in_place, p.clears and not t.cleared
    special = p.check_ends or p.check_slots or bool(p.lacking)
    lies = _aligned(given, outs) if t.strided else None
    first_out, first_final = t.place("outputs").start, host.final.start

    def call(given: Any, numbers: Any, states: Any, outs: Any, cu_seqlens: Any, buffers: Any, indices: Any = None) -> list[Any]:
        """Launch the plan's kernels on these arguments."""
        if _is_elsewhere(device):
            with torch.cuda.device(device):
                return call(given, numbers, states, outs, cu_seqlens, buffers, indices)
        if lies is not None and _aligned(given, outs) != lies:
            return host.run(given, numbers, states, outs, cu_seqlens, buffers, p.wanted, indices, p.every)  # type: ignore[no-any-return]
        if special:
            given = _looked_at(p, given, cu_seqlens, buffers, indices)
        memory = [absent if x is None else x if plain and x.data_ptr() % aligned == 0 else _plain(x, dtype)
                  for x, (absent, plain, aligned, dtype) in zip(given if pool else (*given, *states), expected)]
        held = unwanted or [x if x is not None else _new(like) if absent is None else absent
                            for x, (absent, like) in zip(buffers, state_kin)]
        if pool:
            memory += _in_pools(t, states, buffers, held)
            memory += _plain_ones(list(zip(held, as_they_are))[len(t.final):], state)
        else:
            memory += _plain_ones(zip(held, as_they_are), state) if lends else held
        memory += map(_new, kin)
        memory += unread
        if zeroes or host.poison:
            _fill(p, memory, outs, buffers)
        copied = _take_outs(memory, first_out, outs, fits, 1 if t.strided else 16) if any_out else ()
        if cu_seqlens is None:
            ends = _filled(_equal_rows, batch, tokens, device)
        else:
            ends = cu_seqlens if ends_are_plain and cu_seqlens.data_ptr() % 16 == 0 else _plain(cu_seqlens, torch.int32)
        if pool:
            memory += _slots_of(p, indices, buffers)
        for launch, tensors, used in picked:
            launch(tensors(memory), ends, [numbers[i] for i in used] if used else [])
        if copied:
            _give_back(memory, copied)
        if moved:
            _give_back(memory, enumerate((*states, *held) if t.in_place else held, first_final))
        return memory

    return call
