"""prefetched_ops: selects the ops of a walk that `prefetch` runs one iteration ahead.

They are what the schedule asks for, less ops that depend on a value of the current iteration, and less ops whose result cannot
or need not be carried to the next iteration.
"""
from __future__ import annotations

from math import prod

from ...devices import Cores
from ...ir.core import Kernel, Loop, Op, Program, types
from ...ir.ops import OPS
from ...ir.types import BYTES
from ..storage.core_values import is_view


class PrefetchedOps:
    """The ops of a loop, and which of them are prefetched. what: the schedule's `prefetch`.

    prefetched: their numbers. ops: all ops of the loop, by number.
    """

    def __init__(self, p: Program, k: Kernel, loop: Loop, what: str, device: Cores) -> None:
        """Selects the ops that `what` asks for, and drops those that cannot run ahead until no more have to be dropped."""
        self.ops = [o for o in loop.body if isinstance(o, Op)]
        self.type, self.device, self.sizes = types(k.body), device, {**p.sizes, **k.sizes}
        self.index = {t.name: t.index for t in p.tensors}
        self.made_by = {o.out: n for n, o in enumerate(self.ops) if o.out}
        self.writers: dict[str, list[int]] = {}
        for n, o in enumerate(self.ops):
            if o.kind == "store":
                self.writers.setdefault(o.attr("tensor"), []).append(n)
        loads = [(n, o.attr("tensor")) for n, o in enumerate(self.ops) if o.kind == "load"]
        self.readers = {n: [m for m, read in loads if read == t] for t, stores in self.writers.items() for n in stores}
        carried, self.next = {c.name for c in loop.carried}, {c.next for c in loop.carried}
        #: Constants and numbers of the call are the same in every iteration.
        self.constant = {n for n, o in enumerate(self.ops) if OPS[o.kind].number}
        self.before = [self._before(o) for o in self.ops]
        self.prefetched = {n for n, o in enumerate(self.ops) if self._wanted(o, what) and carried.isdisjoint(o.args)}
        self._drop_late()
        while self._drop_result():
            self._drop_late()

    def _wanted(self, o: Op, what: str) -> bool:
        """Whether `what` asks for `o`, before dependencies are considered."""
        if OPS[o.kind].number or o.out in self.next:
            return False
        if what == "all":
            return o.kind != "store" or self.index[o.attr("tensor")] == "block"
        if what == "operands" and o.agent != self.device.runs["matmul"]:
            return False
        if o.kind == "load":
            return self.index[o.attr("tensor")] in ("token", "slot") and o.attr("tensor") not in self.writers
        return o.kind == "valid" and not o.attr("given")

    def _before(self, o: Op) -> list[int]:
        """The ops that must come before `o` in its iteration, without constants."""
        written = self.writers.get(o.attr("tensor"), []) if o.kind == "load" else []
        return [n for n in (*(self.made_by[a] for a in o.args if a in self.made_by), *written) if n not in self.constant]

    def _drop_late(self) -> None:
        """Remove ops that depend on an op that is not prefetched, and stores to a channel that this iteration reads."""
        while late := [n for n in self.prefetched if not self.prefetched.issuperset(self.before[n])
                       or (self.ops[n].kind == "store" and not self.prefetched.issuperset(self.readers[n]))]:
            self.prefetched.difference_update(late)

    def _drop_result(self) -> bool:
        """Remove the first op whose result cannot be carried, or whose operands take less storage. False if there is none."""
        crossing = self.crossing()
        for n in crossing:
            o = self.ops[n]
            fed = o.kind == "move" and o.attr("space") in self.device.feeds
            if o.kind == "matmul" or fed or o.attr("spread") or self._only_stored(o) or self._larger(o, crossing):
                self.prefetched.remove(n)
                return True
        return False

    def _only_stored(self, o: Op) -> bool:
        """Whether `o` is a rounded product that nothing but stores read. The store rounds it, from where products are."""
        return o.kind == "cast" and o.agent == self.device.runs["matmul"] \
            and all(r.kind == "store" for r in self.ops if o.out in r.args)

    def _larger(self, o: Op, crossing: list[int]) -> bool:
        """Whether the result of `o` takes more bytes than its operands, and no prefetched op reads it."""
        if not OPS[o.kind].elementwise or any(o.out in self.ops[n].args for n in self.prefetched):
            return False
        parts = {a for a in o.args if a in self.made_by and self.made_by[a] not in crossing and self.type[a].rank}
        return sum(map(self._bytes, parts)) < self._bytes(o.out)

    def _bytes(self, a: str) -> int:
        """The bytes of the whole value."""
        t = self.type[a]
        return prod(t.shape(self.sizes)) * BYTES[t.dtype]

    def _light(self, o: Op) -> bool:
        """Whether `o` is so cheap that it may run twice: it has no storage, or is a number."""
        return is_view(o) or self.type[o.out].rank == 0

    def _read_now(self) -> set[str]:
        """The values that ops of the current iteration read, directly or through light ops."""
        need = {a for n, o in enumerate(self.ops) if n not in self.prefetched for a in o.args}
        for o in reversed(self.ops):
            if o.out in need and self._light(o):
                need |= set(o.args)
        return need

    def kept(self) -> list[Op]:
        """The ops of this iteration, with copies of the light ops through which they read prefetched values."""
        need = self._read_now()
        return [o for n, o in enumerate(self.ops) if n not in self.prefetched or (o.out in need and self._light(o))]

    def crossing(self) -> list[int]:
        """The prefetched ops whose values ops of this iteration read."""
        need = self._read_now()
        return [n for n, o in enumerate(self.ops) if n in self.prefetched and o.out in need and not self._light(o)]
