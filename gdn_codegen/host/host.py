"""The calls of a generated module: plans them, launches kernels and returns results.

Below the line the file is copied into generated modules word for word, where `Host` gets the module's tables and launcher.
"""
from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arguments import _check_chunks, _check_flag, _check_given, _check_number
from .call import caller
from .pair import _launch_first
from .parts import COMPARED, FINEST, LEAST_PIPELINED, LONG, PIPELINED, _cheapest_span, _lengths, _needs_summaries
from .plan import Plan
from .tables import Tables
from .tensors import _FLOATS, _fail, _picker


# --- copied from here on ---
def _kind(x: Any) -> Any:
    """The properties of an argument that a plan depends on."""
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else type(x)


def _kind_and_place(x: Any) -> Any:
    """`_kind` for strided kernels. Alignment decides whether they read a tensor without a copy."""
    return (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else type(x)


def _untraced(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """call(*args, **named), at which torch.compile breaks its graph. It could not trace launches."""
    from torch._dynamo import disable  # torch.compile has imported it, which takes seconds
    return disable(call)(*args, **named)  # type: ignore[no-untyped-call]


_untraced._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `disable` sets


def _parts_wanted(build: int) -> int:
    """Chunks of a part, from GDN_CODEGEN_PART_CHUNKS, else from the build; 0 to choose."""
    said = os.environ.get("GDN_CODEGEN_PART_CHUNKS", str(build))
    if not said.isdecimal():
        raise ValueError(f"GDN_CODEGEN_PART_CHUNKS: got {said!r}; accepted: the chunks of a part, 0 to choose")
    return int(said)


class Host:
    """The calls of one module.

    launcher: (kernel, instances, sizes, integers, device) -> a function that launches the kernel on its tensors, cu_seqlens and
      numbers. sizes: sequences, tokens of a row, 1 if rows are equal sequences, H, HV, chunk slots. A build with parts adds the
      number of parts, and chunks of a part.
    accepts_view: accepts_view(name, tensor): True if strided kernels can read this tensor without a copy. Its rows are dense.

    poison: outputs and workspaces start as NaN, for tests (GDN_CODEGEN_POISON=1). check: the values of cu_seqlens and
    state_indices are checked on a GPU too, and the call waits for that (GDN_CODEGEN_CHECK=1). partition, part_chunks: True if
    sequences are split into parts, and chunks of a part, 0 to choose (GDN_CODEGEN_PARTITION, GDN_CODEGEN_PART_CHUNKS). plans: by
    kind of arguments. earlier: of the second module of a pair, the Host of the first one (`Tables.declined`).
    """

    def __init__(self, tables: Tables, launcher: Callable[..., Callable[..., None]],
                 accepts_view: Callable[[str, torch.Tensor], bool] = lambda name, x: True) -> None:
        """Reads the environment variables once, and works out which results a call returns. It plans nothing yet."""
        self.tables, self.launcher, self.accepts_view = tables, launcher, accepts_view
        self.shared_bytes: Any = getattr(launcher, "workspace_bytes", None)  # of a launcher that divides one workspace
        self.poison = os.environ.get("GDN_CODEGEN_POISON") == "1"
        self.check = os.environ.get("GDN_CODEGEN_CHECK") == "1"
        self.partition = os.environ.get("GDN_CODEGEN_PARTITION") != "0"
        self.part_chunks = _parts_wanted(tables.part_chunks) if tables.in_parts else 0
        self.plans: dict[Any, Plan] = {}
        self.earlier: Host | None = None
        self.kind = _kind_and_place if tables.strided else _kind
        self.outputs = tables.place("outputs")
        self.checkpoints = slice(0) if tables.rows or tables.positions else tables.place("checkpoints")  # the caller has its rows
        self.final = tables.place("initial") if tables.in_place else tables.place("final")
        places = range(len(tables.tensors))
        self.saved = [tables.tensors.index(n) for n in tables.saved]
        self.returned = _picker([*(n for x in (self.outputs, self.final, self.checkpoints) for n in places[x]), *self.saved])

    # --- a call ---
    def __call__(self, given: Sequence[Any], numbers: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
                 buffers: Sequence[Any], output_final_state: Any, indices: Sequence[Any] = (), every: Any = 0) -> tuple[Any, ...]:
        """Outputs, final states or None, checkpoints, tiles of chunks. Arguments: those of Plan, the caller's numbers."""
        if torch.compiler.is_dynamo_compiling():
            return _untraced(self, given, numbers, states, outs, cu_seqlens, buffers, output_final_state, indices, every)  # type: ignore[no-any-return]
        t = self.tables
        _check_given(zip(t.tensors, (*given, *states), strict=False))
        values = self.numbers_of(numbers)
        if t.checkpoints and not (t.rows or t.positions):
            every = _check_chunks("checkpoint_chunks", every, 1)
        wanted = t.in_place
        if t.final:
            wanted = _check_flag("output_final_state", output_final_state) or any(x is not None for x in buffers[:len(t.final)])
        return self.results(self.run(given, values, states, outs, cu_seqlens, buffers, wanted, indices, every), wanted)

    def run(self, given: Sequence[Any], numbers: Sequence[float], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
            buffers: Sequence[Any], wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> list[Any]:
        """Launch every kernel; the call's tensors, as Tables.tensors names them."""
        plan = self.prepare(given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
        return plan.call(given, numbers, states, outs, cu_seqlens, buffers, indices)

    def prepare(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any, buffers: Sequence[Any],
                wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> Plan:
        """The plan of arguments of this kind. It is made once, and checks them then. It launches those of `earlier` first."""
        by_cost = any(x is not None and x.tables.part_cost is not None for x in (self, self.earlier))
        kind, longest = self.kind, longest if by_cost else 0
        key = (*map(kind, given), *map(kind, states), *map(kind, outs), kind(cu_seqlens), *map(kind, buffers), wanted,
               *map(kind, indices), every, longest)
        plan = self.plans.get(key)
        if plan is None:
            if self.tables.declined and self.earlier is None:
                _fail("schedule", self.tables.name, "a build that runs alone; this one is half of a pair, which ops choose")
            plan = Plan(self, given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
            if self.earlier is not None:
                first = Plan(self.earlier, given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
                _launch_first(plan, first)
            plan.call = caller(plan, given, outs, buffers)
            if len(self.plans) >= 256:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    def numbers_of(self, given: Sequence[Any]) -> tuple[float, ...]:
        """The caller's numbers, the page's defaults where None is given."""
        values = []
        for (name, default), x in zip(self.tables.scalars.items(), given, strict=True):
            if x is not None:
                values.append(_check_number(name, x))
            elif default is not None:
                values.append(float(default))
            else:
                _fail(name, None, "a number: the page has no default")
        return tuple(values)

    def results(self, memory: Sequence[Any], wanted: bool) -> tuple[Any, ...]:
        """What a call returns, of its tensors."""
        if wanted:
            return self.returned(memory)
        return (*memory[self.outputs], *(None for _ in self.tables.initial), *memory[self.checkpoints],
                *(memory[n] for n in self.saved))

    # --- what a build makes of sizes ---
    def is_view(self, name: str, x: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether kernels that go by strides read and write `x` where it lies."""
        return x.dtype == dtype and (not dims or x.stride(-1) == 1) and self.accepts_view(name, x)

    def span(self, tokens: int, sequences: int, value_heads: int, device: torch.device, packed: bool = True,
             longest: int = 0) -> int:
        """Chunks of a part: those that the build's costs make cheapest, or all that there are.

        packed, longest: whether sequences may differ in length, and tokens of the longest, 0 if it is known to the device alone.
        """
        t, every = self.tables, tokens // self.tables.chunk + 1
        if not self.partition or t.part_cost is None:
            return every
        if self.part_chunks or not sequences or device.type == "cpu":
            return min(self.part_chunks or every, every)
        known = _lengths(tokens, sequences, packed, longest, t.chunk, self.chooses_parts(device, packed, sequences))
        return _cheapest_span(known, self.part_instances(value_heads), self.units(device), t.part_cost, len(t.summaries), t.most,
                              t.warm_ups) or every

    def pipelined_span(self, tokens: int) -> int:
        """Chunks of a part where parts follow one another. tokens: the most that a sequence may have."""
        chunks = max(1, -(-tokens // self.tables.chunk))
        wanted = self.part_chunks or max(LEAST_PIPELINED, -(-chunks // PIPELINED))
        return min(wanted, chunks) if self.partition else chunks

    def chooses_parts(self, device: torch.device, packed: bool, sequences: int) -> bool:
        """Whether kernels choose the chunks of a part from the lengths of packed sequences."""
        given = any("units" in names for names in self.tables.ints.values())
        several = packed and 1 < sequences <= COMPARED
        return given and several and self.partition and not self.part_chunks and device.type != "cpu"

    def finest(self, span: int, tokens: int, value_heads: int, device: torch.device) -> int:
        """The fewest chunks of a part that kernels may choose, if `span` is best for one sequence of all tokens."""
        chunks = -(-tokens // self.tables.chunk)
        share = -(-chunks * self.part_instances(value_heads) // self.units(device))
        return min(span, max(2, min(share, max(-(-share // FINEST), LONG))))

    def part_instances(self, value_heads: int) -> int:
        """The instances of a part in the kernels that walk parts."""
        t = self.tables
        others = (*t.bounds, *t.summaries)
        return value_heads * max(row[2] for row in t.kernels if row[1] == "parts" and row[0] not in others)

    def units(self, device: torch.device) -> int:
        """How many instances of a part the GPU runs at a time."""
        assert self.tables.part_cost is not None
        return self.tables.part_cost.resident * torch.cuda.get_device_properties(device).multi_processor_count

    def workspace_bytes(self, tokens: int, sequences: int, value_heads: int, device: Any = "cpu") -> int:
        """Bytes that a call holds between its kernels, and between cores: `tokens` in all, of `sequences` sequences. device: that
        of the call, for builds that make parts or whose launcher divides one workspace. With those of `earlier`; without
        integers."""
        t = self.tables
        held = [(tokens // t.chunk + sequences, t.workspaces), (sequences, t.end_workspaces)]
        if t.part_cost is not None:
            span = self.span(tokens, sequences, value_heads, torch.device(device))
            chooses = self.chooses_parts(torch.device(device), True, sequences)
            if _needs_summaries(-(-tokens // t.chunk), span, t.most, t.part_cost, chooses):
                if chooses:
                    span = self.finest(span, tokens, value_heads, torch.device(device))
                held.append((tokens // (t.chunk * span) + sequences, t.part_workspaces))
        if t.pipelined:
            span = self.pipelined_span(-(-tokens // max(1, sequences)))  # of rows; a pack has longer parts
            held.append((tokens // (t.chunk * span) + sequences, t.part_workspaces))
        others = self.earlier.workspace_bytes(tokens, sequences, value_heads, device) if self.earlier is not None else 0
        if t.shared:
            others += self.shared_bytes(tokens // t.chunk + sequences, sequences, value_heads, torch.device(device))
        return others + sum(n * value_heads * math.prod(dims) * _FLOATS[dtype].itemsize
                            for n, rows in held for _, dims, dtype in rows)
