"""check_copies: proves that kernels with one agent wait for asynchronous copies to shared memory.

The checker runs the ops in order, each loop for two iterations. It keeps the buffers that copies may still be filling: all since
the last wait, and the last ones before it that the wait left under way. No op may read or fill one of them.
"""
from __future__ import annotations

from ..ir.core import Kernel, Loop, Program, Stmt, loops
from .happens_before import RaceError

CHANNEL = "copies"
ITERATIONS = 2


def check_copies(p: Program) -> Program:
    """Returns `p`, or raises RaceError for an op that uses a buffer which an asynchronous copy may still be filling."""
    for k in p.kernels:
        if not k.agents:
            _Check(p, k).body(k.body)
    return p


class _Check:
    """home: value -> its buffer. coming: buffer -> the value that a copy is loading to it."""

    def __init__(self, p: Program, k: Kernel) -> None:
        self.where = f"{p.name}, kernel {k.name}"
        self.made = {o.out: o for o in k.ops if o.out}
        self.home = {o.out: o.buffer for o in k.ops if o.buffer}
        for lp in loops(k.body):  # outer loops first
            for c in lp.carried:
                self.home[c.name] = self.home[c.result] = self.home.get(c.init, "")
        self.coming: dict[str, str] = {}

    def read(self, a: str) -> set[str]:
        """The buffers that a read of `a` reads, through expressions."""
        o = self.made.get(a)
        if a in self.home or o is None:
            return {self.home.get(a, "")}
        return set[str]().union(*(self.read(x) for x in o.args))

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Run a body. RaceError for a buffer in use that a copy may be filling."""
        for s in body:
            if isinstance(s, Loop):
                for _ in range(ITERATIONS):
                    self.body(s.body)
                continue
            if s.kind == "wait" and s.attr("channel") == CHANNEL:
                arrived = len(self.coming) - s.attr("pending", 0)
                self.coming = dict([*self.coming.items()][max(arrived, 0):])
            if s.out and not s.buffer:  # an expression, which other ops read
                continue
            for buffer in {s.buffer}.union(*(self.read(a) for a in s.args)):
                if buffer in self.coming:
                    raise RaceError(f"{self.where}: {s.out or s.kind} uses {buffer} and does not wait for the copy of "
                                    f"{self.coming[buffer]}")
            if s.kind == "load" and s.attr("channel") == CHANNEL:
                self.coming[s.buffer] = s.out
