"""The call of a plan: what the host does for each call, from the caller's tensors to the launches.

Below the line the file is copied into generated modules word for word. Each call waits for this code, so speed matters here.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .arguments import _check_accepted, _check_ends, _check_parents, _check_slots, _check_slots_by_token
from .plan import Plan
from .tables import Tables
from .tensors import _fail, _filled, _flat, _full, _in_order, _is_elsewhere, _new, _picker, _plain


# --- copied from here on ---
def _aligned(given: Sequence[Any], outs: Sequence[Any]) -> list[bool]:
    """For each tensor: True if its address is a multiple of 16 bytes. None counts as aligned."""
    return [x is None or x.data_ptr() % 16 == 0 for x in (*given, *outs)]


def _plain_ones(tensors: Iterable[tuple[Any, bool]], dtype: torch.dtype) -> list[Any]:
    """Each tensor itself if kernels accept it, else a contiguous copy. tensors: (tensor, True if its strides fit)."""
    return [x if fits and x.data_ptr() % 16 == 0 else _plain(x, dtype) for x, fits in tensors]


def _in_pools(t: Tables, states: Sequence[Any], buffers: Sequence[Any], held: Sequence[Any]) -> list[Any]:
    """Pools as flat tensors: first those of initial states, then those of final states, from the caller or from this call."""
    if any(x is not None and x.data_ptr() == y.data_ptr() for x in buffers[:len(t.final)] for y in states):
        _fail(t.final[0][0], "the memory of an initial state",
              "another pool, or a build with state=pool/in_place, which overwrites initial states")
    return [_flat(row[0], x) for row, x in (*zip(t.initial, states, strict=True), *zip(t.final, held, strict=False))]


def _take_outs(memory: list[Any], first: int, outs: Sequence[Any], fits: Sequence[bool], aligned: int) -> list[tuple[int, Any]]:
    """Put the caller's outputs into `memory`, from index `first` on. Returns (index, caller's tensor) of the outputs for which
    kernels write a copy first."""
    copied = []
    for at, (x, fit) in enumerate(zip(outs, fits, strict=True), first):
        if x is not None:
            memory[at] = x if fit and x.data_ptr() % aligned == 0 else _plain(x, x.dtype)
            if memory[at] is not x:
                copied.append((at, x))
    return copied


def _give_back(memory: list[Any], wanted: Iterable[tuple[int, Any]]) -> None:
    """Copy results to the caller's tensors, and put these into `memory`. wanted: (index, caller's tensor)."""
    for at, x in wanted:
        if memory[at].data_ptr() != x.data_ptr():
            x.copy_(memory[at])
        memory[at] = x


def _touch(*tensors: Any) -> None:
    """Tell torch that the caller's tensors were overwritten: one that a gradient needs is then an error in its backward pass."""
    torch.autograd.graph.increment_version([x for x in tensors if x is not None])


def _fill(p: Plan, memory: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Fill the tensors that this call allocated: with NaN if tests ask for it, and outputs with zeros, for the rows that no
    sequence covers. A gradient's shares by chunk start as zeros, because callers add up all slots, also those without a chunk."""
    if p.host.poison:
        for x, buffer in itertools.zip_longest(memory[p.tables.place("final").start:], buffers):
            if buffer is None:
                x.fill_(float("nan") if x.is_floating_point() else -1)
    if p.clears and not p.tables.cleared:
        for x, out in zip(memory[p.host.outputs], outs, strict=True):
            if out is None:
                x.zero_()
    for name in p.tables.zeroed:
        memory[p.tables.tensors.index(name)].zero_()


def _looked_at(p: Plan, given: Sequence[Any], cu_seqlens: Any, buffers: Sequence[Any], indices: Any) -> Sequence[Any]:
    """The inputs, with defaults for absent ones. The values of cu_seqlens and of indices are checked if the plan says so."""
    if p.check_ends:
        _check_ends(cu_seqlens, p.tokens)
    if p.check_numbers:
        _check_numbers(p, cu_seqlens, buffers, indices)
    if p.lacking:
        given = list(given)
        for at, *about in p.lacking:
            given[at] = _filled(_full, *about)
    return given


def _check_numbers(p: Plan, cu_seqlens: Any, buffers: Sequence[Any], indices: Any) -> None:
    """Check the values of the tensors of integers. On a GPU this waits for the device."""
    t = p.tables
    found = {name: x.tolist() for name, x in zip(t.numbers, indices, strict=True) if x is not None}
    lengths = [p.tokens] * p.sequences if cu_seqlens is None else cu_seqlens.diff().tolist()
    slots, rows = found.get("state_indices", []), found.get("intermediate_state_indices", list(range(p.sequences)))
    kept = [[True] * p.tokens] * p.sequences
    if "state_indices" in t.by_token:
        accepted = found.get("num_accepted_tokens", [1] * p.sequences)
        _check_accepted(accepted, slots)
        first = [own[n - 1] for own, n in zip(slots, accepted, strict=True)]
        lengths = [0 if at < 0 else n for at, n in zip(first, lengths, strict=True)]  # a skipped sequence has no tokens
        _check_slots_by_token(slots, first, lengths, min(p.pool_slots), t.slots)
        kept = [[x >= 0 for x in own] for own in slots] if t.slots else kept
    elif t.pool:
        _check_slots(slots, "state_indices", min(p.pool_slots), t.in_place or any(x is not None for x in buffers[:len(t.final)]))
        lengths = [0 if at < 0 else n for at, n in zip(slots, lengths, strict=True)]
    if t.rows:
        if max(lengths, default=0) > p.row_tokens:
            _fail(t.checkpoints[0][0], f"rows of {p.row_tokens} states", f"{max(lengths)} or more, as a sequence has tokens")
        _check_slots(rows, "intermediate_state_indices", p.stored_rows, True)
        kept = [[row >= 0] * p.tokens for row in rows]
    for n, row in enumerate(found.get("checkpoint_rows", ())):
        if any(not -1 <= i < p.stored_rows for i in row):
            _fail("checkpoint_rows", f"{row} for sequence {n}", f"rows from 0 to {p.stored_rows - 1}, or -1 to store no state")
    if "retrieve_parent_token" in found:
        _check_parents(found["retrieve_parent_token"], lengths, kept)


def _integers(p: Plan, indices: Any) -> list[Any]:
    """The tensors of integers that kernels read. Final states in other memory than initial ones have the same slots."""
    found = {name: x if fits and x.data_ptr() % 16 == 0 else _plain(x, torch.int32)
             for name, x, fits in zip(p.tables.numbers, indices, p.as_integers, strict=True) if x is not None}
    for name in p.in_order:
        found[name] = _in_order(p.sequences, p.device)
        if found[name] is None:  # a graph that is captured before they exist has its own
            found[name] = torch.arange(p.sequences, dtype=torch.int32, device=p.device)
    return [found.get(name, found.get("state_indices")) for name in p.tables.indices]


def _last(p: Plan, indices: Any) -> list[Any]:
    """The last tensors of a call: those of integers, and those that only an earlier build has."""
    made = [x.fill_(math.nan) if p.host.poison and x.is_floating_point() else x for x in map(_new, p.more)]
    return [*_integers(p, indices), *made] if p.tables.indices else made


def caller(p: Plan, given: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> Callable[..., list[Any]]:
    """A function that runs the plan: (given, numbers, states, outs, cu_seqlens, buffers, indices) -> the call's tensors, in the
    order of `Tables.tensors`. The arguments here are those that the plan was made for."""
    host, t, device, batch, tokens, state = p.host, p.tables, p.device, p.batch, p.tokens, p.state
    equal_rows = p.equal_rows
    pool, expected, state_kin, as_they_are, kin = t.pool, p.expected, p.state_kin, p.as_they_are, p.kin
    unread, fits, ends_are_plain = p.unread, p.fits, p.ends_as_they_are
    picked = [(launch, _picker(tensors), numbers) for launch, tensors, numbers in p.launches]
    unwanted = [x for x, _ in state_kin] if all(x is not None for x, _ in state_kin) else None
    any_out, lends = any(x is not None for x in outs), any(x is not None for x in buffers)
    moved, fills = lends or pool or t.in_place, p.clears and not t.cleared or host.poison or bool(t.zeroed)
    touches = any_out or lends or t.in_place
    special = p.check_ends or p.check_numbers or bool(p.lacking)
    lies = _aligned(given, outs) if t.strided else None
    rows = t.checkpoints if t.rows or t.positions else ()
    first_out, first_final = t.place("outputs").start, host.final.start

    def call(given: Any, numbers: Any, states: Any, outs: Any, cu_seqlens: Any, buffers: Any, indices: Any = ()) -> list[Any]:
        """Launch the plan's kernels on these arguments."""
        if _is_elsewhere(device):
            with torch.cuda.device(device):
                return call(given, numbers, states, outs, cu_seqlens, buffers, indices)
        if lies is not None and _aligned(given, outs) != lies:
            return host.run(given, numbers, states, outs, cu_seqlens, buffers, p.wanted, indices,  # type: ignore[no-any-return]
                            p.every, p.longest)
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
        if rows:
            memory[-len(rows):] = [_flat(name, x) for (name, _), x in zip(rows, held[-len(rows):])]
        memory += map(_new, kin)
        memory += unread
        if fills:
            _fill(p, memory, outs, buffers)
        copied = _take_outs(memory, first_out, outs, fits, 1 if t.strided else 16) if any_out else ()
        if cu_seqlens is None:
            ends = _filled(equal_rows, batch, tokens, device)
        else:
            ends = cu_seqlens if ends_are_plain and cu_seqlens.data_ptr() % 16 == 0 else _plain(cu_seqlens, torch.int32)
        if t.indices or p.more:
            memory += _last(p, indices)
        for launch, tensors, used in picked:
            launch(tensors(memory), ends, [numbers[i] for i in used] if used else [])
        if copied:
            _give_back(memory, copied)
        if moved:
            _give_back(memory, enumerate((*states, *held) if t.in_place else held, first_final))
        if touches:
            _touch(*outs, *buffers, *(states if t.in_place else ()))
        return memory

    return call
