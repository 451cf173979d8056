"""decay_bound: what a chunk forgets at least, as a value of the walk. Requires a traced program; produces a traced program.

For `partition="decay"`: the page's bound of a token, summed over the chunk. `cut` stores it in the first kernel that is
parallel over chunks. Otherwise the bound is dropped, and what only it reads.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.builder import Body
from ...ir.core import Loop, Op, Program, Stmt
from ...schedule.schedule import Schedule, ScheduleError
from ..common import dead_code


def decay_bound(p: Program, s: Schedule) -> Program:
    """`p` whose `forgets` names the sum over a chunk, or nothing."""
    if s.partition == "decay" and not p.forgets:
        raise ScheduleError(f"schedule {s.name}: partition='decay' needs a page that bounds how a token changes the state, "
                            f"carried(..., forgets=NAME), which {p.name} has not; accepted for it are None and 'exact'")
    (kernel,) = p.kernels
    at = next(i for i, x in enumerate(kernel.body) if isinstance(x, Loop))
    loop = kernel.body[at]
    assert isinstance(loop, Loop)

    def program(body: tuple[Stmt, ...], forgets: str) -> Program:
        walk = replace(loop, body=dead_code(body, {c.next for c in loop.carried} | {forgets}))
        return replace(p, kernels=(replace(kernel, body=(*kernel.body[:at], walk, *kernel.body[at + 1:])),), forgets=forgets)

    if s.partition != "decay":
        return program(loop.body, "")
    b = Body({t.name: t for t in p.tensors}, {c.name: c.type for c in loop.carried})
    b.taken |= {c.result for c in loop.carried}
    kinds = {}
    for o in loop.body:
        assert isinstance(o, Op)
        kinds[o.out] = o.kind
        b.copy(o)
    inert = p.forgets if kinds[p.forgets] in ("load", "valid") else b.op("valid", p.forgets)
    total = b.op("last", b.op("cumsum", inert), name=b.fresh(f"{p.forgets}_chunk"))
    return program(b.finish(), total)
