"""op_costs: what the ops of a kernel cost on a device with cores, for `list_scheduling`. They follow from the device's rates."""
from __future__ import annotations

from math import prod

from ...devices import Cores
from ...ir.core import Kernel, Op, Program, types
from ...ir.ops import OPS
from ...ir.types import BYTES
from ..storage.core_values import is_view, pipe
from ..uses import readers
from .dependences import Dependences
from .live_values import Room


class OpCosts:
    """What the ops of a kernel cost: cycles of a pipe, and bytes of a space."""

    def __init__(self, p: Program, k: Kernel, device: Cores) -> None:
        self.device, self.sizes, self.type = device, {**p.sizes, **k.sizes}, types(k.body)
        read_by = readers(k.body)
        self.reads = {a: len(found) for a, found in read_by.items()}
        self.loaded_by = {o.out: o.agent for o in k.ops if o.kind == "load"}
        #: Casts that the copy to global memory does, without storage.
        self.rounded = {o.out for o in k.ops if o.kind == "cast" and o.agent != device.agents[0]
                        and all(r.kind == "store" for r, _ in read_by.get(o.out, ()))}

    def elements(self, a: str, agent: str) -> int:
        """The elements of `a` on one core of `agent`."""
        shape = self.type[a].shape(self.sizes)
        return prod(shape) // (self.device.copies[agent] if len(shape) == 2 else 1)

    def cycles(self, o: Op) -> float:
        """The cycles for which `o` occupies its pipe. 0 for an op without an instruction."""
        if (is_view(o) and not OPS[o.kind].entry) or o.kind == "valid" or o.out in self.rounded:
            return 0
        on = pipe(self.device, o)
        if o.kind == "matmul":
            work = self.elements(o.out, o.agent) * self.type[o.args[0]].shape(self.sizes)[0 if o.attr("ta") else 1]
            return work / self.device.rates[on]
        value = o.args[1] if o.kind == "insert" else o.out or o.args[0]
        width = max([BYTES[self.type[x].dtype] for x in (*o.args, value)])
        return 4 + self.elements(value, o.agent) * width / self.device.rates.get(on, 1024)

    def need(self, o: Op, d: Dependences) -> Room:
        """The space in which `o` needs a new buffer, and the buffer's bytes. "" and 0 if it needs none."""
        if not o.out or d.storage(o.out) != o.out or not self.type[o.out].rank:
            return "", 0
        space = str(o.attr("space")) if o.kind == "move" else self.device.product if o.kind == "matmul" else \
            self.device.home[o.agent]
        return space, self.elements(o.out, o.agent) * BYTES[self.type[o.out].dtype]

    def from_before(self, a: str) -> Room:
        """The space and the bytes of a value that is computed before a run."""
        agent = self.loaded_by.get(a, self.device.agents[0])
        return self.device.home[agent], self.elements(a, agent) * BYTES[self.type[a].dtype]
