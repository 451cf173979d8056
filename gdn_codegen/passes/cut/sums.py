"""sums: sums of tiles, products that sum over V, which a kernel may store for a later one, factors, and inverses.
`roles` uses it."""
from __future__ import annotations

from collections.abc import Collection, Sequence

from ...ir.core import Op, uses
from ...ir.ops import OPS


def sums(ops: Sequence[Op], among: Collection[str]) -> list[str]:
    """The values of `among` that are sums over rows or columns of tiles, except those of which only another sum is taken."""
    types, count, out = {o.out: o.type for o in ops if o.type}, uses(tuple(ops)), list[str]()
    for o in ops:
        if o.kind not in ("row_sum", "column_sum") or o.out not in among:
            continue
        x = o.args[0]
        if x in out and count[x] == 1:
            out.remove(x)
        elif x not in types or types[x].rank != 2:
            continue
        out.append(o.out)
    return out


def scores(ops: Sequence[Op]) -> set[str]:
    """Products over V of two tiles of tokens."""
    dims = {o.out: o.type.dims for o in ops if o.type}
    return {o.out for o in ops if o.kind == "matmul" and dims[o.out] == ("C", "C")
            and dims.get(o.args[0], ())[0 if o.attr("ta") else 1:][:1] == ("V",)}


def factors(ops: Sequence[Op], among: Collection[str], dims: Collection[tuple[int | str, ...]]) -> set[str]:
    """The operands of products that are values of `among` and have one of these dims."""
    return {a for o in ops if o.kind == "matmul" and o.out in among and o.type and o.type.dims in dims for a in o.args}


def found_inverses(ops: Sequence[Op], read: Collection[str], waits: Collection[str]) -> set[str]:
    """Inverses, computed or loaded, and tiles of the same dims that elementwise ops compute from one and that depend on no state.

    Loaded are those values of `read` that lack the ones on their diagonals: tiles L of which x + L x is computed. waits: what
    depends on a state."""
    of = {o.out: o.args for o in ops if o.kind == "matmul" and o.args[0] in read}
    out = {of[a][0] for o in ops if o.kind == "add" for a in o.args if a in of and of[a][1] in o.args}
    type_of = {o.out: o.type for o in ops}
    for o in ops:
        same = o.out and any(a in out and type_of[a] == o.type for a in o.args)
        if o.kind == "unit_lower_inverse" or (same and OPS[o.kind].elementwise and o.out not in waits):
            out.add(o.out)
    return out
