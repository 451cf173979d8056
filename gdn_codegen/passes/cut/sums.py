"""sums: the sums of tiles that a kernel may store for a later one. `roles` uses it."""
from __future__ import annotations

from collections.abc import Collection, Sequence

from ...ir.core import Op, uses


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
