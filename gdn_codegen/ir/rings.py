"""rings: which values lie in buffers whose slots are used in rotation."""
from __future__ import annotations

from .core import Kernel, Op, Stmt


def rings(k: Kernel) -> dict[str, tuple[str, int]]:
    """The values in buffers with several slots: value -> (loop, ahead). The iterations of `loop` use the slots in rotation; it is
    "" outside of such a loop. `ahead` is how many iterations the value's slot is ahead of the current iteration's."""
    ring = {b.name for b in k.buffers if b.slots > 1}
    out: dict[str, tuple[str, int]] = {}

    def each(body: tuple[Stmt, ...], loop: str) -> None:
        for s in body:
            if isinstance(s, Op):
                if s.buffer in ring:
                    out[s.out] = loop, int(bool(loop))
                continue
            each(s.body, s.index if any(c.slots > 1 for c in s.carried) else loop)
            out.update({x: (s.index, 0) for c in s.carried if c.slots > 1 for x in (c.name, c.result)})
    each(k.body, "")
    return out
