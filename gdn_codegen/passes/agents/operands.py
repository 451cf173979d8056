"""operands: moves operands to the space from which products read. For TileLang, where products read one space and write
another. Kernels with several agents stay as they are: `warp_groups` has moved their operands.

An operand of a product or of `diag_inverse` moves if it was computed in the products' result space. These are results of
products, carried values, and elementwise results of values in the operands' space. These elementwise ops could write to that
space, but an op that reads and writes the same space waits for each element. So they write to the other space, and their
results move. An operand that an inverse overwrites moves if it has other readers. One of `DECAYED` does if a product
reads it along its columns, because TileLang's compiler may then choose a layout that device code does not expect.

A tile that is stored in a dtype of `Device.staged` moves too, for speed. It is then stored by whole rows, not by the few
entries that each thread holds. States are excluded, because they are stored once in many chunks.
"""
from __future__ import annotations

from ...devices import Device
from ...ir.body import Body
from ...ir.core import Kernel, Op, Program, loops, types, uses
from ...ir.ops import OPS
from ..common import rebuild_kernel
from ..stage import takes
from ..storage.stored_values import DECAYED, OPERANDS, is_view, over


@takes("assigned")
def operands(p: Program, device: Device) -> Program:
    """`p` with moves before its products. `p` itself if products read and write the same space."""
    if device.operand == device.product:
        return p
    return p.map_kernels(lambda k: k if k.agents else rebuild_kernel(p, k, _Operands(p, k, device)))


class _Operands:
    """The rule for one op: moves of its operands to the space in which the device reads them.

    It returns the name of the op's value, "" if there is none, and None if the op stays.
    """
    def __init__(self, p: Program, k: Kernel, device: Device) -> None:
        self.rare = {t.name for t in p.tensors if t.index in ("sequence", "checkpoint")}
        self.device, self.type, self.count = device, types(k.body), uses(k.body)
        self.defs = {o.out: o for o in k.ops if o.out}
        self.carried = {x for lp in loops(k.body) for c in lp.carried for x in (c.name, c.init, c.result)}
        self.next = {x: c.next for lp in loops(k.body) for c in lp.carried for x in (c.name, c.result)}
        self.read = {a for o in k.ops for a in o.args[:OPERANDS.get(o.kind, 0)]}
        self.across = {o.args[1] for o in k.ops if o.kind == "matmul" and not o.attr("tb")}
        self.moved: dict[str, str] = {}

    def __call__(self, o: Op, b: Body) -> str | None:
        """Puts `o` into `b` with operands in the operands' space. A store of a tile in a `staged` dtype gets a move before it."""
        if o.kind == "store" and self.staged(o.args[0]) and o.attr("tensor") not in self.rare:
            x = b.op("move", o.args[0], name=b.fresh(f"{o.args[0]}_out"), line=o.line, agent=o.agent, space="staged")
            b.op("store", x, line=o.line, agent=o.agent, **dict(o.attrs))
            return ""
        if o.kind not in OPERANDS:
            return None
        n = OPERANDS[o.kind]
        if over(o, self.device) and self.count[o.args[0]] > 1:
            sides = [self.copy(o.args[0], o, b)]
        else:
            sides = [self.move(a, o, b) if self.needs_copy(a) or (o.kind in DECAYED and a in self.across) else a
                     for a in o.args[:n]]
        return b.op(o.kind, *sides, *o.args[n:], name=o.out, line=o.line, agent=o.agent, **dict(o.attrs))

    def move(self, a: str, o: Op, b: Body) -> str:
        """`a` in the operands' space. All readers share the move."""
        if a not in self.moved:
            self.moved[a] = self.copy(a, o, b)
        return self.moved[a]

    def copy(self, a: str, o: Op, b: Body) -> str:
        """A new move of `a` to the operands' space."""
        return b.op("move", a, name=b.fresh(f"{a}_{self.device.operand}"), line=o.line, agent=o.agent, space=self.device.operand)

    def staged(self, a: str) -> bool:
        """Whether the stored tile `a` should first move to a space where its rows are whole."""
        return self.type[a].rank == 2 and self.type[a].dtype in self.device.staged and a not in self.read and not self.inverse(a)

    def inverse(self, a: str) -> bool:
        """Whether `a` is an inverse of blocks, which is in the operands' space already, or an expression that reads one."""
        o = self.defs.get(a)
        return o is not None and (o.kind == "diag_inverse" or (OPS[o.kind].elementwise and self.count[a] == 1
                                                               and any(self.inverse(x) for x in o.args)))

    def needs_copy(self, a: str) -> bool:
        """Whether `a` has to be computed outside the operands' space."""
        o = self.defs.get(a)
        if self.loaded_ahead(a):
            return False
        if o is None or a in self.carried or o.kind == "matmul":
            return True
        return OPS[o.kind].elementwise and self.reads_operand_space(o)

    def loaded_ahead(self, a: str) -> bool:
        """Whether `a` is carried by a loop that loads it for its next iteration, or what remains of it after the loop. Its next
        value is written to the operands' space."""
        o = self.defs.get(self.next.get(a, ""))
        return o is not None and o.kind == "if_negative"

    def reads_operand_space(self, o: Op) -> bool:
        """Whether the elementwise op `o` reads a vector or a loaded tile from the operands' space, directly or through
        expressions."""
        for a in o.args:
            x = self.defs.get(a)
            vector, loaded = self.type[a].rank == 1, x is not None and x.kind == "load"
            if (vector and self.device.operand == self.device.vector) or (loaded and self.device.operand == self.device.loaded):
                return True
            inside = x is not None and OPS[x.kind].elementwise and (self.count[a] == 1 or is_view(x))
            if x is not None and inside and self.reads_operand_space(x):
                return True
        return False
