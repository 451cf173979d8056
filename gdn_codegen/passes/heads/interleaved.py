"""interleaved: batches value heads of a core group. For devices with cores (PTO).

An item of a kernel over chunks is then one chunk slot and `n` value heads, whose ops alternate. While one head waits for a core
or a pipe, another uses it. Each head has its own values and channels, so no address or flag depends on the head. Masks are
shared. A head past the last repeats the last one and writes the same results again.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, Loop, Op, Program
from ...ir.types import Batch, Tensor
from .copies import copies


def interleaved(p: Program, k: Kernel, n: int) -> tuple[Kernel, list[Tensor]]:
    """`k` with `n` heads an item, and the channels of heads other than 0. `k` itself if `n` is 1 or it does not run over chunks.

    `arrange` calls it. It needs stage "fed", and keeps it.
    """
    if n == 1 or k.grid != "chunks":
        return k, []
    (items,) = (s for s in k.body if isinstance(s, Loop))
    index = {t.name: t.index for t in p.tensors}
    made: dict[str, Tensor] = {}

    def shared(o: Op) -> bool:
        """Whether all heads share the op: a constant, a number of the call, or a load of a mask."""
        of = o.attr("tensor")
        return o.kind == "const" or (o.kind == "scalar" and not of) or (o.kind == "load" and index[of] == "const")

    def own_channel(o: Op) -> Op:
        """The op with a channel of its head, if it accesses a channel."""
        tensor, head = o.attr("tensor", ""), o.attr("head", 0)
        if not head or index[tensor] != "block":
            return o
        own = f"{tensor}{head}"
        made[own] = replace(p.tensor(tensor), name=own)
        return o.with_attrs(tensor=own, head=None)

    ops = [o for o in items.body if isinstance(o, Op)]
    body = copies(ops, n, {o.out for o in ops if shared(o)}, across_heads=lambda o: True)
    loop = replace(items, body=tuple(map(own_channel, body)))
    return replace(k, batch=Batch(n, "interleaved"), body=tuple(loop if s is items else s for s in k.body)), list(made.values())
