"""The data of a build that a generated module's host and check work from.

Below the line the file is copied into generated modules word for word. The package makes a `Tables` of a build
(runtime/tables.py), prints it, and the module's `Host` and `Check` read it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..devices.part_cost import PartCost


# --- copied from here on ---
@dataclass(frozen=True)
class Tables:
    """The facts of a build. Rows of tensors begin with a name; dims are those of one tile; dtypes are torch's names.

    name: the build's. function: the generated function's. chunk: tokens of a chunk. layout: "bthd" or "bhtd". dtype: of tiles of
    inputs.
    inputs: (name, "H" or "HV", dims after [batch, tokens, heads], dtype).
    head_inputs: (name, what stands for None or None where it has to be given, dtype): one number a value head.
    initial, final: (name, dims): a tile a sequence and value head, of dtype `state_dtype`. checkpoints: a tile a checkpoint.
    outputs: (name, dims after [batch, tokens, value heads], dtype).
    workspaces: (name, dims, dtype): a tile a chunk slot and value head. end_workspaces: one a sequence.
    part_workspaces: one a part.
    indices: names of the tensors that say which slot of a pool a sequence has.
    scalars: the caller's numbers and their defaults; None for a number that has to be given.
    kernels: (name, what it has an instance of: "chunks", "parts" or "sequences", blocks of a split dim, tensors, numbers).
    ints: of each kernel, the whole numbers that it is passed beside the sizes.
    heads: head counts compiled in, by name. heads_together: value heads of a key head that one kernel instance takes.
    units: elements that divide the strides of a tensor; kernels get strides in such units. Without a row the unit is 1.
    pool: states are slots of a pool. in_place: the final state takes the initial one's place. strided: kernels get strides.
    cleared: kernels clear rows that no sequence covers, where the host says so.

    part_cost: costs from which the number of parts follows; None for a build that makes no parts. part_chunks: chunks of a part,
    0 to choose. most: parts that a warm-up may reach back. summaries: kernels that sum up parts. bounds: kernels that bound the
    length of a warm-up. warm_ups: whether a warm-up's length is found at run time.

    forms: inputs that come in another form than the page's, and which. decays: inputs that are logs of decays. state: "kv" or
    "vk", the order of a state's dims. tf32: whether a GPU multiplies float32 as tf32. check_chunks: chunks of the longest
    sequence of the check.
    """

    #: The fields whose tensors a call holds, in this order, and then `indices`.
    ORDER: ClassVar[tuple[str, ...]] = ("inputs", "head_inputs", "initial", "final", "checkpoints", "outputs", "workspaces",
                                        "end_workspaces", "part_workspaces")

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
    head_inputs: tuple[tuple[str, float | None, str], ...] = ()
    initial: tuple[tuple[str, tuple[int, ...]], ...] = ()
    final: tuple[tuple[str, tuple[int, ...]], ...] = ()
    checkpoints: tuple[tuple[str, tuple[int, ...]], ...] = ()
    workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    end_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    part_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    indices: tuple[str, ...] = ()
    heads: Mapping[str, int] = field(default_factory=dict)
    heads_together: int = 1
    units: Mapping[str, int] = field(default_factory=dict)
    state: str = "kv"
    state_dtype: str = "float32"
    pool: bool = False
    in_place: bool = False
    strided: bool = False
    cleared: bool = False
    part_cost: PartCost | None = None
    part_chunks: int = 0
    most: int = 0
    summaries: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    warm_ups: bool = False
    forms: Mapping[str, str] = field(default_factory=dict)
    decays: tuple[str, ...] = ()
    tf32: bool = False
    check_chunks: int = 3

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of a call's tensors, in the order in which the host holds them."""
        return (*(row[0] for rows in self.ORDER for row in getattr(self, rows)), *self.indices)

    def place(self, rows: str) -> slice:
        """Where, among `tensors`, those of a field stand."""
        before = self.ORDER[:self.ORDER.index(rows)]
        first = sum(len(getattr(self, n)) for n in before)
        return slice(first, first + len(getattr(self, rows)))

    @property
    def outs(self) -> tuple[str, ...]:
        """The arguments that say where outputs go."""
        return ("out",) if len(self.outputs) == 1 else tuple(f"out_{row[0]}" for row in self.outputs)

    def kernel(self, name: str) -> tuple[str, str, int, tuple[str, ...], tuple[str, ...]]:
        """The row of a kernel."""
        return next(row for row in self.kernels if row[0] == name)
