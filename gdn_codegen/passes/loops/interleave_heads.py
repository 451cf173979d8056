"""interleave_heads: instances that a core group computes side by side. Requires a kernel of stage "fed"; keeps the stage.

A kernel over chunks takes `n` value heads of one chunk slot as one item. Their ops alternate, so that while one instance
waits for a core or a pipe the other uses it. Each lane has its own values and channels; masks are shared. A lane past the
last head repeats the last head, and writes the same again.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Program
from ...ir.types import Tensor


class Copies:
    """Ops as each of `n` lanes has them: values of the further lanes have names of their own, accesses say whose they are."""

    def __init__(self, ops: Sequence[Op], n: int) -> None:
        self.taken = {o.out for o in ops}
        self.names: list[dict[str, str]] = [{} for _ in range(n)]

    def of(self, o: Op, lane: int) -> Op:
        """The op for another lane, with names of its own. Lane 0 is the op itself."""
        if not lane:
            return o
        name, mine = o.out, self.names[lane]
        while name and name in self.taken:
            name += f"_{'bcdefgh'[lane - 1]}"
        self.taken.add(name)
        mine[o.out] = name
        copy = replace(o.renamed(mine), out=name)
        return copy.with_attrs(lane=lane) if o.attr("tensor") else copy


def interleave_heads(p: Program, k: Kernel, n: int) -> tuple[Kernel, list[Tensor]]:
    """`k` with `n` lanes, and the channels of the further ones."""
    if n == 1 or k.grid != "chunks":
        return k, []
    (items,) = (s for s in k.body if isinstance(s, Loop))
    index = {t.name: t.index for t in p.tensors}
    made: dict[str, Tensor] = {}
    copies = Copies([o for o in items.body if isinstance(o, Op)], n)

    def copy(o: Op, lane: int) -> Op:
        done, tensor = copies.of(o, lane), o.attr("tensor", "")
        if not lane or not tensor or index[tensor] != "block":
            return done
        own = f"{tensor}{lane}"
        made[own] = replace(p.tensor(tensor), name=own)
        return done.with_attrs(tensor=own, lane=None)

    def shared(o: Op) -> bool:
        of = o.attr("tensor")
        return o.kind == "const" or (o.kind == "scalar" and not of) or (o.kind == "load" and index[of] == "const")

    body = tuple(copy(o, lane) for o in items.body if isinstance(o, Op) for lane in range(1 if shared(o) else n))
    return replace(k, lanes=n, body=tuple(replace(s, body=body) if s is items else s for s in k.body)), list(made.values())
