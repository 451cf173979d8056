"""The call of a self-check: its arguments in guarded memory, and what it may write.

Below this line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .check_problem import CheckProblem, parent_of


# --- copied from here on ---
class CheckCall:
    """The arguments of a call with the sequences of a `CheckProblem`, in the module's layout, with guards, gaps and marks around
    all that kernels write."""

    #: The value of memory that no call may write.
    MARK = 7.0
    #: Guard elements before and after each tensor of the kernels.
    GUARD = 1 << 16

    def __init__(self, problem: CheckProblem) -> None:
        """problem: of the module that is called."""
        self.problem, self.tables = problem, problem.tables

    # --- memory ---
    def guarded(self, x: torch.Tensor, shape: Sequence[int], fill: float) -> torch.Tensor:
        """A tensor of this shape, like `x`, between guard elements that kernels must not touch."""
        size = math.prod(shape)
        return x.new_full((size + 2 * self.GUARD,), fill)[self.GUARD:self.GUARD + size].view(shape)

    def placed(self, x: torch.Tensor, rows: int, fill: float = math.nan) -> torch.Tensor:
        """[T, heads, ...] in the module's layout. If kernels take strides, there are gaps between heads."""
        x = x.view(rows, len(x) // rows, *x.shape[1:])
        x = x if self.tables.layout == "bthd" else x.transpose(1, 2)
        shape = (*x.shape[:2], x.shape[2] + self.tables.strided, *x.shape[3:])
        return self.guarded(x, shape, fill)[:, :, :x.shape[2]].copy_(x)

    def pool(self, x: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
        """A pool with gaps between slots, `count` in all, of which some are no sequence's."""
        size = x[0].numel()
        pool = x.new_full((count, size + 32), self.MARK)[:, :size].view(count, *x.shape[1:])
        pool[slots] = x
        return pool

    # --- where states lie ---
    def is_skipped(self, n: int) -> bool:
        """True if the pool's slot of this sequence is -1."""
        return self.tables.pool and n % 5 == 2

    def places(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Where states lie: the slot of each sequence's initial state, slots of tokens [N, W], and rows of sequences."""
        count, width = len(lengths), max(lengths) + 1
        rows = torch.arange(count, 0, -1, device="cpu")
        if "state_indices" not in self.tables.by_token:
            return rows, None, rows
        slots = torch.arange(count * width, 0, -1, device="cpu").view(count, width)
        accepted = "num_accepted_tokens" in self.tables.indices
        return slots[torch.arange(count, device="cpu"), [n % 3 * accepted for n in range(count)]], slots, rows

    def rows(self, lengths: Sequence[int]) -> torch.Tensor:
        """The rows of checkpoints, by sequence and chunk: one after each whole chunk, in those of calls with one for every
        chunk."""
        chunk, start = self.tables.chunk, 0
        rows = torch.full((len(lengths), max(lengths) // chunk + 1), -1, device="cpu")
        for n, length in enumerate(lengths):
            rows[n, :length // chunk] = start // chunk + torch.arange(length // chunk, device="cpu")
            start += length
        return rows

    def chunk_slots(self, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        """The chunk slots of the sequences, as (slot, sequence, chunk)."""
        chunk, starts = self.tables.chunk, [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        return [(starts[n] // chunk + n + i, n, i) for n, length in enumerate(lengths) for i in range(-(-length // chunk))]

    def integers(self, lengths: Sequence[int], once: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of integers, by name. once: how many sequences differ."""
        (first, slots, rows), width = self.places(lengths), max(lengths) + 1
        left_out = torch.tensor([self.is_skipped(n) for n in range(len(lengths))], device="cpu")
        made = {"state_indices": first.where(~left_out, -1) if slots is None else slots.where(~left_out[:, None], -1),
                "num_accepted_tokens": torch.tensor([n % 3 + 1 for n in range(len(lengths))], device="cpu"),
                "intermediate_state_indices": rows,
                "retrieve_parent_token": torch.tensor([[parent_of(n % once, t) for t in range(width)]
                                                       for n in range(len(lengths))], device="cpu"),
                "checkpoint_rows": self.rows(lengths)}
        return {name: made[name].to(torch.int32).to(device) for name in self.tables.numbers}

    # --- the arguments ---
    def arguments(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], device: torch.device,
                  call: tuple[bool, bool, bool]) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The call's arguments, and the slots of the sequences. Rows past the last sequence are NaN. call: whether sequences are
        packed, initial states are given, and final states are wanted."""
        tables, (packed, given, wanted), dtypes = self.tables, call, self.problem.DTYPES
        rows, spare = (1, tables.chunk) if packed else (len(lengths), 0)
        copies = sum(lengths) // x[tables.inputs[0][0]].shape[0]
        arguments: dict[str, Any] = {"output_final_state": wanted} if tables.final or tables.in_place else {}
        arguments.update({n: 1.0 for n, default in tables.scalars.items() if default is None})
        for name, *_ in tables.inputs:
            y = x[name].to(device)
            spare_rows = y.new_full((spare, *y.shape[1:]), math.nan)
            arguments[name] = self.placed(torch.cat([y] * copies + [spare_rows]), rows)
        for name, *_ in tables.head_inputs:
            arguments[name] = x[name].to(device)
        for name, dims, _ in tables.chunk_inputs:
            y = x[name].to(device)
            tiles = y.new_full(((sum(lengths) + spare) // tables.chunk + len(lengths), heads[1], *dims), math.nan)
            for slot, n, i in self.chunk_slots(lengths):
                tiles[slot] = y[n % len(y), i]
            arguments[name] = tiles
        for name, (_, dims, dtype) in zip(tables.outs, tables.outputs, strict=True):
            shape = (sum(lengths) + spare, heads[1], *dims)
            arguments[name] = self.placed(torch.full(shape, self.MARK, dtype=dtypes[dtype], device=device), rows, self.MARK)
        if packed:
            arguments["cu_seqlens"] = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32).to(device)
        arguments.update(self.integers(lengths, len(lengths) // copies, device) if tables.numbers else {})
        slots = self.states(arguments, x, lengths, copies, device, given)
        self.buffers(arguments, x, lengths, (sum(lengths) + spare) // tables.chunk + 1, device, wanted)
        return arguments, slots

    def states(self, arguments: dict[str, Any], x: Mapping[str, torch.Tensor], lengths: Sequence[int], copies: int,
               device: torch.device, given: bool) -> torch.Tensor | None:
        """Add the initial states to the arguments. Returns the slots of the sequences in a pool."""
        tables = self.tables
        for name, _ in tables.initial if given else ():
            y = torch.cat([x[name].to(device)] * copies)
            arguments[name] = self.guarded(y, y.shape, self.MARK).copy_(y)
        if not tables.pool:
            return None
        slots, all_slots, _ = self.places(lengths)
        count = (slots if all_slots is None else all_slots).numel() + 2
        arguments.update({name: self.pool(arguments[name], slots, count) for name, _ in tables.initial})
        return slots

    def buffers(self, arguments: dict[str, Any], x: Mapping[str, torch.Tensor], lengths: Sequence[int], positions: int,
                device: torch.device, wanted: bool) -> None:
        """Add the memory for checkpoints and final states to the arguments. positions: of checkpoints, where callers say them."""
        tables = self.tables
        pairs = list(zip(tables.checkpoints, tables.initial, strict=True)) if tables.rows or tables.positions else []
        for (name, dims), (initial, _) in pairs:
            y = x[initial].to(device)
            lead = (positions,) if tables.positions else (len(lengths) + 2, max(lengths) + 1)
            arguments[name] = self.guarded(y, (*lead, y.shape[1], *dims), self.MARK)
        for (name, dims), (initial, _) in zip(tables.final, tables.initial, strict=True) if wanted and tables.final else ():
            y = x[initial].to(device)
            arguments[name] = (torch.full_like(arguments[initial], self.MARK) if tables.pool else
                               self.guarded(y, (len(lengths), y.shape[1], *dims), self.MARK))

    # --- what it may write ---
    @property
    def kept(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Rows of the tensors that hold a state for each token."""
        return self.tables.checkpoints if self.tables.rows else self.tables.initial if self.tables.slots else ()

    def stored_by_token(self, lengths: Sequence[int], served: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The indices of the tiles in which the states after all tokens of the served sequences are."""
        _, slots, rows = self.places(lengths)
        n, t = torch.tensor(tokens_of(lengths, served), dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        return (slots[n, t],) if self.tables.slots and slots is not None else (rows[n], t) if self.tables.rows else ()

    def writable(self, arguments: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The arguments that kernels write to, by name: all memory of their storage, with guards and gaps, and a copy of it."""
        states = [n for n, _ in (self.tables.initial if self.tables.in_place else self.tables.final)]
        rows = [n for n, _ in self.tables.checkpoints] if self.tables.rows or self.tables.positions else []
        return {n: (whole(arguments[n]), whole(arguments[n]).clone()) for n in (*self.tables.outs, *states, *rows)
                if n in arguments}

    def beside(self, arguments: Mapping[str, Any], writable: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
               written: torch.Tensor, by_token: tuple[torch.Tensor, ...], slots: Any, lengths: Sequence[int]
               ) -> dict[str, tuple[float, float]]:
        """(inf, 0) by name of memory in which something changed that the call may not write, else (0, 0).

        writable: as `writable` gave it before the call. written: tokens of sequences. by_token, slots: the tiles of states that
        the call writes."""
        tables, found = self.tables, {}
        for name, (now, before) in writable.items():
            own = torch.zeros(now.shape, dtype=torch.bool, device=now.device).as_strided(
                arguments[name].shape, arguments[name].stride(), arguments[name].storage_offset())
            if name in tables.outs:
                own = own if tables.layout == "bthd" else own.transpose(1, 2)
                own[written.view(own.shape[:2]).to(now.device)] = True
            elif name in dict(self.kept):
                own[tuple(at.to(now.device) for at in by_token)] = True
            elif name in dict(tables.checkpoints):
                own[[row for row in self.rows(lengths).flatten().tolist() if row >= 0]] = True
            else:
                own[slots] = True
            found[f"memory beside {name}"] = math.inf if ((now != before) & ~whole(own)).any() else 0.0, 0.0
        return found


def tokens_of(lengths: Sequence[int], served: Sequence[int]) -> list[tuple[int, int]]:
    """The tokens of these sequences, as pairs (sequence, token)."""
    return [(n, t) for n in served for t in range(lengths[n])]


def whole(x: torch.Tensor) -> torch.Tensor:
    """All memory of the storage of a tensor."""
    return x.new_empty(0).set_(x.untyped_storage())
