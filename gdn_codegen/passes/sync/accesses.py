"""accesses: the bytes that each op of a placed kernel reads and writes, for `synchronise`. They follow from the buffers of its
operands and of its result. The checker has its own model (prove/accesses.py)."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...devices import Cores
from ...ir.core import Kernel, Loop, Op, Program, Stmt
from ...ir.ops import OPS
from ...ir.rings import rings
from ...ir.types import BYTES
from ..storage.core_values import pipe

Pipe = tuple[str, str]
Path = tuple[int, ...]  # the place of a statement: its index in each body around it, outermost first
Counts = dict[str, int]  # index of a loop -> its current iteration, or after its end, its number of iterations


def pipe_of(device: Cores, o: Op) -> Pipe | None:
    """The pipe that runs `o`. None if `o` is no instruction."""
    if OPS[o.kind].effect == "sync" or (o.out and not o.buffer and not OPS[o.kind].entry):
        return None
    return pipe(device, o)


class Access(NamedTuple):
    """Bytes that an op reads or writes. space: a memory space, or the name of a workspace that a core group shares.

    slots: the number of such ranges, which the iterations of `loop` use in turn. ahead: how many iterations ahead of the
    current one the op works.
    """

    space: str
    low: int
    high: int
    write: bool
    value: str
    slots: int = 1
    loop: str = ""
    ahead: int = 0

    def at(self, counts: Counts) -> Access:
        """The range in an iteration."""
        if self.slots == 1:
            return self
        shift = (counts.get(self.loop, 0) + self.ahead) % self.slots * (self.high - self.low)
        return self._replace(low=self.low + shift, high=self.high + shift)


def accesses(p: Program, k: Kernel, device: Cores) -> dict[Path, list[Access]]:
    """The accesses of each op, by the op's place. k: a kernel with buffers."""
    buffers = {b.name: b for b in k.buffers}
    shared = {t.name: t.slots for t in p.tensors if t.index == "block"}
    defs = {o.out: o for o in k.ops if o.out}
    ring = rings(k)

    def memory(name: str, write: bool, value: str, stored: str = "") -> Access:
        """The access to a buffer."""
        b = buffers[name]
        n = BYTES[b.dtype]
        for d in b.shape:
            n *= d
        return Access(b.space, b.offset, b.offset + n, write, value, b.slots, *ring.get(stored, ()))

    where: dict[str, str] = {o.out: o.buffer for o in k.ops if o.buffer}
    _carried(k.body, where)

    def source(name: str) -> str | None:
        """The value with a buffer from which `name` is read."""
        while name not in where:
            o = defs.get(name)
            if o is None or OPS[o.kind].number or OPS[o.kind].entry:
                return None
            name = o.args[0]
        return name

    out: dict[Path, list[Access]] = {}
    for path, loop, o in _places(k.body):
        if pipe_of(device, o) is None:
            continue
        found = [memory(where[s], False, a, s) for a in o.args if (s := source(a))]
        if o.buffer:
            found.append(memory(o.buffer, True, o.out, o.out))
        if f"{o.out}_scratch" in buffers:
            found.append(memory(f"{o.out}_scratch", True, f"{o.out}_scratch"))
        if any(a in defs and defs[a].kind == "col" for a in o.args):
            space, low, high = device.column_scratch
            found.append(Access(space, low, high, True, "scratch of a column"))
        if o.kind in ("load", "store") and o.attr("tensor") in shared:
            tensor = o.attr("tensor")
            found.append(Access(tensor, 0, 1, o.kind == "store", tensor, shared[tensor], loop, o.attr("ahead", 0)))
        out[path] = found
    return out


def _places(body: tuple[Stmt, ...], path: Path = (), loop: str = "") -> Iterator[tuple[Path, str, Op]]:
    """Every op in program order, with its place and the index of the innermost loop around it."""
    for i, s in enumerate(body):
        if isinstance(s, Loop):
            yield from _places(s.body, (*path, i), s.index)
        else:
            yield (*path, i), loop, s


def _carried(body: tuple[Stmt, ...], where: dict[str, str]) -> None:
    """Add to `where` the buffers of carried values, which are those of their initial values."""
    for s in body:
        if isinstance(s, Loop):
            for c in s.carried:
                where[c.name] = where[c.result] = where[c.init]
            _carried(s.body, where)
