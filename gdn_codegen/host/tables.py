"""Data of a build, and of a call, that the host code and the self-check of a generated module use.

Below the line the file is copied into generated modules word for word. The package makes a `Tables` of a build
(runtime/tables.py), prints it, and the module's `Host` and `Check` read it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..devices.part_cost import PartCost


# --- copied from here on ---
@dataclass
class NativeCall:
    """A call as data, for the native launcher (runtime/call/native_launcher.py).

    sources: for each tensor of `Tables.tensors`, where it comes from: ("given", its index in (*given, *states, *outs, *buffers,
      indices), the shape that kernels see), ("fixed", the tensor), ("result", a tensor like it, the shape that kernels see) or
      ("workspace", a tensor like it).
    launches: (launch, indices of its tensors in `Tables.tensors`, indices of its numbers in `Tables.scalars`).
    rows: makes cu_seqlens for rows of equal length, for calls without it.
    """

    sources: list[tuple[Any, ...]]
    launches: list[tuple[Any, list[int], list[int]]]
    rows: Callable[[], Any]


@dataclass(frozen=True)
class Tables:
    """The facts of a build. A row of a tensor begins with its name. Dims are those of one tile. Dtypes are torch's names.

    name: the name of the build. function: the name of the generated function. chunk: tokens of a chunk. layout: "bthd" or
    "bhtd". dtype: the dtype of input tiles.
    inputs: (name, "H" or "HV", dims after [batch, tokens, heads], dtype).
    head_inputs: (name, default, dims after [value heads], dtype): one number or vector for each value head. The default is None
    if the caller must give it.
    chunk_inputs: (name, dims, dtype): one tile for each chunk slot and value head, such as the state before each chunk.
    chunk_dims: for each of chunk_inputs and saved, the extents of its tiles without padding, in the page's order. None stands for
    the tokens of a chunk. held: those of chunk_inputs whose rows past a sequence's end repeat the last one, as running sums do.
    sums: those that are running sums of rows -> the name of what is summed, and whether a token's sum leaves out its own row.
    initial, final: (name, dims): one tile of `state_dtype` for each sequence and value head.
    checkpoints: (name, dims): one tile of `state_dtype` for each checkpoint and value head. rows: they lie in rows of the
    caller's memory, one row for each sequence and one tile for each token. slots: they lie in the pool. positions: they lie in
    rows of the caller's memory, one tile each, which `checkpoint_rows` gives for each chunk.
    outputs: (name, dims after [batch, tokens, value heads], dtype).
    workspaces: (name, dims, dtype): one tile for each chunk slot and value head. saved: those that a call returns. zeroed: those
    of saved that callers add up over all slots: a gradient's shares by chunk. The host clears them first.
    backward: chunks are walked from the last to the first.
    end_workspaces: one tile for each sequence and value head. counters: (name,): one integer. declined: the counter that is not
    zero if the first of two builds has declined a call; both run only in a pair. shared: (name,), if all tiles between kernels
    and cores lie in one workspace, which the launcher divides. places: (name,), if kernels choose the chunks of parts.
    part_workspaces: one tile for each part and value head.
    indices: names of the tensors of integers: pool slots and the like. by_token: those with an integer for each token.
    scalars: the caller's numbers and their defaults. A default is None if the caller must give the number.
    kernels: (name, grid: one instance for each of "chunks", "parts" or "sequences", blocks of a split dim, tensors, numbers).
    ints: for each kernel, the integers that it gets besides the sizes.
    heads: head counts compiled in, by name. heads_per_instance: value heads of a key head that one kernel instance handles.
    units: elements that divide the strides of a tensor. Kernels get strides in these units. The default is 1.
    pool: states are slots of a pool. in_place: the final state overwrites the initial state. strided: kernels get strides.
    cleared: kernels clear rows that no sequence covers, if the host asks for it.

    part_cost: the cost model that gives the number of parts that run side by side; None for a build without such. pipelined: True
    if kernels are launched once for each part, one part after the other. part_chunks: chunks of a part, 0 to choose. most: the
    most parts that a warm-up may reach back. summaries: kernels that compute summaries of parts. bounds: kernels that bound the
    length of a warm-up. They run in calls with several parts; with `declined` in all calls, as one of them clears the counter.
    warm_ups: True if the length of a warm-up is found at run time. forgets: the one of chunk_inputs of which it is found.

    decays: inputs that are logs of decays. state: "kv" or "vk",
    the order of a state's dims. tf32: True if a GPU multiplies float32 as tf32. check_chunks: chunks of the longest sequence of
    the self-check.
    """

    #: The fields whose tensors a call holds, in this order. `indices` come last.
    ORDER: ClassVar[tuple[str, ...]] = ("inputs", "head_inputs", "chunk_inputs", "initial", "final", "checkpoints", "outputs",
                                        "workspaces", "end_workspaces", "counters", "shared", "places", "part_workspaces")

    name: str
    function: str
    chunk: int
    layout: str
    dtype: str
    inputs: tuple[tuple[str, str, tuple[int, ...], str], ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    kernels: tuple[tuple[str, str, int, tuple[str, ...], tuple[str, ...]], ...]
    ints: Mapping[str, tuple[str, ...]]
    scalars: Mapping[str, float | None] = field(default_factory=dict)
    head_inputs: tuple[tuple[str, float | None, tuple[int, ...], str], ...] = ()
    chunk_inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    initial: tuple[tuple[str, tuple[int, ...]], ...] = ()
    final: tuple[tuple[str, tuple[int, ...]], ...] = ()
    checkpoints: tuple[tuple[str, tuple[int, ...]], ...] = ()
    workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    saved: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    chunk_dims: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    sums: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    backward: bool = False
    end_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    counters: tuple[tuple[str], ...] = ()
    declined: str = ""
    shared: tuple[tuple[str], ...] = ()
    places: tuple[tuple[str], ...] = ()
    part_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    indices: tuple[str, ...] = ()
    by_token: tuple[str, ...] = ()
    rows: bool = False
    slots: bool = False
    positions: bool = False
    heads: Mapping[str, int] = field(default_factory=dict)
    heads_per_instance: int = 1
    units: Mapping[str, int] = field(default_factory=dict)
    state: str = "kv"
    state_dtype: str = "float32"
    pool: bool = False
    in_place: bool = False
    strided: bool = False
    cleared: bool = False
    part_cost: PartCost | None = None
    pipelined: bool = False
    part_chunks: int = 0
    most: int = 0
    summaries: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    warm_ups: bool = False
    forgets: str = ""
    decays: tuple[str, ...] = ()
    tf32: bool = False
    check_chunks: int = 3

    @property
    def in_parts(self) -> bool:
        """Whether kernels run over parts of sequences."""
        return self.part_cost is not None or self.pipelined

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of a call's tensors, in the order in which the host holds them."""
        return (*(row[0] for rows in self.ORDER for row in getattr(self, rows)), *self.indices)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those of `indices` that the caller gives."""
        return tuple(n for n in self.indices if n != "final_indices")

    def place(self, rows: str) -> slice:
        """The slice of `tensors` that belongs to the field `rows`."""
        before = self.ORDER[:self.ORDER.index(rows)]
        first = sum(len(getattr(self, n)) for n in before)
        return slice(first, first + len(getattr(self, rows)))

    @property
    def outs(self) -> tuple[str, ...]:
        """Names of the arguments for the caller's output memory."""
        return ("out",) if len(self.outputs) == 1 else tuple(f"out_{row[0]}" for row in self.outputs)

    def kernel(self, name: str) -> tuple[str, str, int, tuple[str, ...], tuple[str, ...]]:
        """The row of a kernel."""
        return next(row for row in self.kernels if row[0] == name)
