"""prefetch_vectors: loads the vectors of a walk one iteration ahead. For Triton.

Triton's compiler overlaps a loop's loads with other work only if products read them. Without this pass, each iteration would
wait for the latency of each vector. With it, the start of an iteration loads the vectors of the next one and carries them. The
first iteration's vectors are loaded before the loop. The last entry of a vector in a workspace becomes a load of one number,
instead of a sum over masked entries.

Example:
    before:  for each chunk: g = load of this chunk; ...
    after:   g_first = load of the first chunk; for each chunk, g from g_first: g_next = load of the next chunk; ...; g = g_next
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program, Stmt, map_loops, types
from ...ir.ops import OPS
from ..stage import takes


@takes("decomposed")
def prefetch_vectors(p: Program) -> Program:
    """`p` with the vectors of its walks loaded one iteration ahead."""
    return p.map_kernels(lambda k: replace(k, body=map_loops(
        k.body, lambda s: _ahead(p, k, s) if s.index == "chunk" else [s])))


def _ahead(p: Program, k: Kernel, loop: Loop) -> list[Stmt]:
    """The loop with loads of the next iteration's vectors and of their last entries, which are carried."""
    ops = [o for o in loop.body if isinstance(o, Op)]
    written = {o.attr("tensor") for o in ops if o.kind == "store"}
    index = {t.name: t for t in p.tensors}
    b = Body(index)
    b.taken |= set(types(k.body))

    def vector(o: Op) -> bool:
        """Whether `o` loads a vector that this loop does not write and that is always given."""
        if o.kind != "load" or o.args or o.type is None or o.type.rank != 1 or o.attr("one_token"):
            return False
        t = index[o.attr("tensor")]
        return t.index in ("token", "slot") and not t.optional and t.name not in written

    loads = {o.out: o for o in ops if vector(o)}
    ends = {o.out: (loads[o.args[0]], {OPS[o.kind].loaded: True}) for o in ops if OPS[o.kind].loaded and o.args[0] in loads
            and index[loads[o.args[0]].attr("tensor")].index == "slot"}
    read = {a for o in ops if o.out not in ends for a in o.args} | {c.next for c in loop.carried}
    moved: dict[str, tuple[Op, dict[str, bool]]] = {n: (o, {}) for n, o in loads.items() if n in read} | ends
    if not moved:
        return [loop]

    def copies(suffix: str) -> dict[str, str]:
        return {n: b.op("load", name=b.fresh(f"{n}_{suffix}"), line=o.line, **{**dict(o.attrs), "ahead": 1, **entry})
                for n, (o, entry) in moved.items()}

    first = copies("first")
    before, b.stmts = b.stmts, []
    after = copies("next")
    ring = tuple(Carry(n, first[n], after[n], b.fresh(f"{n}_unread"), b.types[first[n]]) for n in moved)
    body = (*b.stmts, *(o for o in ops if o.out not in loads and o.out not in ends))
    return [*before, replace(loop, carried=(*loop.carried, *ring), body=body)]
