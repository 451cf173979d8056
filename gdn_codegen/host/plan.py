"""A call plan: what all calls with arguments of one kind share.

Below the line the file is copied into generated modules word for word. Nothing here knows a build: `Host` has its tables.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arguments import (
    _ANY_FLOAT,
    _check_buffers,
    _check_indices,
    _check_inputs,
    _check_out,
    _check_pool,
    _check_rows,
    _check_sequences,
    _check_state,
)
from .parts import _needs_summaries, _split_parts
from .tables import NativeCall, Tables
from .tensors import _FLOATS, _dense, _equal_rows, _fail, _filled, _flat, _in_order, _is_plain, _kin, _made, _steps, _unread_rows


# --- copied from here on ---
class Plan:
    """The plan of calls whose arguments differ only in their values. Raises ValueError that names a bad argument.

    given: one tensor for each row of `Tables.inputs`, `head_inputs` and `chunk_inputs`. states: one for each row of `initial`.
    outs: one for each row of `outputs`. buffers: the caller's memory for `final` and `checkpoints`, or None. wanted: True if
    final states are wanted. every: chunks from one checkpoint to the next. longest: tokens of the longest sequence, 0 if not
    known; parts and their summaries depend on it, and nothing else. call: runs the plan (host/call.py).
    """

    call: Callable[..., list[Any]]

    def __init__(self, host: Any, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
                 buffers: Sequence[Any], wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> None:
        """Checks the arguments, then lays out results and workspaces, then chooses the launches."""
        t: Tables = host.tables
        self.host, self.tables, self.wanted, self.every, self.longest = host, t, wanted, every, longest
        self.state = _FLOATS[t.state_dtype]
        self.batch, self.tokens, self.heads, self.value_heads, self.device = _check_inputs(
            given, t.inputs, t.head_inputs, t.layout, t.heads, t.heads_per_instance)
        self.packed = cu_seqlens is not None
        self.equal_rows = _unread_rows if t.chunk == 1 and self.tokens else _equal_rows
        self.sequences = _check_sequences(cu_seqlens, self.batch, self.device) if self.packed else self.batch
        self.slots = self.batch * self.tokens // t.chunk + self.sequences
        # for each argument: what replaces None, whether it is passed without a copy, its alignment in bytes, its dtype
        self.expected: list[tuple[Any, bool, int, torch.dtype]] = []
        self.lacking: list[tuple[Any, ...]] = []  # for absent head inputs: index, then arguments of _full
        self.ints: dict[str, int] = {}  # integers that kernels get, by name
        self.pool_slots: list[int] = []  # slots of each pool
        self.expect_inputs(given)
        self.expect_chunk_inputs(given[len(given) - len(t.chunk_inputs):])
        self.expect_numbers(indices, buffers)
        self.expect_states(states)
        self.expect_buffers(buffers)
        self.expect_outs(outs)
        self.lay_out()
        self.count(given, states, outs)
        self.launches, self.more = self.launched(), list[torch.Tensor]()  # more: like tensors that only an earlier build has
        self.ends_as_they_are = self.packed and _is_plain(cu_seqlens, torch.int32)
        looks = host.check or self.device.type == "cpu"
        self.check_ends, self.check_numbers = self.packed and looks, bool(t.indices) and looks
        self.native = self.native_arguments(given, states, outs, buffers)

    # --- arguments ---
    def expect_inputs(self, given: Sequence[Any]) -> None:
        """Inputs. Strided kernels read an input without a copy if they accept it as a view."""
        t = self.tables
        for (name, _, dims, dtype), x in zip(t.inputs, given, strict=False):
            plain = self.host.is_view(name, x, dims, _FLOATS[dtype]) if t.strided else _is_plain(x, _FLOATS[dtype])
            self.expected.append((None, plain, 1 if t.strided else 16, _FLOATS[dtype]))
        first = len(t.inputs)
        for n, ((_, default, dims, dtype), x) in enumerate(zip(t.head_inputs, given[first:], strict=False), first):
            self.expected.append((None, x is None or _is_plain(x, _FLOATS[dtype]), 16, _FLOATS[dtype]))
            if x is None:
                self.lacking.append((n, (self.value_heads, *dims), default, _FLOATS[dtype], self.device))

    def expect_chunk_inputs(self, given: Sequence[Any]) -> None:
        """Tensors with a tile for each chunk slot, as another module stored them."""
        for (name, dims, dtype), x in zip(self.tables.chunk_inputs, given, strict=True):
            _check_state(name, x, (self.slots, self.value_heads, *dims), self.device, (_FLOATS[dtype],))
            self.expected.append((None, _is_plain(x, _FLOATS[dtype]), 16, _FLOATS[dtype]))

    def expect_numbers(self, indices: Sequence[Any], buffers: Sequence[Any]) -> None:
        """Tensors of integers: pool slots and the like. `as_integers`: for each that the caller may give, True if none is copied.
        `in_order`: those that are 0, 1, ... for the sequences: rows without indices, and final states outside a pool."""
        t = self.tables
        self.in_order = [name for name, x in zip(t.numbers, indices, strict=True) if x is None]
        if "final_indices" in t.indices and buffers[0] is None:
            self.in_order.append("final_indices")
        self.as_integers: list[bool] = []
        for name, x in zip(t.numbers, indices, strict=True):
            if x is not None or name != "intermediate_state_indices":  # without it sequences have rows in order
                least = 0 if self.packed else -(-self.tokens // t.chunk)
                _check_indices(name, x, self.sequences, self.device, least if name in t.by_token else -1)
            if name in t.by_token:
                self.ints[f"{name}_width"] = x.shape[1]
            self.as_integers.append(x is None or _is_plain(x, torch.int32))

    def expect_states(self, states: Sequence[Any]) -> None:
        """Initial states: slots of a pool, or one tile for each sequence, or None."""
        t = self.tables
        for (name, dims), x in zip(t.initial, states, strict=True):
            tile = (self.value_heads, *dims)
            if t.pool:
                self.ints[f"{name}_stride"] = _check_pool(name, x, tile, self.device, self.state)
                self.pool_slots.append(x.shape[0])
                continue
            if t.in_place:
                _check_state(name, x, (self.sequences, *tile), self.device, (self.state,), written=True)
            elif x is not None:
                dtypes = _ANY_FLOAT if t.state_dtype == "float32" else (self.state,)
                _check_state(name, x, (self.sequences, *tile), self.device, dtypes)
            absent = _made((0, *tile), self.state, self.device)
            self.expected.append((absent, x is None or _is_plain(x, self.state), 16, self.state))

    def expect_buffers(self, buffers: Sequence[Any]) -> None:
        """The caller's memory for final states and checkpoints. `as_they_are`: for each, True if it is passed without a copy.
        `state_kin`: for each, the tensor that replaces an unwanted one or None, and a tensor like the one that a call makes."""
        t = self.tables
        lent: list[tuple[str, tuple[int, ...], Any]] = []
        for (name, dims), x in zip(t.final, buffers, strict=False):
            shape, tile = (self.sequences, self.value_heads, *dims), (self.value_heads, *dims)
            absent = None if self.wanted else _made((0, *tile), self.state, self.device)
            if t.pool:
                self.ints[f"{name}_stride"] = math.prod(tile)
                if x is not None:
                    self.ints[f"{name}_stride"] = _check_pool(name, x, tile, self.device, self.state)
                    self.pool_slots.append(x.shape[0])
                    shape, absent = tuple(x.shape), None
            lent.append((name, shape, absent))
        self.stored_rows = self.row_tokens = 0
        if t.rows:
            for (name, dims), x in zip(t.checkpoints, buffers[len(t.final):], strict=True):
                self.ints[f"{name}_stride"] = _check_rows(name, x, (self.value_heads, *dims), 0 if self.packed else self.tokens,
                                                          self.device, self.state)
                self.stored_rows, self.row_tokens = x.shape[:2]
                lent.append((name, tuple(x.shape), None))
        elif t.positions:
            for (name, dims), x in zip(t.checkpoints, buffers[len(t.final):], strict=True):
                self.ints[f"{name}_stride"] = _check_pool(name, x, (self.value_heads, *dims), self.device, self.state)
                self.stored_rows = x.shape[0]
                lent.append((name, tuple(x.shape), None))
        elif t.checkpoints:
            rows = self.batch * self.tokens // (self.every * t.chunk)
            lent += [(name, (rows, self.value_heads, *dims), None) for name, dims in t.checkpoints]
        self.as_they_are = _check_buffers(buffers, lent, self.device, self.state)
        if t.rows or t.positions:  # they are written where they lie
            self.as_they_are[len(t.final):] = [True] * len(t.checkpoints)
        if t.pool:
            self.as_they_are[:len(t.final)] = [True] * len(t.final)
        self.state_kin = [(absent, _kin(shape, self.state, self.device)) for _, shape, absent in lent]

    def expect_outs(self, outs: Sequence[Any]) -> None:
        """The caller's memory for outputs. `made`: shapes and dtypes of the tensors that a call makes. `fits`: for each output,
        True if the caller's memory is used without a copy."""
        t = self.tables
        rows = ((self.batch, self.tokens, self.value_heads) if t.layout == "bthd" else
                (self.batch, self.value_heads, self.tokens))
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = [((*rows, *dims), _FLOATS[dtype]) for _, dims, dtype in t.outputs]
        self.fits: list[bool] = []
        for argument, (name, dims, _), x, (shape, dtype) in zip(t.outs, t.outputs, outs, self.made, strict=True):
            if x is not None:
                _check_out(argument, x, shape, dtype, self.device)
            self.fits.append(x is not None and (self.host.is_view(name, x, dims, dtype) if t.strided else _is_plain(x, dtype)))

    # --- what the call makes ---
    def lay_out(self) -> None:
        """Shapes of workspaces, the number of parts, and their chunks. Without summaries no kernel reads the workspaces of
        parts, and empty tensors replace them (`unread`). Where kernels choose the chunks of a part, `span` is the fewest."""
        t = self.tables
        self.span = self.parts = self.summed = 0
        unread: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.made += [((self.slots, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.workspaces]
        self.made += [((self.sequences, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.end_workspaces]
        self.made += [((1,), torch.int32)] * len(t.counters)
        if t.shared:
            held = self.host.shared_bytes(self.slots, self.sequences, self.value_heads, self.device)
            self.made.append(((held,), torch.uint8))
        if t.part_cost is not None:
            self.span = self.host.span(self.batch * self.tokens, self.sequences, self.value_heads, self.device, self.packed,
                                       self.longest)
            chooses = self.host.chooses_parts(self.device, self.packed, self.sequences)
            longest = min(self.longest, self.tokens) if chooses and self.longest else self.tokens
            self.summed = int(bool(t.summaries) and _needs_summaries(-(-longest // t.chunk), self.span, t.most, t.part_cost,
                                                                     chooses))
            if chooses:
                self.span = self.host.finest(self.span, self.tokens, self.value_heads, self.device)
            self.ints["part_instances"] = self.host.part_instances(self.value_heads)
            self.ints["units"], self.ints["least_span"] = self.host.units(self.device) if chooses else 0, self.span
            self.parts = self.batch * self.tokens // (t.chunk * self.span) + self.sequences
            self.made += [((4 + 4 * self.parts * chooses,), torch.int32)] * len(t.places)
            shapes = [((self.parts, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.part_workspaces]
            if self.summed:
                self.made += shapes
            else:
                unread = [((0, *shape[1:]), dtype) for shape, dtype in shapes]
        if t.pipelined:
            self.span = self.host.pipelined_span(self.tokens)
            if self.sequences * self.span * self.value_heads >= 2 ** 31:
                _fail("cu_seqlens", f"{self.sequences} sequences in {self.tokens} tokens",
                      "fewer, as partition='pipelined' has a block for each chunk that each sequence may have")
            self.parts = self.batch * self.tokens // (t.chunk * self.span) + self.sequences
            self.made += [((self.parts, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.part_workspaces]
        self.unread = [_made(shape, dtype, self.device) for shape, dtype in unread]
        self.kin = [_kin(shape, dtype, self.device) for shape, dtype in self.made]

    def count(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any]) -> None:
        """The integers that kernels get besides the sizes, by name."""
        t, ints = self.tables, self.ints
        ints.update({f"has_{name}": int(x is not None) for (name, _), x in zip(t.initial, states, strict=True)})
        ints.update({f"has_{name}": int(self.wanted) for name, _ in t.final})
        # outputs that a call makes are zero in rows that no sequence covers
        self.clears = t.pool or self.packed
        if t.cleared:
            ints.update({f"clear_{row[0]}": int(self.clears and x is None) for row, x in zip(t.outputs, outs, strict=True)})
        ints["summed"], ints["checkpoint_chunks"] = self.summed, self.every
        if any("blocks_at_a_time" in names for names in t.ints.values()):
            ints["blocks_at_a_time"] = torch.cuda.get_device_properties(self.device).multi_processor_count
        if not t.strided:
            return
        goes = [plain for _, plain, *_ in self.expected[:len(t.inputs)]]
        places = [x.stride() if plain else _dense(x.shape) for x, plain in zip(given, goes, strict=False)]
        places += [x.stride() if fit else _dense(shape) for x, fit, (shape, _) in zip(outs, self.fits, self.made, strict=False)]
        for name, strides in zip([row[0] for row in t.inputs] + [row[0] for row in t.outputs], places, strict=True):
            for axis, far in zip("bth", _steps(strides, t.layout), strict=True):
                ints[f"{name}_stride_{axis}"] = far // t.units.get(name, 1)

    def launched(self) -> list[tuple[Any, list[int], list[int]]]:
        """For each kernel that a call launches: the launch, the indices of its tensors, and those of its numbers."""
        t = self.tables
        counts = {"chunks": self.slots, "parts": self.parts, "sequences": self.sequences}
        if t.pipelined:
            counts = {"chunks": self.sequences * self.span, "parts": self.sequences}
        sizes = (self.sequences, self.tokens, int(not self.packed and self.tokens > 0), self.heads, self.value_heads, self.slots)
        first = bool(t.declined) and self.host.earlier is None  # of a pair: such a kernel clears the counter
        skipped = *(() if self.summed else t.summaries), *(t.bounds if self.span * t.chunk >= self.tokens and not first else ())
        fewer: dict[str, int] = {}  # parts of kernels that have nothing to do for a sequence of one part
        if self.ints.get("units"):
            split = _split_parts(self.parts, self.tokens, t.chunk * self.span)
            fewer = {n: split for n, grid, *_ in t.kernels if grid == "parts" and n in (*t.summaries, *t.bounds)}
        instances = {row[0]: fewer.get(row[0], counts[row[1]]) * self.value_heads * row[2]
                     for row in t.kernels if row[0] not in skipped}
        if together := getattr(self.host.launcher, "together", None):
            together(tuple(n for n, count in instances.items() if count), self.device)
        found, order, numbers = [], {n: at for at, n in enumerate(t.tensors)}, list(t.scalars)
        many = max(1, -(-self.tokens // (t.chunk * self.span))) if t.pipelined else 1
        for part, (name, _, _, tensors, scalars) in itertools.product(range(many), t.kernels):
            of_parts = (part if t.pipelined else fewer.get(name, self.parts), self.span) if self.span else ()
            if count := instances.get(name):
                launch = self.host.launcher(name, count, (*sizes, *of_parts), [self.ints[n] for n in t.ints[name]], self.device)
                found.append((launch, [order[n] for n in tensors], [numbers.index(n) for n in scalars]))
        return found

    # --- as data ---
    def native_arguments(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]
                    ) -> NativeCall | None:
        """The call as data. None if a call copies, fills or checks the values of some tensor."""
        t = self.tables
        as_it_is = (all(plain for _, plain, *_ in self.expected) and all(self.as_they_are) and not self.lacking
                    and all(x is None or fit for x, fit in zip(outs, self.fits, strict=True)))
        looked_at = self.check_ends or self.check_numbers or (self.packed and not self.ends_as_they_are) or bool(t.zeroed)
        in_order = _in_order(self.sequences, self.device) if self.in_order else None
        if not as_it_is or looked_at or not all(self.as_integers) or (self.in_order and in_order is None):
            return None
        first_out = len(given) + len(states)
        first_buffer = first_out + len(outs)
        sources: list[tuple[Any, ...]] = [
            ("fixed", absent) if x is None else ("given", n, tuple(x.shape))
            for n, (x, (absent, *_)) in enumerate(zip(given if t.pool else (*given, *states), self.expected, strict=True))]
        if t.pool:
            sources += [("given", n, tuple(_flat(name, x).shape))
                        for n, ((name, _), x) in enumerate(zip(t.initial, states, strict=True), len(given))]
        for n, (x, (absent, like)) in enumerate(zip(buffers, self.state_kin, strict=True), first_buffer):
            flat = t.pool if n < first_buffer + len(t.final) else t.rows or t.positions
            lies = functools.partial(_flat, "") if flat else lambda x: x
            sources.append(("given", n, tuple(lies(x).shape)) if x is not None else
                           ("result", like, (math.prod(like.shape),) if flat else tuple(like.shape)) if absent is None else
                           ("fixed", lies(absent)))
        sources += [("given", n, tuple(x.shape)) if x is not None else ("result", like, tuple(like.shape))
                    for n, (x, like) in enumerate(zip(outs, self.kin, strict=False), first_out)]
        sources += [("workspace", like) for like in self.kin[len(outs):]]
        sources += [("fixed", x) for x in self.unread]
        first_number = first_buffer + len(buffers)
        for name in t.indices:
            n = first_number + t.numbers.index(name if name in t.numbers else "state_indices")
            width = (self.ints[f"{name}_width"],) if name in t.by_token else ()
            sources.append(("fixed", in_order) if name in self.in_order else ("given", n, (self.sequences, *width)))
        rows = functools.partial(_filled, self.equal_rows, self.batch, self.tokens, self.device)
        return NativeCall(sources, self.launches, rows)
