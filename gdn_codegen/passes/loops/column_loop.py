"""column_loop: makes a loop over pieces of the columns of K in kernels over chunks that sum over K. For Triton.

Triton's compiler holds every tile in registers, and moves all loads to the front of a kernel without a loop. So a kernel with
several products over K = 128 spills. In a loop it holds the tiles of one piece, and the sums. `Schedule.k_piece` is the number
of columns of a piece. The loop has what has the dim K. It adds products over K, and what is linear in them, such as their masks,
to carried sums, so that one sum is carried where many masked products are added. All else comes before or after the loop.

Example, K = 128 in pieces of 32:
    before:  k = load; A = strictly_lower(pairs(k @ k.T) + (k @ k.T) * eye); store A
    after:   x = 0; loop over columns, carrying x: k = load of 32 columns; x = x + pairs(k @ k.T); x = x + (k @ k.T) * eye
             A = strictly_lower(x); store A
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program
from ...schedule.schedule import Schedule
from ..stage import takes
from .column_pieces import splits
from .column_sums import ColumnSums


@takes("decomposed")
def column_loop(p: Program, s: Schedule) -> Program:
    """`p` with loops in its kernels over chunks that have products over K, if the schedule gives the columns of a piece. A kernel
    stays as it is if K has no more columns, or if something with the dim K depends on a sum over all pieces."""
    return p.map_kernels(lambda k: _kernel(p, k, s.k_piece)) if s.k_piece else p


def _kernel(p: Program, k: Kernel, columns: int) -> Kernel:
    """The kernel with its loop over pieces of so many columns, or `k` itself."""
    if k.grid != "chunks" or len(k.ops) != len(k.body) or {**p.sizes, **k.sizes}["K"] % columns or p.sizes["K"] <= columns:
        return k
    if k.blocked_dim == "K" or not all(splits(p, k, o, "K", padded=("load",)) for o in k.ops):
        return k
    sums = ColumnSums(k)
    if not any(o.kind == "matmul" for o in sums.ops.values()) or not sums.separate():
        return k
    return replace(k, body=_Loop(p, k, sums, columns).body())


class _Loop:
    """Writes the kernel with its loop."""

    def __init__(self, p: Program, k: Kernel, sums: ColumnSums, columns: int) -> None:
        self.k, self.sums, self.columns, self.now = k, sums, columns, dict[str, str]()
        self.b = Body({t.name: t for t in p.tensors})
        self.b.taken |= set(sums.types)

    def body(self) -> tuple[Op | Loop, ...]:
        """What the loop needs, the loop, and the rest."""
        sums, b = self.sums, self.b
        inside = [o for o in self.k.ops if o.out in sums.ops or sums.has_k(o)]
        needed = {a for o in inside for a in o.args}
        for o in reversed(self.k.ops):
            needed |= set(o.args) if o.out in needed else set()
        before = [o for o in self.k.ops if o not in inside and o.kind != "eye" and o.out in needed]
        for o in before:
            b.copy(o)
        carried = [Carry(b.fresh(f"{n}_so_far"), self.zero(n), "", n, sums.types[n]) for n in sums.given]
        b.types |= {c.name: c.type for c in carried}
        self.now = {c.result: c.name for c in carried}
        outer, b.stmts = b.stmts, []
        for o in inside:
            self.op(o)
        loop = Loop("columns", tuple(replace(c, next=self.now[c.result]) for c in carried), tuple(b.stmts), step=self.columns)
        b.stmts = [*outer, loop]
        b.types |= {c.result: c.type for c in carried}
        for o in self.k.ops:
            if o not in inside and o not in before:
                b.copy(o)
        return b.finish()

    def zero(self, n: str) -> str:
        """What the carried sum `n` starts from."""
        return self.b.op("full", name=self.b.fresh(f"{n}_start"), dims=self.sums.types[n].dims, value=0.0)

    def op(self, o: Op) -> None:
        """An op on one piece. A term is added to the sums."""
        sums, totals = self.sums, self.sums.totals(o.out) if o.out in self.sums.ops else []
        flat = bool(totals) and sums.flat(o.out)
        if flat and o.kind == "add":
            return
        attrs = dict(o.attrs) | ({"piece": (0, self.columns)} if o.kind in ("load", "store") else {})
        if "dims" in attrs:
            attrs["dims"] = tuple(self.columns if d == "K" else d for d in attrs["dims"])
        only = flat or o.out in sums.given or (len(o.args) == 2 and sums.only_added(o.out))  # nothing else reads the term
        if o.kind == "matmul" and len(totals) == 1 and only:
            self.now[totals[0]] = self.b.op("matmul", *o.args[:2], self.now[totals[0]], name=self.term(o), line=o.line, **attrs)
            return
        x = self.b.op(o.kind, *map(self.made, o.args), name=self.term(o) if o.out else "", line=o.line, **attrs)
        for n in totals:
            self.now[n] = self.b.op("add", self.now[n], x, name=self.b.fresh(f"{n}_so_far"), line=o.line)

    def term(self, o: Op) -> str:
        """The name of the value of `o` in the loop: its own, if that is not the name of a carried sum."""
        return self.b.fresh(f"{o.out}_term") if o.out in self.now else o.out

    def made(self, a: str) -> str:
        """The operand `a`: the identity is made in the loop again, so that it takes no registers of the whole loop."""
        o = self.sums.defs[a]
        return self.b.op("eye", name=self.b.fresh(a), line=o.line, **dict(o.attrs)) if o.kind == "eye" else a
