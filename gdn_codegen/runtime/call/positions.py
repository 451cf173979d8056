"""Calls that store states at token positions, to slots of a pool: `checkpoint_positions` and `checkpoint_slots`.

The walk of the call stores the state before the chunk in which a position lies, to a row of a buffer. A table gives the row for
each chunk. Then one more call computes the state at each position. It has a sequence for each position, from the chunk's first
token to the position, which starts from that row. It stores the state after this sequence's only chunk, to the slot. Its tokens
are copied from the inputs.

All of this is computed on the device, so nothing waits for it.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...host.arguments import _check_device, _check_integers
from ...host.tensors import _equal_rows, _fail
from ..admit import admit
from ..build import Build
from ..load import module
from .arguments import RAW_INPUTS, Tensors
from .compiling import compiling
from .normalise import check_plain, reads
from .request import Request, call_of

NAMES = "checkpoint_positions", "checkpoint_slots"


# --- arguments -------------------------------------------------------------------------------------------------------
def pool_of(t: Tensors, x: Request) -> Tensor:
    """The pool to which the call writes final states. ValueError if there is none."""
    pool = t.initial_state if x.in_place else t.final_state
    if t.state_indices is None or pool is None:
        _fail("checkpoint_slots", "slots without a pool that the call writes", "state_indices as well, and a pool that is "
              "overwritten in place or final_state")
    return pool


def check(t: Tensors, x: Request) -> None:
    """ValueError unless the positions and slots are whole numbers [N, P], and positions those of tokens of the call, where values
    may be read."""
    given = t.checkpoint_positions, t.checkpoint_slots
    for name, y, other in zip(NAMES, given, NAMES[::-1], strict=True):
        if y is None:
            _fail(name, None, f"one integer for each of {other}")
        check_plain(name, y)
        _check_integers(name, y)
        _check_device(name, y, t.q.device)
    positions, slots = given
    assert positions is not None and slots is not None
    if x.checkpoint_chunks:
        _fail("checkpoint_chunks", f"{x.checkpoint_chunks} with checkpoint_positions", "one of them")
    pool = pool_of(t, x)
    assert t.state_indices is not None
    for name, y in zip(NAMES, given, strict=True):
        if y is not None and (y.ndim != 2 or y.shape != positions.shape or len(y) != len(t.state_indices)):
            _fail(name, f"shape {tuple(y.shape)}", f"[N, P] with N = {len(t.state_indices)}, that of state_indices, and one P")
    if reads(positions, slots, t.state_indices, t.cu_seqlens):
        _check_values(t, x, positions, slots, len(pool))


def _check_values(t: Tensors, x: Request, positions: Tensor, slots: Tensor, count: int) -> None:
    """Check that positions are inside of their sequences, and that each slot is written once and belongs to no sequence."""
    assert t.state_indices is not None
    used = {slot: "state_indices" for slot in t.state_indices.tolist() if slot >= 0}
    lengths = _ends(t, x).diff().tolist()
    for n, row in enumerate(slots.tolist()):
        for slot, p in zip(row, positions[n].tolist(), strict=True):
            if not -1 <= slot < count:
                _fail("checkpoint_slots", f"slot {slot}", f"slots from 0 to {count - 1}, or -1 to write nothing")
            if slot in used:
                _fail("checkpoint_slots", f"slot {slot} for sequence {n}, which {used[slot]} has",
                      "slots that the call writes once")
            if slot >= 0:
                used[slot] = f"sequence {n}"
            if slot >= 0 and not 1 <= p <= lengths[n]:
                _fail("checkpoint_positions", f"{p} for sequence {n}",
                      f"1 to {lengths[n]}, its number of tokens, where the slot is not -1")


def _ends(t: Tensors, x: Request) -> Tensor:
    """cu_seqlens in 64 bits, also of rows of equal length."""
    tokens = t.q.shape[x.axes[0]]
    ends = _equal_rows(t.q.shape[0], tokens, t.q.device) if t.cu_seqlens is None else t.cu_seqlens
    return ends.long()


# --- what runs -------------------------------------------------------------------------------------------------------
@dataclass
class Pieces:
    """The sequences from a chunk's first token to a position, and the rows of the buffer from which they start.

    rows: [N, W], by sequence and chunk, the row to which the call stores the state after the chunk, -1 for none. ends, starts,
    slots: cu_seqlens of the pieces, which are a chunk apart, the rows from which they start, and the slots to which they go.
    Between two pieces is a sequence that is skipped. batch, tokens: of the copied tokens, the batch rows and places in these.
    """

    rows: Tensor
    ends: Tensor
    starts: Tensor
    slots: Tensor
    batch: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, t: Tensors, x: Request, chunk: int) -> Pieces:
        """The pieces of a call with so many tokens in a chunk. Piece i has row i, and sequence n the row N P + n for its initial
        state."""
        positions, slots, state = t.checkpoint_positions, t.checkpoint_slots, t.state_indices
        assert positions is not None and slots is not None and state is not None
        ends, each, device = _ends(t, x), t.q.shape[x.axes[0]], t.q.device
        n, piece = torch.arange(len(positions), device=device)[:, None], torch.arange(positions.numel(), device=device)
        p, width = positions.long(), each // chunk + 1
        there = (slots >= 0) & (p > 0) & (p <= ends.diff()[:, None]) & (state >= 0)[:, None]
        before = torch.where(there, (p - 1) // chunk, 0)  # chunks before the one in which the position lies
        last = len(positions) * width  # for pieces of a first chunk
        after = torch.where(before > 0, n * width + before - 1, last)
        rows = torch.full((last + 1,), -1, dtype=torch.int32, device=device).scatter_reduce_(
            0, after.flatten(), piece.int(), "amax")
        starts = torch.where(there, torch.where(before > 0, rows[after], len(piece) + n), -1)
        length = torch.where(there, p - before * chunk, 0).flatten()
        bounds = torch.stack([piece * chunk + length, (piece + 1) * chunk], 1).flatten()
        skipped = torch.full_like(piece, -1)
        at = (ends[:-1, None] + before * chunk).flatten()[:, None] + torch.arange(chunk, device=device)
        at = at.clamp_max(t.q.shape[0] * each - 1).flatten()
        return cls(rows[:-1].view(-1, width), torch.cat([bounds.new_zeros(1), bounds]).int(),
                   torch.stack([starts.flatten(), skipped], 1).flatten().int(),
                   torch.stack([slots.flatten().long(), skipped], 1).view(-1, 1).int(), at // each, at % each)


def buffer(t: Tensors, pool: Tensor) -> Tensor:
    """A row for each piece, and after these the initial state of each sequence, which the call may overwrite."""
    assert t.checkpoint_positions is not None and t.state_indices is not None and t.initial_state is not None
    count = t.checkpoint_positions.numel()
    states = pool.new_empty((count + len(t.state_indices), *pool.shape[1:]))
    if len(t.initial_state):
        torch.index_select(t.initial_state, 0, t.state_indices.clamp_min(0), out=states[count:])
    return states


def store(t: Tensors, x: Request, numbers: tuple[float, ...], b: Build, pieces: Pieces, states: Tensor) -> None:
    """Compute the states at the positions, and store them to their slots. b: the build of the call, whose schedule without parts
    computes them."""
    at = (pieces.batch, pieces.tokens) if x.layout == "bthd" else (pieces.batch, slice(None), pieces.tokens)
    inputs = tuple(y[at][None] for y in (t.q, t.k, t.v, t.g, t.beta))
    asked = replace(x, layout="bthd", in_place=False, output_final_state=False)
    pool = pool_of(t, x)
    t = t._replace(**dict(zip(Tensors._fields, inputs, strict=False)), cu_seqlens=pieces.ends, initial_state=states, out=None,
                   state_indices=pieces.starts, final_state=None)
    call = call_of(t, asked)
    whole = replace(b.plan, partition=None, part_chunks=0, longest_first=False) if b.plan.partition else b.schedule
    b = replace(b, layout="bthd", schedule=whole, contract=call.contract.unpromised())
    m, given = module(b), t[:RAW_INPUTS] if x.gate == "raw" else inputs
    about: Any = (given, (states,), (None,), pieces.ends, (None, pool), False, (pieces.starts, pieces.slots))
    with compiling(m, call.device.type):
        admit(b, m, call, lambda: m.HOST.prepare(*about))
        m.HOST.run(given, numbers, *about[1:])
