"""async_copies: copies that run by themselves, and the waits for them.

On a device that has such copies, loads of tiles are some, and of a number a token where it has four bytes, the least that is
copied: they are marked by a channel. Before the first op that reads one, or fills its buffer anew, a wait holds until all that
were started have arrived. Kernels whose blocks take several heads load them side by side, and have none.
"""
from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir.core import Kernel, Loop, Op, Program, Stmt, walk
from ..stage import takes

CHANNEL = "copies"


@takes("placed")
def async_copies(p: Program, device: Device) -> Program:
    """`p` with waits for copies, where `device` has them."""
    if not device.async_loads:
        return p
    return p.map_kernels(lambda k: k if k.heads_per_block > 1 else replace(k, body=_Arrive(p, k).body(k.body)))


class _Arrive:
    def __init__(self, p: Program, k: Kernel) -> None:
        self.p, self.tensors = p, {t.name: t for t in p.tensors}
        self.defs = {o.out: o for o in walk(k.body) if o.out}
        self.coming: set[str] = set()  # buffers

    def body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body: loads that copy asynchronously are marked, and one wait stands before the first op that touches their
        buffers.
        """
        out: list[Stmt] = []

        def wait() -> None:
            if self.coming:
                out.append(Op("wait", "", attrs=(("channel", CHANNEL),)))
                self.coming = set()

        for s in body:
            if isinstance(s, Loop):
                wait()
                s = replace(s, body=self.body(s.body))
            elif self.coming & self.touched(s):
                wait()
            if isinstance(s, Op) and s.kind == "load" and self.copied(s):
                s = s.with_attrs(channel=CHANNEL)
                self.coming.add(s.buffer)
            out.append(s)
        wait()
        return tuple(out)

    def copied(self, o: Op) -> bool:
        """Whether the load is of a whole tile as it lies, or of numbers of tokens; one that the caller may leave out is not, nor
        is one with padding."""
        t = self.tensors[o.attr("tensor")]
        whole = not t.optional and not any(self.p.padded(t))
        if len(t.dims) == 1:
            return t.index == "token" and t.dtype == "float32"
        return len(t.dims) == 2 and t.index in ("token", "slot") and whole and not o.attr("transposed")

    def touched(self, o: Op) -> set[str]:
        """The buffers that `o` fills and reads, itself or through expressions inside it."""
        if o.out and not o.buffer:
            return set()
        return {o.buffer} | {b for a in o.args for b in self.leaves(a)}

    def leaves(self, a: str) -> set[str]:
        o = self.defs.get(a)
        if o is None:
            return set()
        return {o.buffer} if o.buffer else {b for x in o.args for b in self.leaves(x)}
