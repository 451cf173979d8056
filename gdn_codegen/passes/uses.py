"""Questions about uses of values: which ops read a value, and which values with storage an expression reads."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..ir.core import Op, Stmt, walk


def readers(body: tuple[Stmt, ...]) -> dict[str, list[tuple[Op, int]]]:
    """The ops that read each value, in program order, with the index of the operand. A value that no op reads has no entry."""
    out: dict[str, list[tuple[Op, int]]] = {}
    for o in walk(body):
        for n, a in enumerate(o.args):
            out.setdefault(a, []).append((o, n))
    return out


def needed_before(o: Op, defs: Mapping[str, Op], known: Collection[str]) -> list[Op]:
    """The ops that have to come before `o`, in order. defs: the ops by value. known: the values that are there already."""
    out: dict[str, Op] = {}

    def visit(a: str) -> None:
        if a not in known and a not in out:
            for x in defs[a].args:
                visit(x)
            out[a] = defs[a]
    for a in o.args:
        visit(a)
    return list(out.values())


def stored_under(body: tuple[Stmt, ...]) -> Callable[[str], set[str]]:
    """A function that gives the values with storage that a reader of a value reads, for a body whose ops have buffers.

    These are the value itself, or if it has no buffer, those of its operands. A value that no op of the body computes, such as a
    carried one, has storage.
    """
    defs = {o.out: o for o in walk(body) if o.out}

    def of(a: str) -> set[str]:
        o = defs.get(a)
        return {a} if o is None or o.buffer else {x for y in o.args for x in of(y)}
    known = {a: of(a) for o in walk(body) for a in o.args}
    return lambda a: known[a]
