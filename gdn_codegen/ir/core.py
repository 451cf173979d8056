"""Nodes of the IR: frozen dataclasses, structured loops with explicit carried values.

A `Program` is the same thing at every stage of lowering: tensors in global memory and kernels that load, compute and
store tiles. What a stage adds is written on the nodes (agent, buffer) or as further ops (casts, moves, waits), so that
one interpreter gives all of them a meaning.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Union

from .types import Dim, Tensor, Tile


@dataclass(frozen=True)
class Op:
    """One operation. `out` is the name of its value ("" for an effect), `args` name the values it reads."""

    kind: str
    out: str
    args: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    type: Tile | None = None
    line: int = 0  # in the algorithm's page; 0 where a pass made it
    agent: str = ""  # set by `assign`
    buffer: str = ""  # set by `place`

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute's value, or the default where the op does not have it."""
        return dict(self.attrs).get(name, default)

    def renamed(self, names: dict[str, str]) -> Op:
        """The op with its arguments renamed."""
        return replace(self, args=tuple(names.get(a, a) for a in self.args))

    def with_attrs(self, **changes: Any) -> Op:
        """The op with attributes set, or taken out where the change is None."""
        kept = {**dict(self.attrs), **changes}
        return replace(self, attrs=tuple(sorted((n, v) for n, v in kept.items() if v is not None)))


@dataclass(frozen=True)
class Carry:
    """A loop-carried value: `name` inside the body starts as `init`, becomes `next`, and is `result` after.

    slots: iterations it keeps storage for. With 1, `next` takes the place of `name`; with 2, that of the iteration before.
    """

    name: str
    init: str
    next: str
    result: str
    type: Tile
    slots: int = 1


@dataclass(frozen=True)
class Loop:
    """A walk in order over the chunks of a sequence; of a part, in a grid over parts. Index "part": over the parts of the
    sequence before this one. Index "item": over the instances that one core group takes.

    warm_up: the value with the warm-up length: how many chunks before its part a walk begins, none where it is negative.
    Stores of the body do nothing in these iterations.
    """

    index: str
    carried: tuple[Carry, ...]
    body: tuple[Stmt, ...]
    warm_up: str = ""


Stmt = Union[Op, Loop]


@dataclass(frozen=True)
class Buffer:
    """Storage that `place` gave to values: `slots` copies of `shape` elements in `space`, at byte `offset`.

    dims: what `shape` has the sizes of. layout: "swizzled" (rows of 128 bytes, as helpers address them), "rows" (a fragment of
    which neighbouring threads have equal parts of a row), "" where the compiler chooses. pad: elements that nobody reads after
    each row of a buffer with a row a value head. own: whether a barrier counts the iterations of the walk's own part alone.
    """

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    slots: int = 1
    agent: str = ""
    dims: tuple[Dim, ...] = ()
    layout: str = ""
    pad: int = 0
    own: bool = False


@dataclass(frozen=True)
class Agent:
    """Threads of a block that run ops of their own, `first` and the next; registers: of each; slots: of rings that they fill."""

    name: str
    first: int
    threads: int
    registers: int
    slots: int = 1


@dataclass(frozen=True)
class Kernel:
    """One launch. grid "chunks": an instance a (chunk slot, head); "sequences": a (sequence, head) that loops; "parts": a
    (part slot, head) that loops over the chunks of a part, of which a sequence has one or more.

    `split` names a dim that the grid cuts into blocks: inside the kernel that dim has the block's size.
    `lanes` instances, of consecutive value heads, are one item: a load or store says which it belongs to, or that it moves
    the values of all of them ("heads"). `agents`: the threads of each, where they share a block. `heads_per_block`: instances, of
    consecutive value heads, that one thread block runs; no op knows of it. `slices`: instances that share the iterations of a
    loop over chunks "before" a part: of n, instance i handles chunks i, i + n, i + 2 n and so on.

    threads: of a block, or of an instance; registers: of a thread at launch; blocks_per_sm: blocks that share a multiprocessor.
    All are 0 where nothing is said. comments: what is computed on lines of the page that are not computed as they stand.
    """

    name: str
    grid: str
    body: tuple[Stmt, ...]
    dims: tuple[tuple[str, int], ...] = ()
    split: str = ""
    buffers: tuple[Buffer, ...] = ()
    lanes: int = 1
    agents: tuple[Agent, ...] = ()
    heads_per_block: int = 1
    slices: int = 1
    threads: int = 0
    registers: int = 0
    blocks_per_sm: int = 0
    comments: tuple[tuple[int, str], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Extents of dims inside the kernel, where they differ from the program's: the block of the split dim."""
        return dict(self.dims)


@dataclass(frozen=True)
class Program:
    """A whole computation. dims: full extents of C, K, V; source: the algorithm's lines, for comments; launch: "kernels"
    for one launch a kernel, "single" for one in all, with barriers over the device between them; forgets: the value, one a
    token, that is a bound of log(what of the carried state a token keeps), "" where the page has none; scales: values, one a
    token, of which tiles' rows are multiples; extents: those that callers' tensors have of a dim, where tiles are padded beyond
    them. Past them a load gives zeros, and nothing is stored."""

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

    @property
    def sizes(self) -> dict[str, int]:
        """Extents of tiles by dim."""
        return dict(self.dims)

    @property
    def memory(self) -> dict[str, int]:
        """What callers' tensors have of C, K, V."""
        return {**self.sizes, **dict(self.extents)}

    def shape(self, t: Tensor) -> tuple[int, ...]:
        """A tile of `t` as it lies in memory: workspaces hold the padding."""
        return t.tile.shape(self.sizes if t.role == "workspace" else self.memory)

    def padded(self, t: Tensor) -> tuple[bool, ...]:
        """Of each dim of a tile of `t`, whether memory has less than the tile."""
        return tuple(t.role != "workspace" and d in dict(self.extents) for d in t.dims)

    def describes(self, k: Kernel, o: Op) -> bool:
        """Whether a load of `k` may go by a descriptor of its sequence's rows: it moves a tile of them, as wide as the tensor,
        as it lies in memory and without a condition."""
        t = self.tensor(o.attr("tensor"))
        plain = not (o.args or o.attr("ahead") or o.attr("transposed") or t.strided or any(self.padded(t)))
        return plain and t.index == "token" and len(t.dims) == 2 and k.split not in t.dims and k.grid != "chunks"

    @property
    def walk(self) -> Loop:
        """The loop over the chunks of a program that is one walk, as a traced one is."""
        (k,) = self.kernels
        return next(s for s in k.body if isinstance(s, Loop))

    def with_walk(self, loop: Loop) -> Program:
        """The program with `loop` in the place of its `walk`."""
        return self.map_kernels(lambda k: replace(k, body=map_loops(k.body, lambda s: [loop])))

    def map_kernels(self, each: Callable[[Kernel], Kernel]) -> Program:
        """The program with what `each` makes of its kernels."""
        return replace(self, kernels=tuple(map(each, self.kernels)))

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name. KeyError names those that there are."""
        for t in self.tensors:
            if t.name == name:
                return t
        raise KeyError(f"{self.name}: no tensor {name!r}; there are {', '.join(t.name for t in self.tensors)}")

    @property
    def skips(self) -> str:
        """The tensor of index "number" that leaves sequences out: an instance of one whose number is negative clears rows,
        and does nothing else. "" where there is none."""
        return next((t.at for t in self.role("input") if t.at), "")

    def clears(self, k: Kernel) -> tuple[Tensor, ...]:
        """The outputs whose rows that no sequence covers `k` clears: those that it stores."""
        stored = {o.attr("tensor") for o in walk(k.body) if o.kind == "store"}
        return tuple(t for t in self.tensors if t.cleared and t.name in stored)

    def role(self, role: str) -> tuple[Tensor, ...]:
        """The tensors of a role: "input", "output" or "workspace"."""
        return tuple(t for t in self.tensors if t.role == role)


def walk(body: tuple[Stmt, ...]) -> Iterator[Op]:
    """Every op of a body, loops entered, in program order."""
    for s in body:
        if isinstance(s, Loop):
            yield from walk(s.body)
        else:
            yield s


def map_ops(body: tuple[Stmt, ...], each: Callable[[Op], Iterable[Stmt]]) -> tuple[Stmt, ...]:
    """The body with what `each` makes of every op, loops entered."""
    return tuple(x for s in body for x in (
        [replace(s, body=map_ops(s.body, each))] if isinstance(s, Loop) else each(s)))


def map_loops(body: tuple[Stmt, ...], each: Callable[[Loop], Iterable[Stmt]]) -> tuple[Stmt, ...]:
    """The body with what `each` makes of its loops; those inside a loop are left to `each`."""
    return tuple(x for s in body for x in (each(s) if isinstance(s, Loop) else [s]))


def loops(body: tuple[Stmt, ...]) -> Iterator[Loop]:
    """Every loop of a body, the outer before the inner."""
    for s in body:
        if isinstance(s, Loop):
            yield s
            yield from loops(s.body)


def rings(k: Kernel) -> dict[str, tuple[str, int]]:
    """Values whose buffer has several slots: the loop whose iterations take them one after the other, "" before it, and how
    many iterations ahead of the current one the value's slot is."""
    ring = {b.name for b in k.buffers if b.slots > 1}
    out: dict[str, tuple[str, int]] = {}

    def each(body: tuple[Stmt, ...], loop: str) -> None:
        for s in body:
            if isinstance(s, Op):
                if s.buffer in ring:
                    out[s.out] = loop, int(bool(loop))
                continue
            each(s.body, s.index if any(c.slots > 1 for c in s.carried) else loop)
            out.update({x: (s.index, 0) for c in s.carried if c.slots > 1 for x in (c.name, c.result)})
    each(k.body, "")
    return out


def uses(body: tuple[Stmt, ...]) -> dict[str, int]:
    """How often each value is read; a loop reads its carried values' init and next, and its warm-up length."""
    n: dict[str, int] = {}
    for op in walk(body):
        for a in op.args:
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


__all__ = ["Agent", "Buffer", "Carry", "Dim", "Kernel", "Loop", "Op", "Program", "Stmt", "Tensor", "Tile", "loops", "map_loops",
           "map_ops", "rings", "types", "uses", "walk"]
