"""wy: separates the factor of the state from the offset.

If Y = Y0 + F S is affine in the carried state S, the product M @ Y becomes M Y0 + (M F) S. M Y0 is the offset, M F the weight.
Neither depends on the state, so both can be computed for all chunks side by side.
"""
from __future__ import annotations

from ....ir.core import Loop, Op, Program, types
from ....schedule.schedule import Schedule
from ...common import walk_body
from .terms import is_plain, ops

NEEDS = "a product of a state-free tile with one affine in the carried state"


class _NotAffine(Exception):
    """The value is not affine in a carried state in a form that `wy` knows."""
    pass


def wy(p: Program, s: Schedule, loop: Loop) -> tuple[Op, ...] | None:
    """The walk's ops with T @ (y - F @ S) as T @ y - (T @ F) @ S. None if no state-free tile is multiplied by a value that is
    affine in a state."""
    defs = {o.out: o for o in ops(loop)}
    states = {c.name for c in loop.carried}
    b, tile = walk_body(p), types(loop.body)
    depends: dict[str, bool] = dict.fromkeys(states, True)
    for o in defs.values():
        depends[o.out] = any(depends.get(a, False) for a in o.args)

    def affine(name: str) -> tuple[str | None, tuple[str, str, bool] | None]:
        """`name` as offset + sign * factor @ state: (offset, (factor, state, negative)). An absent term is None. Raises
        _NotAffine otherwise."""
        if not depends.get(name):
            return name, None
        o = defs.get(name)
        if o is None:
            raise _NotAffine
        free = [a for a in o.args if not depends.get(a)]
        if o.kind == "matmul" and o.args[1] in states and not depends.get(o.args[0]) and not o.attr("tb"):
            if o.attr("ta"):
                raise _NotAffine
            return None, (o.args[0], o.args[1], False)
        if o.kind == "mul" and len(free) == 1 and tile[free[0]].dims in ((), ("C", 1)):
            y0, f = affine(next(a for a in o.args if depends.get(a)))
            assert f is not None
            return (b.op("mul", free[0], y0, line=o.line) if y0 else None,
                    (b.op("mul", free[0], f[0], line=o.line), f[1], f[2]))
        if o.kind in ("add", "sub") and len(free) == 1:
            at = o.args.index(free[0])
            y0, f = affine(o.args[1 - at])
            assert f is not None
            negative = f[2] ^ (o.kind == "sub" and at == 0)
            if y0 is None:
                y0 = b.op("neg", free[0], line=o.line) if o.kind == "sub" and at == 1 else free[0]
            else:
                y0 = b.op(o.kind, *((free[0], y0) if at == 0 else (y0, free[0])), line=o.line)
            return y0, (f[0], f[1], negative)
        raise _NotAffine

    done = 0
    for o in ops(loop):
        if is_plain(o) and o.args[1] not in states and not depends[o.args[0]] and depends[o.args[1]]:
            try:
                y0, f = affine(o.args[1])
            except _NotAffine:
                y0, f = None, None
            if y0 is not None and f is not None:
                offset = b.op("matmul", o.args[0], y0, name=b.fresh(f"{o.out}_offset"), line=o.line)
                weight = b.op("matmul", o.args[0], f[0], name=b.fresh(f"{o.out}_weight"), line=o.line)
                b.op("sub" if f[2] else "add", offset, b.op("matmul", weight, f[1], line=o.line), name=o.out, line=o.line)
                done += 1
                continue
        b.copy(o)
    if not done:
        return None
    return b.finish()  # type: ignore[return-value]
