"""prefetch: runs state-free ops of a walk one iteration ahead. `arrange` calls it for devices with cores. It needs stage "fed",
and keeps it.

The prefetched ops come first in the body. They are marked `ahead` and work for the next chunk. Copies of them before the loop
work for the first chunk. Values that the other ops read of them are carried from one iteration to the next, in storage of two
slots. The last iteration has no next chunk, so they do nothing there.

The schedule's option `prefetch` selects the ops:
- "loads": loads of tensors that this kernel does not write, with the `valid` after them.
- "operands": of these, the ones that the agent of products runs.
- "all": all ops that do not depend on a state, except those whose result would stay in a space of the products.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...devices import Cores
from ...ir.core import Carry, Kernel, Loop, Op, Program, Stmt, map_loops, types
from ...ir.ops import OPS
from ...ir.types import Tile
from ..storage.offsets import WIDTH
from ..storage.pack import VIEWS


def prefetch(p: Program, k: Kernel, what: str, device: Cores) -> Kernel:
    """`k` with its prefetched ops one iteration ahead. what: the schedule's `prefetch`. `k` itself if it walks no chunks."""
    if what == "no" or k.grid != "sequences":
        return k
    return replace(k, body=map_loops(k.body, lambda items: [
        replace(items, body=map_loops(items.body, lambda chunks: _ahead(p, k, chunks, what, device)))]))


class _Early:
    """Selects the prefetched ops of a loop."""

    def __init__(self, p: Program, k: Kernel, loop: Loop, what: str, device: Cores) -> None:
        self.ops = [o for o in loop.body if isinstance(o, Op)]
        self.type, self.device, self.sizes = types(k.body), device, {**p.sizes, **k.sizes}
        self.index = {t.name: t.index for t in p.tensors}
        self.made_by = {o.out: o for o in self.ops if o.out}
        self.writers: dict[str, list[Op]] = {}
        for o in self.ops:
            if o.kind == "store":
                self.writers.setdefault(o.attr("tensor"), []).append(o)
        self.carried = {c.name for c in loop.carried}
        self.next = {c.next for c in loop.carried}
        self.prefetched = {o for o in self.ops if self.wanted(o, what)}
        while self.drop():
            pass

    def wanted(self, o: Op, what: str) -> bool:
        """Whether `what` asks for `o`, before dependencies are considered."""
        if o.kind in ("const", "scalar") or o.out in self.next:
            return False
        if what == "all":
            return o.kind != "store" or self.index[o.attr("tensor")] == "block"
        if what == "operands" and o.agent != self.device.runs["matmul"]:
            return False
        if o.kind == "load":
            return self.index[o.attr("tensor")] in ("token", "slot") and o.attr("tensor") not in self.writers
        return o.kind == "valid" and not o.attr("given")

    def light(self, o: Op) -> bool:
        """Whether `o` is so cheap that it may run twice: it has no storage, or is a number."""
        return o.kind in VIEWS or self.type[o.out].rank == 0

    def before(self, o: Op) -> list[Op]:
        """The ops that must come before `o` in its iteration."""
        return [self.made_by[a] for a in o.args if a in self.made_by] + \
            (self.writers.get(o.attr("tensor"), []) if o.kind == "load" else [])

    def kept(self) -> list[Op]:
        """The ops of this iteration, with copies of the light ops through which they read prefetched values."""
        need = {a for o in self.ops if o not in self.prefetched for a in o.args}
        for o in reversed(self.ops):
            if o.out in need and self.light(o):
                need |= set(o.args)
        return [o for o in self.ops if o not in self.prefetched or (o.out in need and self.light(o))]

    def crossing(self) -> list[Op]:
        """The prefetched ops whose values ops of this iteration read."""
        need = {a for o in self.kept() for a in o.args}
        return [o for o in self.ops if o in self.prefetched and o.out in need and not self.light(o)]

    def drop(self) -> bool:
        """Remove ops that read values of this iteration, then one op whose value cannot be carried. False if there is no such
        op."""
        late = {o for o in self.ops if o not in self.prefetched and o.kind not in ("const", "scalar")}
        while found := [o for o in self.ops if o in self.prefetched and (any(x in late for x in self.before(o))
                                                                    or self.carried & set(o.args))]:
            self.prefetched.difference_update(found)
            late.update(o for o in found if o.kind not in ("const", "scalar"))
        crossing = self.crossing()
        for o in crossing:
            if o.kind == "matmul" or (o.kind == "move" and o.attr("space") in self.device.feeds) or self.smaller(o, crossing):
                self.prefetched.remove(o)
                return True
        return False

    def smaller(self, o: Op, crossing: list[Op]) -> bool:
        """Whether it is cheaper to carry the operands of `o` than its result: they take fewer bytes, and no prefetched op reads
        the result."""
        if not OPS[o.kind].elementwise or any(o.out in x.args for x in self.ops if x in self.prefetched):
            return False
        parts = {a for a in o.args if a in self.made_by and self.made_by[a] not in crossing and self.type[a].rank}
        return sum(map(self.bytes, parts)) < self.bytes(o.out)

    def bytes(self, a: str) -> int:
        """The bytes of the whole value."""
        t = self.type[a]
        return prod(t.shape(self.sizes)) * WIDTH[t.dtype]


def _ahead(p: Program, k: Kernel, loop: Loop, what: str, device: Cores) -> list[Stmt]:
    """The loop with its prefetched ops for the next chunk, and before it the same ops for the first chunk."""
    e = _Early(p, k, loop, what, device)
    taken = set(types(k.body))

    def fresh(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    def copies(suffix: str) -> tuple[list[Op], dict[str, str]]:
        names: dict[str, str] = {}
        out = []
        for o in e.ops:
            if o not in e.prefetched:
                continue
            if o.out:
                names[o.out] = fresh(f"{o.out}_{suffix}")
            out.append(replace(o.renamed(names), out=names.get(o.out, "")).with_attrs(ahead=1))
        return out, names

    if not e.prefetched:
        return [loop]
    first, firsts = copies("first")
    then, thens = copies("next")
    numbers = [o for o in e.ops if o.kind in ("const", "scalar")]
    ring = tuple(Carry(o.out, firsts[o.out], thens[o.out], fresh(f"{o.out}_unread"), _type(o), 2) for o in e.crossing())
    body = (*then, *(o for o in e.kept() if o not in numbers))
    return [*numbers, *first, replace(loop, carried=(*loop.carried, *ring), body=body)]


def _type(o: Op) -> Tile:
    assert o.type is not None
    return o.type
