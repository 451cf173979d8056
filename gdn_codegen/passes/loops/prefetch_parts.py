"""prefetch_parts: loads the summaries of a part while those of the part before it are multiplied. For Triton, and for Hopper's
warp groups.

The fold goes through the parts of a sequence one after another. Each step needs the factor and the offset of its part, tiles that
are loaded if a number is negative. So a step would wait for the number, for the tiles, and for the product. With this pass an
iteration loads its part's number and tiles, whatever the number is, computes what the iteration before has loaded, and then sets
tiles to zero that it should not have loaded. The loop carries them. After it the last part's are computed. The first iteration
computes with zeros. What it stores for the first part no kernel reads: a sequence's first part starts from the initial state.

Example:
    before:  for each part, S from 0: M = load if negative(x); N = load if negative(y); S = M @ S + N; store S for the next part
    after:   for each part, S, M and N from 0: M_here = load; N_here = load; S = M @ S + N; store S for this part
                 M = if_negative(x, M_here); N = if_negative(y, N_here)
             S = M @ S + N; store S for the instance's part
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program, Stmt, map_loops, types
from ..stage import takes


@takes("decomposed")
def prefetch_parts(p: Program) -> Program:
    """`p` with the tiles of loops over parts loaded one iteration ahead. A loop whose factors are vectors stays as it is."""
    return p.map_kernels(lambda k: replace(k, body=map_loops(
        k.body, lambda s: _ahead(p, k, s) if s.index == "part" else [s])))


def _ahead(p: Program, k: Kernel, loop: Loop) -> list[Stmt]:
    """The loop that carries what it loads, the initial values before it, and the last part's ops after it."""
    ops = [o for o in loop.body if isinstance(o, Op)]
    type = types(loop.body)
    loads = {o.out: o for o in ops if o.kind == "load" and o.args and type[o.out].rank == 2}
    if not any(o.kind == "matmul" and o.args[0] in loads for o in ops):
        return [loop]
    numbers = [o for o in ops if o.out and type[o.out].rank == 0]
    rest = [o.with_attrs(parts_ahead=None) if o.kind == "store" else o for o in ops if o.out not in loads and o not in numbers]
    b = Body({t.name: t for t in p.tensors}, types(k.body))
    first = {n: b.op("full", name=b.fresh(f"{n}_first"), dims=type[n].dims, value=0.0,
                     dtype=None if type[n].dtype == "float32" else type[n].dtype) for n in loads}
    before, b.stmts = b.stmts, []
    here = {n: b.op("load", name=b.fresh(f"{n}_here"), line=o.line, **dict(o.attrs)) for n, o in loads.items()}
    for o in (*numbers, *rest):
        b.copy(o)
    kept = {n: b.op("if_negative", o.args[0], here[n], name=b.fresh(f"{n}_kept"), line=o.line) for n, o in loads.items()}
    body, b.stmts = b.finish(), []
    loaded = [Carry(n, first[n], kept[n], b.fresh(f"{n}_last"), type[n]) for n in loads]
    walked = [replace(c, result=b.fresh(f"{c.name}_before")) for c in loop.carried]
    names = {c.name: c.result for c in (*walked, *loaded)}
    b.types |= {c.result: c.type for c in (*walked, *loaded)}
    results = {c.next: c.result for c in loop.carried}
    for o in rest:
        new = o.changed(out=results.get(o.out) or b.fresh(f"{o.out}_last")) if o.out else o
        b.copy(new, dict(names))
        names |= {o.out: new.out} if o.out else {}
    return [*before, replace(loop, carried=(*walked, *loaded), body=body), *b.stmts]
