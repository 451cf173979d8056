"""lanes: instances that a core group computes side by side. Requires a kernel of stage "fed"; keeps the stage.

A kernel over chunks takes `n` value heads of one chunk slot as one item. Their ops alternate, so that while one instance
waits for a core or a pipe the other uses it. Each lane has its own values and channels; masks are shared. A lane past the
last head repeats the last head, and writes the same again.
"""
from __future__ import annotations

from dataclasses import replace

from ..ir.core import Kernel, Loop, Op, Program
from ..ir.types import Tensor


def lanes(p: Program, k: Kernel, n: int) -> tuple[Kernel, list[Tensor]]:
    """`k` with `n` lanes, and the channels of the further ones."""
    if n == 1 or k.grid != "chunks":
        return k, []
    (items,) = (s for s in k.body if isinstance(s, Loop))
    index = {t.name: t.index for t in p.tensors}
    taken = {o.out for o in items.body if isinstance(o, Op)}
    made: dict[str, Tensor] = {}
    names: list[dict[str, str]] = [{} for _ in range(n)]

    def copy(o: Op, lane: int) -> Op:
        out = o.out
        if lane and out:
            while out in taken:
                out += f"_{'bcdefgh'[lane - 1]}"
            taken.add(out)
            names[lane][o.out] = out
        attrs = dict(o.attrs)
        tensor = attrs.get("tensor", "")
        if tensor and index[tensor] == "block":
            attrs["tensor"] = f"{tensor}{lane or ''}"
            if lane:
                made[attrs["tensor"]] = replace(p.tensor(tensor), name=attrs["tensor"])
        elif tensor and lane:
            attrs["lane"] = lane
        return replace(o, out=out, args=tuple(names[lane].get(a, a) for a in o.args), attrs=tuple(sorted(attrs.items())))

    def shared(o: Op) -> bool:
        of = o.attr("tensor")
        return o.kind == "const" or (o.kind == "scalar" and not of) or (o.kind == "load" and index[of] == "const")

    body = tuple(copy(o, lane) for o in items.body if isinstance(o, Op) for lane in range(1 if shared(o) else n))
    return replace(k, lanes=n, body=tuple(replace(s, body=body) if s is items else s for s in k.body)), list(made.values())
