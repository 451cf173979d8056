"""Nodes of the IR: frozen dataclasses, and structured loops with explicit carried values.

A `Program` has the same form at every stage of lowering: tensors in global memory, and kernels that load, compute and store
tiles. Later stages add annotations to nodes (agent, buffer) and further ops (casts, moves, waits). Therefore one interpreter
runs the programs of all stages.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Union

from .types import ONE_HEAD, Agent, Batch, Buffer, Dim, Tensor, Tile


class Line(NamedTuple):
    """The line that an op computes. number: of the page's line; below 0 for a line that a pass added. statement: which one, from
    0, of the statements that passes made of the line."""

    number: int = 0
    statement: int = 0

    def __str__(self) -> str:
        return f"line {self.number}" if self.number > 0 else "no line of the page"


NO_LINE = Line()
#: Attributes, sorted by their names.
Attrs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Op:
    """One operation. out: the name of its result, "" for an op that only has an effect. args: the names of its operands."""

    kind: str
    out: str
    args: tuple[str, ...] = ()
    attrs: Attrs = ()
    type: Tile | None = None
    line: Line = NO_LINE
    agent: str = ""  # the pass `assign` sets it
    buffer: str = ""  # the pass `place` sets it

    def __hash__(self) -> int:  # of the fields that tell most ops apart; passes look ops up in sets
        return hash((self.kind, self.out, self.args or self.attrs))

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, or `default` if the op does not have the attribute."""
        for n, value in self.attrs:  # few; no dict, since passes call this most of all
            if n == name:
                return value
        return default

    def changed(self, out: str | None = None, args: tuple[str, ...] | None = None, type: Tile | None = None,
                line: Line | None = None, agent: str | None = None, buffer: str | None = None) -> Op:
        """The op with other values of these fields, in half the time of `replace`. Passes change many ops."""
        return Op(self.kind, self.out if out is None else out, self.args if args is None else args, self.attrs,
                  self.type if type is None else type, self.line if line is None else line,
                  self.agent if agent is None else agent, self.buffer if buffer is None else buffer)

    def renamed(self, names: dict[str, str]) -> Op:
        """The op with operands renamed. Operands that `names` does not contain keep their names."""
        args = tuple([names.get(a, a) for a in self.args])
        return self if args == self.args else self.changed(args=args)

    def with_attrs(self, **changes: Any) -> Op:
        """The op with these attributes set. An attribute whose new value is None is removed."""
        kept = {**dict(self.attrs), **changes}
        return replace(self, attrs=tuple(sorted((n, v) for n, v in kept.items() if v is not None)))


@dataclass(frozen=True)
class Carry:
    """A loop-carried value. Its name in the body is `name`. It starts as `init`, and each iteration replaces it by `next`.
    Its name after the loop is `result`. slots: how many iterations' values are stored at a time. With 1 slot, `next` overwrites
    `name`. With 2 slots, `next` overwrites the value of the iteration before."""

    name: str
    init: str
    next: str
    result: str
    type: Tile
    slots: int = 1


@dataclass(frozen=True)
class Loop:
    """A loop. index: what it iterates over. "chunk": the chunks of a sequence in order, or of one part in a grid over parts.
    "last": the last chunk of a sequence, if it has one. "before": the chunks of the warm-up before a part. "part": the earlier
    parts of the sequence. "item": the instances that one core group or thread block runs. "columns": pieces of K, of `step`
    columns, in a kernel over chunks. warm_up: the value with the warm-up length: the loop begins this number of chunks before its
    part, if it is positive, and stores nothing there. step: -1 from the last chunk to the first, from where parts are counted.

    A loop "before" with carried values hands them to the next loop, over the chunks of the part. The names in its body are the
    names of the same ops in that loop.
    """

    index: str
    carried: tuple[Carry, ...]
    body: tuple[Stmt, ...]
    warm_up: str = ""
    step: int = 1

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the body, as `walk` gives them. Kept, since passes and checks ask for them often."""
        return tuple(walk(self.body))


Stmt = Union[Op, Loop]


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program. grid: what has an instance. "chunks": each (chunk slot, value head). "sequences": each (sequence,
    value head); the instance loops over its chunks. "parts": each (part slot, value head); the instance loops over the chunks of
    the part. blocked_dim: a dim that the grid cuts into blocks; in the kernel it has the size of a block. batch: the value heads
    that an instance over chunks handles. A load or store says which of them it is for ("head", 0 if it says nothing), or moves
    the values of all ("heads"). agents: of a thread block, if it has several. slices: how many instances share a loop "before" a
    part: of n, instance i processes chunks i, i + n and so on. threads: of a block, or of an instance. registers: of a thread at
    launch. blocks_per_sm: blocks that share a multiprocessor. lanes: neighbours that share a row of a tile, for single tokens;
    piece: columns of it that each moves at once. one_loop: agents that run the same ops over a warm-up and over the part, as one
    loop. by_length: whether the longest sequences start first. places: where a kernel stored the chunks of parts, if one chooses
    them. by_part: whether a launch is for one part of each sequence. start: see passes/launch/overlapping.py. 0: not set."""
    name: str
    grid: str
    body: tuple[Stmt, ...]
    dims: tuple[tuple[str, int], ...] = ()
    blocked_dim: str = ""
    buffers: tuple[Buffer, ...] = ()
    batch: Batch = ONE_HEAD
    agents: tuple[Agent, ...] = ()
    slices: int = 1
    threads: int = 0
    registers: int = 0
    blocks_per_sm: int = 0
    lanes: int = 0
    piece: int = 0
    one_loop: tuple[str, ...] = ()
    by_length: bool = False
    places: str = ""
    by_part: bool = False
    start: str = ""
    comments: tuple[tuple[Line, str], ...] = ()

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the kernel, as `walk` gives them. Kept, since passes and checks ask for them often."""
        return tuple(walk(self.body))

    @cached_property
    def step(self) -> int:
        """-1 if the kernel walks from a sequence's last chunk to its first, else 1. Kept, since each access to memory asks."""
        return min((1, *(lp.step for lp in loops(self.body))))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of dims in the kernel that differ from the program's: the block size of the blocked dim."""
        return dict(self.dims)


@dataclass(frozen=True)
class Program:
    """A whole computation. dims: the sizes of C, K and V in tiles. source: the lines of the page, for comments. launch: "kernels"
    for launches of each kernel, "overlapping" for such that start before earlier ones have ended, "single" for one launch of all.
    forgets: a value for each token, or each token and row of the state: an upper bound of the log of the factor that multiplies
    the state; "" for none. scales: values with one entry for each token that multiply rows of tiles. extents: the sizes of dims
    in callers' tensors, if tiles are padded to more: loads give zeros there; stores leave it out. tokens: of a chunk, 0 for C."""

    name: str
    stage: str
    tensors: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]
    scalars: tuple[str, ...] = ()
    dims: tuple[tuple[str, int], ...] = ()
    source: tuple[tuple[int, str], ...] = field(default=())
    launch: str = "kernels"
    forgets: str = ""
    scales: tuple[str, ...] = ()
    extents: tuple[tuple[str, int], ...] = ()
    tokens: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of tiles, by dim."""
        return dict(self.dims)

    @property
    def memory(self) -> dict[str, int]:
        """The sizes of C, K and V in callers' tensors."""
        return {**self.sizes, **dict(self.extents)}

    def shape(self, t: Tensor) -> tuple[int, ...]:
        """The shape of a tile of `t` in memory. Tensors `in_tiles` include the padding, and others do not."""
        return t.tile.shape(self.sizes if t.in_tiles else self.memory)

    def padded(self, t: Tensor) -> tuple[bool, ...]:
        """For each dim of `t`: whether the tile is larger than the tensor in memory."""
        return tuple(not t.in_tiles and d in dict(self.extents) for d in t.dims)

    @property
    def walk(self) -> Loop:
        """The loop over chunks. The program must have one kernel, as a traced program has."""
        (k,) = self.kernels
        return next(s for s in k.body if isinstance(s, Loop))

    def with_walk(self, loop: Loop) -> Program:
        """The program with its `walk` replaced by `loop`."""
        return self.map_kernels(lambda k: replace(k, body=map_loops(k.body, lambda s: [loop])))

    def map_kernels(self, each: Callable[[Kernel], Kernel]) -> Program:
        """The program with `each` applied to every kernel. A kernel that stays equal stays the same object."""
        done = [(k, each(k)) for k in self.kernels]
        return replace(self, kernels=tuple(k if new == k else new for k, new in done))

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name. KeyError, which lists the tensors, if there is none."""
        for t in self.tensors:
            if t.name == name:
                return t
        raise KeyError(f"{self.name}: no tensor {name!r}; there are {', '.join(t.name for t in self.tensors)}")

    @property
    def skips(self) -> str:
        """The tensor with negative numbers for sequences that are skipped: their instances only clear rows."""
        return next((t.at for t in self.role("input") if t.at and t.index == "sequence"), "")

    def clears(self, k: Kernel) -> tuple[Tensor, ...]:
        """The outputs in which `k` writes zeros to the rows that no sequence covers. `k` also stores these outputs."""
        stored = {o.attr("tensor") for o in k.ops if o.kind == "store"}
        return tuple(t for t in self.tensors if t.cleared and t.name in stored)

    def role(self, role: str) -> tuple[Tensor, ...]:
        """The tensors of a role: "input", "output" or "workspace"."""
        return tuple(t for t in self.tensors if t.role == role)


def walk(body: tuple[Stmt, ...]) -> Iterator[Op]:
    """Every op of a body in program order, including ops in loops."""
    return iter([o for s in body for o in ((s,) if isinstance(s, Op) else s.ops)])


def map_ops(body: tuple[Stmt, ...], each: Callable[[Op], Iterable[Stmt]]) -> tuple[Stmt, ...]:
    """The body with every op replaced by the statements that `each` returns, including ops in loops."""
    return tuple(x for s in body for x in (
        [replace(s, body=map_ops(s.body, each))] if isinstance(s, Loop) else each(s)))


def map_loops(body: tuple[Stmt, ...], each: Callable[[Loop], Iterable[Stmt]]) -> tuple[Stmt, ...]:
    """The body with every outer loop replaced by the statements that `each` returns. Inner loops are not visited."""
    return tuple(x for s in body for x in (each(s) if isinstance(s, Loop) else [s]))


def loops(body: tuple[Stmt, ...]) -> Iterator[Loop]:
    """Every loop of a body. An outer loop comes before its inner loops."""
    for s in body:
        if isinstance(s, Loop):
            yield s
            yield from loops(s.body)


def without_tail(s: Stmt) -> Stmt:
    """A statement without what tells the two loops of a walk with a warm-up apart: only the part has a ragged tail."""
    return s.with_attrs(tail=None, begun=None) if isinstance(s, Op) else s


def repeats(before: Loop, part: Loop, agent: str) -> bool:
    """Whether an agent has ops in a loop over a warm-up, and the same ones in the loop over the part."""
    first, second = ([o for o in lp.ops if o.agent == agent] for lp in (before, part))
    return bool(first) and first == second


def uses(body: tuple[Stmt, ...]) -> dict[str, int]:
    """How many times each value is read. A loop reads `init` and `next` of its carried values, and its warm-up length."""
    n: dict[str, int] = {}
    for a in (a for op in walk(body) for a in op.args):
        n[a] = n.get(a, 0) + 1
    for lp in loops(body):
        for a in (*(x for c in lp.carried for x in (c.init, c.next)), *([lp.warm_up] if lp.warm_up else [])):
            n[a] = n.get(a, 0) + 1
    return n


def types(body: tuple[Stmt, ...]) -> dict[str, Tile]:
    """The type of every value defined in a body."""
    env: dict[str, Tile] = {}
    for op in walk(body):
        if op.out:
            assert op.type is not None
            env[op.out] = op.type
    for lp in loops(body):
        for c in lp.carried:
            env[c.name] = env[c.result] = c.type
    return env


__all__ = ["NO_LINE", "Agent", "Batch", "Buffer", "Carry", "Dim", "Kernel", "Line", "Loop", "Op", "Program", "Stmt", "Tensor",
           "Tile", "loops", "map_loops", "map_ops", "repeats", "types", "uses", "walk", "without_tail"]
