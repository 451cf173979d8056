"""place: decides which values have buffers. For TileLang and Triton; `rings` does the same for walks on warp groups.

A value without a buffer is an expression inside its reader. These are numbers, row and column views, and cheap elementwise ops
with one reader. Other values get a buffer in the space that the device names for their kind.

Where the device allows it (`in_place`), values share a buffer if the old value has no later reader:
- a product and its accumulator;
- a carried value and its next value;
- the inverse of a whole tile and that tile;
- values of the same shape and dtype in a limited space that are never live at the same time.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import prod

from ...devices import Device
from ...ir.core import Buffer, Kernel, Loop, Op, Program, Stmt, loops, map_ops, types, uses, walk
from ...ir.ops import OPS
from ...schedule.schedule import ScheduleError
from ..stage import takes

VIEWS = ("const", "scalar", "col", "row", "eye", "full", "expand")
#: Ops that read operands from the space of products' operands, and how many of their first operands.
OPERANDS = {"matmul": 2, "diag_inverse": 1}
#: Ops that may run at the same time as a neighbour of the same kind.
SIDE_BY_SIDE = ("cumsum", "diag_inverse")


def over(o: Op, device: Device) -> bool:
    """Whether the result of `o` overwrites its first operand, which has no other reader. True for the inverse of a whole tile."""
    return o.kind == "diag_inverse" and o.attr("size") == device.solves_whole


@takes("assigned", gives="placed")
def place(p: Program, device: Device) -> Program:
    """`p` with buffers on its kernels and on the ops that fill them. Raises ScheduleError if a space is too small."""
    return p.map_kernels(lambda k: _Kernel(p, k, device).run())


def with_buffers(body: tuple[Stmt, ...], owner: dict[str, str]) -> tuple[Stmt, ...]:
    """The body with buffers on its ops. owner: value -> the name of its buffer."""
    return map_ops(body, lambda o: [replace(o, buffer=owner.get(o.out, ""))])


class _Kernel:
    """Which values of a kernel have a buffer, in which space, and which share one."""
    def __init__(self, p: Program, k: Kernel, device: Device) -> None:
        self.p, self.k, self.device = p, k, device
        self.sizes = {**p.sizes, **k.sizes}
        self.type = types(k.body)
        self.count = uses(k.body)
        self.ops = list(walk(k.body))
        self.defs = {o.out: o for o in self.ops if o.out}
        self.readers: dict[str, list[tuple[Op, int]]] = {}
        for o in self.ops:
            for n, a in enumerate(o.args):
                self.readers.setdefault(a, []).append((o, n))
        self.carried = {x for lp in loops(k.body) for c in lp.carried for x in (c.name, c.init, c.next, c.result)}
        self.begins = {lp.warm_up for lp in loops(k.body)}
        self.carried |= {o.args[1] for o in self.ops if o.kind == "load" and o.args[1:] and o.out in self.carried}

    def run(self) -> Kernel:
        """The kernel with a buffer for each value that needs storage. Values share buffers where one may overwrite another."""
        owner = {o.out: o.out for o in self.ops if o.out and self.stored(o)}
        for lp in loops(self.k.body):
            for c in lp.carried:
                owner[c.name] = owner[c.result] = c.name
                if c.init in owner:
                    owner[c.init] = c.name
                if self.overwrites(lp, c.name, c.next):
                    owner[c.next] = c.name
        if self.device.in_place:
            owner |= {o.args[1]: owner[o.out] for o in self.ops if o.kind == "load" and o.args[1:]}
            self.share_accumulators(owner)
            owner |= {o.args[0]: o.out for o in self.ops if over(o, self.device)}
            self.share_storage(owner)
        buffers: dict[str, Buffer] = {}
        for value, name in owner.items():
            if name not in buffers:
                t = self.type[value]
                space = self.space(name if name in self.defs else value)
                buffers[name] = Buffer(name, space, t.shape(self.sizes), t.dtype, dims=t.dims)
        self.check_sizes(buffers.values())
        return replace(self.k, body=with_buffers(self.k.body, owner), buffers=tuple(buffers.values()))

    def stored(self, o: Op) -> bool:
        """Whether the value of `o` has storage. Otherwise it is an expression in its reader."""
        if o.out in self.carried | self.begins:
            return True
        if o.kind in VIEWS and o.out not in self.operands():
            return False
        if not OPS[o.kind].elementwise:
            return True
        readers = self.readers.get(o.out, [])
        if self.count.get(o.out, 0) != 1:
            return True
        reader, n = readers[0]
        if self.device.operand != self.device.tile and reader.kind == "matmul" and n < 2:
            return True
        if reader.kind == "matmul" and n == 2:
            return False
        if not OPS[reader.kind].elementwise and reader.kind != "store" and self.device.tile != "register":
            return True  # cumsum, last and row_sum need an operand in storage
        # A vector under a tile would be computed again for every column.
        return (self.device.vector != "register" and self.type[o.out].rank == 1 and reader.kind in ("col", "row")) \
            or (self.device.number != "register" and self.type[o.out].rank == 0)

    def operands(self) -> set[str]:
        """The values that must be in the operands' space: operands of products, and inverses of blocks."""
        made = {o.out for o in self.ops if o.kind == "diag_inverse"}  # most of its entries stay zero, and need no registers
        return made | {a for o in self.ops for a in o.args[:OPERANDS.get(o.kind, 0)]}

    def space(self, value: str) -> str:
        """The memory space of a value, which the device chooses by the kind of value."""
        o, d, t = self.defs.get(value), self.device, self.type[value]
        if t.rank == 0:
            return d.number
        if t.rank == 1:
            return d.vector
        if o is not None and o.kind == "move":
            return str(o.attr("space"))
        if value in self.operands():
            return d.operand
        if o is None or o.kind == "matmul" or value in self.carried:
            return d.product
        return d.loaded if o.kind == "load" else d.tile

    def overwrites(self, lp: Loop, name: str, new: str) -> bool:
        """Whether the next value `new` may overwrite the carried value `name`: nothing reads `name` after `new` is computed."""
        after = False
        for o in walk(lp.body):
            if after and self.reads(o, name):
                return False
            after = after or o.out == new
        return after and not any(self.type[x] != self.type[name] for x in (new,))

    def reads(self, o: Op, name: str) -> bool:
        """Whether `o` reads `name`, directly or through expressions inside `o`."""
        return any(a == name or (a in self.defs and not self.stored(self.defs[a]) and self.reads(self.defs[a], name))
                   for a in o.args)

    def share_accumulators(self, owner: dict[str, str]) -> None:
        """Let a product overwrite its accumulator if the accumulator has no later reader. owner: value -> the value whose
        buffer it uses."""
        order = {o: n for n, o in enumerate(self.ops)}
        for o in self.ops:
            if o.kind != "matmul" or len(o.args) < 3 or o.out not in owner:
                continue
            acc = o.args[2]
            if acc not in owner or acc in self.carried or o.out in self.carried or acc in self.operands():
                continue
            if all(order[r] <= order[o] for r, _ in self.all_readers(acc)):
                root = owner[acc]
                for v in [v for v, n in owner.items() if n == root]:
                    owner[v] = o.out

    def share_storage(self, owner: dict[str, str]) -> None:
        """Let values of limited spaces share a buffer of their shape and dtype if they are never live at the same time."""
        region = next(loops(self.k.body), self.k).body
        order = {o: n for n, o in enumerate(region) if isinstance(o, Op)}
        for after, o in pairwise(reversed(region)):  # these run at the same time
            if isinstance(o, Op) and isinstance(after, Op) and o.kind == after.kind and o.kind in SIDE_BY_SIDE:
                order[o] = order[after]
        alive: dict[str, tuple[int, int]] = {}  # buffer -> first definition, last reader
        for o in region:
            if isinstance(o, Op) and o.out in owner and o.out not in self.carried:
                ends = [order.get(r, len(region)) for r, _ in self.all_readers(o.out)]
                first, last = alive.get(owner[o.out], (order[o], 0))
                alive[owner[o.out]] = first, max([last, order[o], *ends])
        pinned = {owner[o.out] for o in self.ops if over(o, self.device)}
        across = {owner[v] for v in owner if not self.along_rows(v)}
        free: dict[tuple[str, tuple[int, ...], str], list[tuple[int, str]]] = {}
        for name, (first, last) in sorted(alive.items(), key=lambda x: x[1]):
            t, space = self.type[name], self.space(name)
            if not self.device.spaces.get(space):
                continue
            same = free.setdefault((space, t.shape(self.sizes), t.dtype), [])
            for n, (end, other) in enumerate(same):
                if end < first and not (pinned & {name, other} and across & {name, other}):
                    same[n] = last, other
                    pinned |= {other} if name in pinned else set()
                    across |= {other} if name in across else set()
                    for v in [v for v, root in owner.items() if root == name]:
                        owner[v] = other
                    break
            else:
                same.append((last, name))

    def along_rows(self, name: str) -> bool:
        """Whether products read `name` along its rows: as a first operand that is not transposed, or as a second one that is.

        The inverse of a whole tile fixes the layout of its buffer: rows of 128 bytes. A product that reads along columns may
        make TileLang's compiler choose another layout. So such a value does not share a buffer with an inverse.
        """
        reads = [(r, n) for r, n in self.all_readers(name) if r.kind == "matmul" and n < 2]
        return not any(r.attr("ta") if n == 0 else not r.attr("tb") for r, n in reads)

    def all_readers(self, name: str) -> list[tuple[Op, int]]:
        """The ops that read `name`, with the index of the operand. Readers that are expressions are replaced by their own
        readers."""
        out = []
        for r, n in self.readers.get(name, []):
            out += [(r, n)] if not r.out or self.stored(r) else self.all_readers(r.out)
        return out

    def check_sizes(self, buffers: Iterable[Buffer]) -> None:
        """Raise ScheduleError if the buffers of a limited space do not fit it together."""
        width = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
        sizes: dict[str, dict[str, int]] = {}
        for b in buffers:
            sizes.setdefault(b.space, {})[b.name] = width[b.dtype] * prod(b.shape)
        for space, each in sizes.items():
            limit, total = self.device.spaces.get(space, 0), sum(each.values())
            if limit and total > limit:
                most = sorted(each.items(), key=lambda x: -x[1])
                raise ScheduleError(f"{self.p.name}, kernel {self.k.name}: {space} of {self.device.name} has {limit} bytes, "
                                    f"{total} are needed: {', '.join(f'{n} {size}' for n, size in most)}")
