"""transposition: holds the state transposed, for schedules with `state_layout="vk"`. For TileLang and Triton.

In kernels that walk the chunks, a tile whose last dim is V is then held transposed. In those that sum up a part it is also a tile
that is computed from the carried one and has its columns, because the factor of a part is K x K. So the state, or a value
computed from it, is the first operand of products: (a @ b)^T = b^T a^T. Elementwise ops stay, and their column operands become
rows. The initial state, the final state and tensors of tokens are transposed between memory and chip. A load that only products
read is not transposed. The product reads it transposed instead. A workspace has the orientation in which the walk that writes it
holds the tile, unless a kernel over chunks would have to transpose it. Callers' states of chunks are transposed, whichever
kernel writes or reads them. Callers' tiles with a number for each pair of tokens stay as they are.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir.body import Body
from ...ir.core import Kernel, Loop, Op, Program, loops, types, walk
from ...ir.ops import OPS
from ...ir.types import Tile
from ...schedule.schedule import Schedule, ScheduleError
from ..common import dead_code, walks
from ..stage import takes
from .transposed_tensors import SUMS, loaded_transposed, lying, only_for_products, renamed, totalled


@takes("decomposed")
def transpose(p: Program, s: Schedule) -> Program:
    """`p` with the state in the schedule's orientation. `p` itself for "kv". Raises ScheduleError for ops that have no
    transposed form."""
    if s.state_layout == "kv":
        return p
    passes = {k.name: _Transposition(p, k, s) for k in p.kernels if walks(k)}
    over = {o.attr("tensor") for t in passes.values() for o in walk(t.k.body) if o.kind == "store" and t.transposes(o.args[0])}
    over = {n for n in over if p.tensor(n).index == "slot"}
    over |= {t.name for t in p.tensors if t.role != "workspace" and t.index == "slot" and (
        t.dims[1:] == ("V",) or (t.role == "input" and len(t.dims) == 2 and t.dims[0] != "C"))}
    others = [k for k in p.kernels if k.name not in passes]
    over -= {n for k in others for n in loaded_transposed(k, over) if p.tensor(n).role == "workspace"}
    kernels = tuple(passes[k.name].run() if k.name in passes else k for k in p.kernels)
    tensors = tuple(replace(t, dims=t.dims[::-1]) if t.name in over else t for t in p.tensors)
    if over:
        kernels = tuple(lying(k, over, {t.name: t for t in tensors}) for k in kernels)
    return renamed(replace(p, tensors=tensors, kernels=kernels), over)


def _from_state(k: Kernel) -> set[str]:
    """The carried values, their initial values, and all that is computed from them."""
    found = {x for lp in loops(k.body) for c in lp.carried for x in (c.name, c.init, c.result)}
    for o in k.ops:
        found |= {o.out} if found & set(o.args) else set()
    return found


class _Transposition:
    """Rebuilds one kernel that walks the chunks."""
    def __init__(self, p: Program, k: Kernel, s: Schedule) -> None:
        self.p, self.k, self.s = p, k, s
        self.type = types(k.body)
        self.defs = {o.out: o for o in k.ops if o.out}
        self.lies = only_for_products(k)
        self.carried, self.totalled = _from_state(k), totalled(k)
        # the factor of a part has as many columns as rows
        tiles = [c.type.dims for lp in loops(k.body) for c in lp.carried if k.grid == "parts" and c.type.rank > 1]
        self.columns = {("V",), *(dims[1:] for dims in tiles)}
        self.flat: dict[str, str] = {}  # a column or row -> its transpose

    def transposes(self, name: str) -> bool:
        """Whether the value is held transposed."""
        dims = self.type[name].dims[1:]
        return dims in self.columns and (dims == ("V",) or name in self.carried) and name not in self.lies

    def run(self) -> Kernel:
        """The kernel with transposed tiles."""
        b = Body({t.name: t for t in self.p.tensors})
        b.taken = set(self.type)
        self.ops(self.k.body, b)
        return replace(self.k, body=dead_code(b.finish(), set()))

    def ops(self, body: tuple[Op | Loop, ...], b: Body) -> None:
        """Rebuild a body into `b`. Carried values that are held transposed get transposed types."""
        for x in body:
            if isinstance(x, Loop):
                carried = tuple(replace(c, type=c.type.transposed) if self.transposes(c.name) else c for c in x.carried)
                inner = Body(b.tensors, {**b.types, **{c.name: c.type for c in carried}})
                inner.taken = b.taken
                kept, self.flat = self.flat, dict(self.flat)
                self.ops(x.body, inner)
                self.flat = kept
                b.stmts.append(replace(x, carried=carried, body=inner.finish()))
                b.types.update({c.result: c.type for c in carried})
            else:
                self.op(x, b)

    def op(self, o: Op, b: Body) -> None:
        """Rebuild an op into `b`. A product (A B)^T becomes B^T A^T. Loads and stores switch their orientation."""
        def put(*args: str, **attrs: Any) -> None:
            b.op(o.kind, *args, name=o.out, line=o.line, **attrs)

        if o.kind == "store":
            put(*o.args, **{**dict(o.attrs), "transposed": bool(o.attr("transposed")) != self.transposes(o.args[0])})
        elif o.kind == "matmul":
            (a, x), acc = o.args[:2], o.args[2:]
            ta, tb = (bool(o.attr(t)) != self.transposes(y) for t, y in (("ta", a), ("tb", x)))
            if self.transposes(o.out):
                put(x, a, *acc, ta=not tb, tb=not ta)
            else:
                put(a, x, *acc, ta=ta, tb=tb)
        elif o.kind == "row" and self.transposes(o.out):
            b.op("col", *o.args, name=o.out, line=o.line)
        elif o.kind in SUMS and self.transposes(o.args[0]):
            b.op(o.kind if o.out in self.totalled else SUMS[o.kind], *o.args, name=o.out, line=o.line)
        elif not o.out or not self.transposes(o.out):
            if any(self.transposes(a) for a in o.args):
                raise self.error(o)
            b.copy(o)
        elif o.kind in ("load", "resume"):
            put(*o.args, **{**dict(o.attrs), "transposed": not o.attr("transposed")})
        elif OPS[o.kind].elementwise and o.kind not in ("lower", "strictly_lower", "pairs", "halves", "expand"):
            put(*(self.transposed(a, b, o) for a in o.args), **dict(o.attrs))
        elif o.kind == "eye":
            b.copy(o)
        elif o.kind in ("full", "expand"):
            put(*(self.transposed(a, b, o) for a in o.args), **{**dict(o.attrs), "dims": o.attr("dims")[::-1]})
        else:
            raise self.error(o)

    def transposed(self, name: str, b: Body, reader: Op) -> str:
        """The value that takes the place of `name` in an elementwise op on transposed tiles."""
        t: Tile = self.type[name]
        if t.rank == 0 or self.transposes(name):
            return name
        if name not in self.flat:
            o = self.defs.get(name)
            if o is not None and o.kind in ("col", "row"):
                self.flat[name] = b.op("row" if o.kind == "col" else "col", *o.args, line=o.line)
            elif o is not None and OPS[o.kind].elementwise and 1 in t.dims:
                self.flat[name] = b.op(o.kind, *(self.transposed(a, b, reader) for a in o.args), line=o.line, **dict(o.attrs))
            else:
                raise self.error(reader)
        return self.flat[name]

    def error(self, o: Op) -> ScheduleError:
        return ScheduleError(f"schedule {self.s.name}: state_layout={self.s.state_layout!r} does not fit {self.p.name}: {o.kind} "
                             f"({o.out}, {o.line}) reads rows of a tile that this layout would transpose; use "
                             "state_layout='kv'")
