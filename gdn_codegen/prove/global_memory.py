"""global_memory: the tiles in global memory that ops of a kernel use, for `check_waits`.

Only memory matters to which a kernel stores and which another of its ops uses, too. Tensors with `over` share the memory of
another one.
- Each item of the grid has its own tiles. Of a tensor of tokens or chunk slots, each chunk has one. All others, such as states,
  have one tile in an item, and so do slots of a pool, wherever the caller's integers say that they lie.
- A core of an agent uses its rows of a tile, its columns (`columns`), or the whole tile if its buffer has as many rows. It loads
  a vector as a whole, and stores its part of one.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from ..devices import Cores
from ..ir.core import Kernel, Op, Program
from .accesses import Bytes, Iterations, Memory, Range

#: Indices of tensors with a tile for each chunk.
BY_CHUNK = ("token", "slot")


class GlobalMemory:
    """The global memory that a kernel both writes and uses otherwise.

    used: tensor -> the tensor whose memory it uses, for tensors in such memory. exposed: the agents of which a core stores to
    what another core uses, too.
    """

    def __init__(self, p: Program, k: Kernel, device: Cores, memory: Memory) -> None:
        """Finds this memory and these agents. memory: that on the chip."""
        self.p, self.device, self.memory = p, device, memory
        self.sizes = {**p.sizes, **k.sizes}
        ops: dict[str, list[Op]] = {}
        for o in k.ops:
            if o.attr("tensor"):
                t = p.tensor(o.attr("tensor"))
                ops.setdefault(t.over or t.name, []).append(o)
        stored = {m: x for m, x in ops.items() if len(x) > 1 and any(o.kind == "store" for o in x)}
        self.used = {o.attr("tensor"): m for m, x in stored.items() for o in x}
        self.exposed = {a for x in stored.values() for a, o in self.shared(x)}
        # Flags between agents order what they exchange in channels. The cores of one agent need more.
        self.used = {t: m for t, m in self.used.items()
                     if p.tensor(t).index != "block" or any(o.agent in self.exposed for o in stored[m])}

    def shared(self, ops: list[Op]) -> Iterator[tuple[str, Op]]:
        """Each agent of which a core stores to what another core uses, with the op that stores. ops: those on one memory."""
        for o, other in product(ops, ops):
            if o.kind == "store" and other.agent == o.agent and self.device.copies[o.agent] > 1 \
                    and self.part(o, 0).overlaps(self.part(other, 1)):
                yield o.agent, o

    def part(self, o: Op, core: int) -> Bytes:
        """The rows and columns of a tile that a core of the op's agent loads or stores."""
        t, cores = self.p.tensor(o.attr("tensor")), self.device.copies[o.agent]
        rows, columns = (*t.tile.shape(self.sizes), 1, 1)[:2]
        first, last, left, right = 0, rows, 0, columns
        if o.attr("piece"):
            left, size = o.attr("piece")
            right = left + (size if isinstance(size, int) else self.sizes[size])
        if cores > 1 and not o.attr("heads") and not o.attr("last"):
            if o.attr("columns"):
                left, right = core * columns // cores, (core + 1) * columns // cores
            elif o.kind == "store" if len(t.dims) == 1 else self.rows(o) < rows:
                first, last = core * rows // cores, (core + 1) * rows // cores
        return Bytes(f"{t.over or t.name}{o.attr('head') or ''}", first, last, left, right)

    def rows(self, o: Op) -> int:
        """The rows of the buffer that an op loads to or stores from."""
        name = o.buffer or self.memory.home[next(self.memory.parts(o.args[0]))]
        return self.memory.buffers[name].shape[0]

    def range(self, o: Op, core: int, loop: str) -> Callable[[Iterations], Range] | None:
        """The function that gives what a core uses in an iteration. None for an op that uses no such memory. loop: the innermost
        loop around the op."""
        name = str(o.attr("tensor"))
        if name not in self.used:
            return None
        part, ahead, t = self.part(o, core), o.attr("ahead", 0), self.p.tensor(name)
        apart = t.index in BY_CHUNK and not t.at

        def range_of(at: Iterations) -> Range:
            if t.index == "block":
                place = f"{part.space}, tile {(at.get(loop, 0) + ahead) % t.slots}"
            else:
                place = f"{part.space} of item {at.get('item', 0)}"
                place += f", chunk {at['chunk'] + ahead if loop == 'chunk' else ahead - 1}" if apart else ""
            return Range(part._replace(space=place), o.kind == "store", name)
        return range_of
