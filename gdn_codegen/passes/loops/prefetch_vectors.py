"""prefetch_vectors: vectors that a walk loads come one iteration ahead.

For compilers that overlap a loop's loads with its work only where products read them (Triton): an iteration would wait for each
vector as long as memory takes. Here the head of an iteration loads the next one's, and they are carried; those of the first
iteration are loaded before the loop. The last entry of a workspace's vector is a load of one number, not a sum over masked
entries.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.builder import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program, Stmt, map_loops, types
from ..stage import takes


@takes("decomposed")
def prefetch_vectors(p: Program) -> Program:
    """`p`, its walks' vectors loaded an iteration ahead."""
    return p.map_kernels(lambda k: replace(k, body=map_loops(
        k.body, lambda s: _ahead(p, k, s) if s.index == "chunk" else [s])))


def _ahead(p: Program, k: Kernel, loop: Loop) -> list[Stmt]:
    """The loop with the vectors that it loads, and their last entries, carried from the iteration before."""
    ops = [o for o in loop.body if isinstance(o, Op)]
    written = {o.attr("tensor") for o in ops if o.kind == "store"}
    index = {t.name: t for t in p.tensors}
    b = Body(index)
    b.taken |= set(types(k.body))

    def vector(o: Op) -> bool:
        if o.kind != "load" or o.args or o.type is None or o.type.rank != 1:
            return False
        t = index[o.attr("tensor")]
        return t.index in ("token", "slot") and not t.optional and t.name not in written

    loads = {o.out: o for o in ops if vector(o)}
    ends = {o.out: loads[o.args[0]] for o in ops if o.kind == "last" and o.args[0] in loads and
            index[loads[o.args[0]].attr("tensor")].index == "slot"}
    read = {a for o in ops if o.out not in ends for a in o.args} | {c.next for c in loop.carried}
    moved = {n: (o, False) for n, o in loads.items() if n in read} | {n: (o, True) for n, o in ends.items()}
    if not moved:
        return [loop]

    def copies(suffix: str) -> dict[str, str]:
        return {n: b.op("load", name=b.fresh(f"{n}_{suffix}"), line=o.line, **{**dict(o.attrs), "ahead": 1, "last": last})
                for n, (o, last) in moved.items()}

    first = copies("first")
    before, b.stmts = b.stmts, []
    after = copies("next")
    ring = tuple(Carry(n, first[n], after[n], b.fresh(f"{n}_unread"), b.types[first[n]]) for n in moved)
    body = (*b.stmts, *(o for o in ops if o.out not in loads and o.out not in ends))
    return [*before, replace(loop, carried=(*loop.carried, *ring), body=body)]
