"""Copies of ops for each of several heads, for the ways that give each head ops of its own."""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ...ir.core import Op


def copies(ops: Sequence[Op], n: int, shared: Collection[str], across_heads: Callable[[Op], bool]) -> list[Op]:
    """`ops` for `n` heads.

    shared: values that all heads share; their ops are not copied. across_heads: whether an op is done for all heads before the
    next op begins. A run of other ops is done head by head. A copy for head 1 has a value whose name ends in `_h1`, and so on; an
    access to a tensor gets the attribute `head`.
    """
    taken = {o.out for o in ops}
    names: list[dict[str, str]] = [{} for _ in range(n)]

    def copy(o: Op, head: int) -> Op:
        """The op for a head. For head 0 this is the op itself."""
        if not head:
            return o
        name = o.out
        while name and name in taken:
            name += f"_h{head}"
        taken.add(name)
        names[head][o.out] = name
        made = o.renamed(names[head]).changed(out=name)
        return made.with_attrs(head=head) if o.attr("tensor") else made

    out: list[Op] = []
    run: list[Op] = []  # ops that are done head by head
    for o in ops:
        if o.out not in shared and not across_heads(o):
            run.append(o)
            continue
        out += [copy(x, head) for head in range(n) for x in run]
        run.clear()
        out += [copy(o, head) for head in range(1 if o.out in shared else n)]
    return out + [copy(x, head) for head in range(n) for x in run]
