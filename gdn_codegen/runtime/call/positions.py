"""Calls that store states at token positions, to slots of a pool: `checkpoint_positions` and `checkpoint_slots`. The pool is that
of final states, or memory of its own, `checkpoint_states`.

The walk of the call stores states after chunks. A table gives a row of a buffer for each sequence and chunk.

With `aligned_positions` each position is the end of a chunk. On a GPU, and with memory of its own, the buffer is the pool, and
the rows are the slots.

Else the walk stores the state before the chunk in which a position lies, to a buffer. Then one more call computes the state at
each position. It has a sequence for each position, from the chunk's first token to the position, which starts from that row. It
stores the state after this sequence's only chunk, to the slot. Its tokens are copied from the inputs.

All of this is computed on the device, so nothing waits for it. Tensors that depend on shapes alone are kept.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...host.arguments import _check_device, _check_integers
from ...host.tensors import _fail, _filled
from ...schedule.contract import Contract
from ..admit import admit
from ..build import Build
from ..load import module
from .arguments import Tensors
from .compiling import compiling
from .normalise import check_plain, reads
from .request import DEFAULT_CHUNK, Inputs, Request, call_for

NAMES = "checkpoint_positions", "checkpoint_slots"


# --- arguments -------------------------------------------------------------------------------------------------------
def pool_of(t: Tensors, x: Request) -> Tensor:
    """The pool to which the call writes states at positions: `checkpoint_states`, or that of final states. ValueError if there is
    none."""
    if t.intermediate_states_buffer is not None:
        return t.intermediate_states_buffer
    pool = t.initial_state if x.in_place else t.final_state
    if t.state_indices is None or pool is None:
        _fail("checkpoint_slots", "slots without a pool that the call writes", "state_indices as well, and a pool that is "
              "overwritten in place or final_state; or checkpoint_states")
    return pool


def check(about: Inputs, t: Tensors, x: Request) -> None:
    """ValueError unless the positions and slots are whole numbers [N, P], and positions those of tokens of the call, where values
    may be read."""
    given = t.checkpoint_positions, t.checkpoint_slots
    for name, y, other in zip(NAMES, given, NAMES[::-1], strict=True):
        if y is None:
            _fail(name, None, f"one integer for each of {other}")
        check_plain(name, y)
        _check_integers(name, y)
        _check_device(name, y, about.inputs[0].device)
    positions, slots = given
    assert positions is not None and slots is not None
    if x.checkpoint_chunks:
        _fail("checkpoint_chunks", f"{x.checkpoint_chunks} with checkpoint_positions", "one of them")
    pool, count = pool_of(t, x), sequences(about, t)
    tile = about.head_dims[::-1] if x.state_v_first else about.head_dims
    if pool is t.intermediate_states_buffer and pool.shape[1:] != (about.heads[1], *tile):
        _fail("checkpoint_states", f"shape {tuple(pool.shape)}", f"[slots, {about.heads[1]}, {tile[0]}, {tile[1]}]")
    for name, y in zip(NAMES, given, strict=True):
        if y is not None and (y.ndim != 2 or y.shape != positions.shape or len(y) != count):
            _fail(name, f"shape {tuple(y.shape)}", f"[N, P] with N = {count}, that of state_indices, and one P")
    if reads(positions, slots, t.state_indices, t.cu_seqlens):
        _check_values(about, t, x, positions, slots, len(pool))


def sequences(about: Inputs, t: Tensors) -> int:
    """How many sequences a call has."""
    if t.state_indices is not None:
        return len(t.state_indices)
    return about.rows[0] if t.cu_seqlens is None else max(t.cu_seqlens.numel() - 1, 0)


def _check_values(about: Inputs, t: Tensors, x: Request, positions: Tensor, slots: Tensor, count: int) -> None:
    """Check that positions are inside of their sequences, and that each slot is written once and belongs to no sequence."""
    shared = t.state_indices is not None and t.intermediate_states_buffer is None
    used = {slot: "state_indices" for slot in t.state_indices.tolist() if slot >= 0} if shared else {}  # type: ignore[union-attr]
    lengths = [about.rows[1]] * len(slots) if t.cu_seqlens is None else t.cu_seqlens.diff().tolist()
    if x.aligned_positions:
        _check_aligned(positions, slots, x.chunk_size or DEFAULT_CHUNK)
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


def _check_aligned(positions: Tensor, slots: Tensor, chunk: int) -> None:
    """Check what `aligned_positions` promises: positions with a slot are multiples of the chunk, each once for a sequence."""
    for n, (row, at) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        here = [p for p, slot in zip(at, row, strict=True) if slot >= 0]
        for i, p in enumerate(here):
            if p % chunk or p in here[:i]:
                _fail("checkpoint_positions", f"{p}{'' if p % chunk else ' twice'} for sequence {n}, with aligned_positions=True",
                      f"multiples of {chunk}, each once")


# --- what runs -------------------------------------------------------------------------------------------------------
def _numbers(first: int, stop: int, step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(first, stop, step, dtype=dtype, device=device)


def _tokens_left(about: Inputs, t: Tensors, tokens: Tensor) -> Tensor:
    """How many tokens each sequence has after so many of its tokens."""
    return (about.rows[1] if t.cu_seqlens is None else t.cu_seqlens.diff()[:, None]) - tokens


def _by_chunk(about: Inputs, chunk: int, before: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The row for each sequence and chunk [N, W], to which the state after the chunk is stored; -1 for none. And a table with the
    row that was taken where several states lie after one chunk, and their indices in it.

    before: [N, P], how many chunks lie before each state; those without any are left out. rows: int32, their rows.
    """
    count, width = len(before), about.rows[1] // chunk + 2
    spare = 4  # entries before the table, which keep its address a multiple of 16 bytes; states before all chunks go to the last
    first = _filled(_numbers, spare - 1, spare - 1 + count * width, width, torch.int64, rows.device)
    table = torch.full((spare + count * width,), -1, dtype=torch.int32, device=rows.device)
    at = (before + first[:, None]).flatten()
    table.scatter_reduce_(0, at, rows.flatten(), "amax")
    return table[spare:].view(count, width), table, at


def writes_slots(device: torch.device, x: Request) -> bool:
    """Whether the kernels of the call write the states to slots of the pool of final states themselves. On a CPU they may be
    given copies, one of the pool as initial states and one as memory for these, and both would be copied back."""
    return x.aligned_positions and device.type == "cuda"


def slots_by_chunk(about: Inputs, t: Tensors, chunk: int) -> Tensor:
    """The slot of the state after each chunk, for positions at ends of chunks of so many tokens."""
    positions, slots = t.checkpoint_positions, t.checkpoint_slots
    assert positions is not None and slots is not None
    before = (positions.long() // chunk).clamp_(0, about.rows[1] // chunk)
    none = _filled(_numbers, -1, 0, 1, torch.int32, positions.device)
    return _by_chunk(about, chunk, before, torch.where(_tokens_left(about, t, positions) >= 0, slots.int(), none))[0]


@dataclass
class Pieces:
    """The sequences from a chunk's first token to a position, and the rows of the buffer from which they start.

    rows: [N, W], by sequence and chunk, the row to which the call stores the state after the chunk, -1 for none. ends, starts,
    slots: cu_seqlens of the pieces, which are a chunk apart, the rows from which they start, and the slots to which they go.
    Between two pieces is a sequence that is skipped. tokens: of the copied tokens, their places among those of all batch rows.
    """

    rows: Tensor
    ends: Tensor
    starts: Tensor
    slots: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, about: Inputs, t: Tensors, chunk: int) -> Pieces:
        """The pieces of a call with so many tokens in a chunk. Piece i has row i, and sequence n the row N P + n for its initial
        state."""
        positions, slots = t.checkpoint_positions, t.checkpoint_slots
        assert positions is not None and slots is not None
        (count, each), pieces, device = positions.shape, positions.numel(), positions.device
        rows, long = about.rows
        last = positions.long() - 1  # the last token before the position
        signs = slots | last | _tokens_left(about, t, positions)
        there = (signs if t.state_indices is None else signs | t.state_indices[:, None]) >= 0
        inside = last % chunk
        before = last // chunk * there  # chunks before the one in which the position lies
        stored, taken, at = _by_chunk(about, chunk, before, _filled(_numbers, 0, pieces, 1, torch.int32, device))
        initial = _filled(_numbers, pieces, pieces + count, 1, torch.int32, device)[:, None]
        none = _filled(_numbers, -1, 0, 1, torch.int32, device)
        table = none.repeat(2, count, each, 2)
        torch.where(there, torch.where(before > 0, taken[at].view_as(before), initial), none, out=table[0, ..., 0])
        torch.where(there, slots.int(), none, out=table[1, ..., 0])
        ends = _filled(_numbers, 0, 2 * pieces + 1, 1, torch.int32, device).add(1).div_(2, rounding_mode="floor").mul_(chunk)
        ends[1::2] += inside.flatten() + (1 - chunk)
        first = last - inside + (_filled(_numbers, 0, count * long, long, torch.int64, device)
                                 if t.cu_seqlens is None else t.cu_seqlens[:-1])[:, None]
        tokens = first.flatten()[:, None] + _filled(_numbers, 0, chunk, 1, torch.int64, device)
        return cls(stored, ends, table[0].flatten(), table[1].view(-1, 1), tokens.flatten().clamp_(0, rows * long - 1))


def buffer(t: Tensors, pool: Tensor) -> Tensor:
    """A row for each piece, and after these the initial state of each sequence, which the call may overwrite."""
    assert t.checkpoint_positions is not None
    count = t.checkpoint_positions.numel()
    states = pool.new_empty((count + len(t.checkpoint_positions), *pool.shape[1:]))
    if t.initial_state is None:
        states[count:] = 0
    elif t.state_indices is None:
        states[count:] = t.initial_state
    elif len(t.initial_state):
        torch.index_select(t.initial_state, 0, t.state_indices.clamp_min(0), out=states[count:])
    return states


def _copied(y: Tensor, tokens: Tensor, layout: str) -> Tensor:
    """Rows of an input of these tokens, as one batch row in the layout bthd."""
    y = y if layout == "bthd" else y.transpose(1, 2)
    return y[0][tokens][None] if len(y) == 1 else y[tokens // y.shape[1], tokens % y.shape[1]][None]


def of_pieces(b: Build, contract: Contract) -> Build:
    """The build that computes the states at positions for calls of a build. contract: of the pieces, or of these calls."""
    whole = replace(b.plan, partition=None, part_chunks=0, longest_first=False) if b.plan.partition else b.schedule
    contract = replace(contract, pool=True, in_place=False, strided=False).unpromised()
    return replace(b, layout="bthd", schedule=whole, contract=contract)


def storing(about: Inputs, t: Tensors, x: Request, numbers: tuple[float, ...], b: Build, pieces: Pieces, states: Tensor
            ) -> Callable[[], object]:
    """A function that computes the states at the positions, and stores them to their slots. All that may refuse them is asked
    before, and nothing is written. b: the build of the call, whose schedule without parts computes them."""
    inputs = tuple(_copied(y, pieces.tokens, x.layout) for y in about.inputs)
    about = replace(about, inputs=inputs, rows=(1, len(pieces.tokens)))
    asked = replace(x, layout="bthd", in_place=False, output_final_state=False)
    pool = pool_of(t, x)
    t = t._replace(cu_seqlens=pieces.ends, initial_state=states, out=None, state_indices=pieces.starts, final_state=None)
    call = call_for(about, t, asked)
    b = of_pieces(b, call.contract)
    m, given = module(b), (*inputs, *about.of_heads)
    all_of_it: Any = (given, (states,), (None,), pieces.ends, (None, pool), False, (pieces.starts, pieces.slots))
    with compiling(m, call.device.type):
        admit(b, m, call, lambda: m.HOST.prepare(*all_of_it))

    def run() -> None:
        with compiling(m, call.device.type):
            m.HOST.run(given, numbers, *all_of_it[1:])
    return run
