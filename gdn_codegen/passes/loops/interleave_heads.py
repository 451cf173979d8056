"""interleave_heads: computes several value heads interleaved on a core group. `arrange` calls it for devices with cores. It
needs stage "fed", and keeps it.

A kernel over chunks takes `n` value heads of one chunk slot as one item. Their ops alternate. While one head waits for a core
or a pipe, the other uses it. Each lane has its own values and channels. Masks are shared. A lane past the last head repeats the
last head and writes the same results again.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Program
from ...ir.types import Tensor


class Copies:
    """Copies of ops for `n` lanes. In lanes other than 0, values get new names and accesses to tensors get the attribute
    `lane`."""

    def __init__(self, ops: Sequence[Op], n: int) -> None:
        self.taken = {o.out for o in ops}
        self.names: list[dict[str, str]] = [{} for _ in range(n)]

    def of(self, o: Op, lane: int) -> Op:
        """The op for a lane. For lane 0 this is the op itself."""
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
    """`k` with `n` lanes, and the channels of lanes other than 0. `k` itself if `n` is 1 or `k` is not parallel over chunks."""
    if n == 1 or k.grid != "chunks":
        return k, []
    (items,) = (s for s in k.body if isinstance(s, Loop))
    index = {t.name: t.index for t in p.tensors}
    made: dict[str, Tensor] = {}
    copies = Copies([o for o in items.body if isinstance(o, Op)], n)

    def copy(o: Op, lane: int) -> Op:
        """The op for a lane. Lanes other than 0 have channels of their own."""
        done, tensor = copies.of(o, lane), o.attr("tensor", "")
        if not lane or not tensor or index[tensor] != "block":
            return done
        own = f"{tensor}{lane}"
        made[own] = replace(p.tensor(tensor), name=own)
        return done.with_attrs(tensor=own, lane=None)

    def shared(o: Op) -> bool:
        """Whether all lanes share the op: a constant, a number of the call, or a load of a mask."""
        of = o.attr("tensor")
        return o.kind == "const" or (o.kind == "scalar" and not of) or (o.kind == "load" and index[of] == "const")

    body = tuple(copy(o, lane) for o in items.body if isinstance(o, Op) for lane in range(1 if shared(o) else n))
    return replace(k, lanes=n, body=tuple(replace(s, body=body) if s is items else s for s in k.body)), list(made.values())
