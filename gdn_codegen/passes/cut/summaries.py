"""summaries: the kernels that compute the state at the start of each part. `partition` uses it.

The state after a part is affine in the state before it: S' = M S + N. `offset` computes N, `factor` computes M, and `fold`
applies both for all parts before one.
"""
from __future__ import annotations

from typing import Any

from ...ir.body import Body
from ...ir.core import Carry, Kernel, Loop, Op, Stmt
from ..common import dead_code
from .linear_part import linear_part
from .parts import Parts

#: Columns of the state that an instance of the fold computes.
COLUMNS = 32


def offset(parts: Parts) -> Kernel:
    """The kernel that computes N of each part, and stores the next part's warm-up length."""
    b = parts.body(parts.k)
    following = b.op("warm_up_length", name=b.fresh("warm_up_next"), parts_ahead=1, **parts.forgets)
    if parts.forgets:
        b.op("store", following, tensor=parts.warm_up.name, parts_ahead=1)
    b.op("return_unless_negative", following)
    warm_up = b.op("warm_up_length", name=b.fresh("warm_up"), **parts.forgets) if parts.forgets else ""
    _looped(parts, b, parts.loop.body, parts.initial(b), parts.c.next, warm_up, parts.n.name)
    return Kernel(parts.n.name, "parts", b.finish(), **parts.blocks)  # type: ignore[arg-type]


def factor(parts: Parts) -> Kernel:
    """The kernel that computes M of each part: a matrix, or its diagonal where there is nothing else."""
    b = parts.body(parts.k)
    b.op("return_unless_negative", parts.longer(b, parts.length(b), parts.length(b, 1)))
    if parts.scales:
        init = b.op("full", name=parts.c.init, dims=(parts.rows,), value=1.0)
    else:
        within = parts.rows if parts.rows in dict(parts.p.extents) else None
        init = b.op("eye", name=parts.c.init, dims=(parts.rows, parts.rows), within=within)
    inner = Body(b.tensors, {parts.c.name: b.types[init]})
    new = linear_part(parts, inner)
    _looped(parts, b, inner.finish(), init, new, "", parts.m.name)
    return Kernel(parts.m.name, "parts", b.finish())


def fold(parts: Parts) -> Kernel:
    """The kernel that computes the states at which parts start: S <- M S + N over the parts of a sequence in order, and a store
    after each. An instance does so for a part that starts from the fold, if no part after it does, or the next one does not. The
    others return at once, because that one passes the states before their parts."""
    b = parts.body(parts.k)
    b.op("return_unless_negative", parts.length(b))
    b.op("return_unless_negative", b.op("sub", b.op("const", value=-1.0), parts.length(b, 1), name=b.fresh("is_last")))
    init = b.op("full", name=parts.c.init, dims=parts.c.type.dims, value=0.0)
    inner = Body(b.tensors, {parts.c.name: parts.c.type})
    inner.taken = b.taken
    here, following = parts.number(inner, of="earlier_"), parts.number(inner, 1)
    m = inner.op("load", parts.longer(inner, here, following), name=b.fresh("M"), tensor=parts.m.name)
    n = inner.op("load", following, name=b.fresh("N"), tensor=parts.n.name)
    scaled = inner.op("mul", inner.op("col", m), parts.c.name) if parts.scales else inner.op("matmul", m, parts.c.name)
    new = inner.op("add", scaled, n, name=parts.c.next)
    inner.op("store", new, tensor=parts.start.name, parts_ahead=1)
    b.stmts.append(Loop("part", (Carry(parts.c.name, init, new, parts.c.result, parts.c.type),), inner.finish()))
    return Kernel(parts.start.name, "parts", b.finish(), **_columns(parts))


def _columns(parts: Parts) -> dict[str, Any]:
    """Blocks of V for the fold. Its products follow one another, and a narrow block takes the least time for each."""
    size = {**dict(parts.p.dims), **dict(parts.k.dims)}["V"]
    return {"blocked_dim": "V", "dims": (("V", COLUMNS),)} if size > COLUMNS and size % COLUMNS == 0 else parts.blocks


def _looped(parts: Parts, b: Body, body: tuple[Stmt, ...], init: str, new: str, warm_up: str, to: str) -> None:
    """Append the walk of the state alone, and the store of the last state to the tensor `to`."""
    c = Carry(parts.c.name, init, new, parts.c.result, b.types[init])
    kept = dead_code(tuple(o for o in body if isinstance(o, Op) and o.kind != "store"), {new})
    b.stmts.append(Loop(parts.loop.index, (c,), kept, warm_up, parts.loop.step))
    b.types[c.result] = c.type
    b.op("store", c.result, tensor=to)


def declines(parts: Parts) -> Kernel:
    """The kernel that comes in place of these with short warm-ups: it declines the call if a part needs a longer one."""
    assert parts.declined is not None
    b = parts.body(parts.k)
    b.op("set_if_negative", b.op("warm_up_length", name=b.fresh("warm_up"), **parts.forgets), tensor=parts.declined.name)
    return Kernel(parts.declined.name, "parts", b.finish())


#: The makers of the kernels, in the order in which these run.
SUMMARIES = (offset, factor, fold)
