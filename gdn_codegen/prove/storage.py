"""check_storage: proves that every reader finds the value it means.

Buffers are followed op by op, through two iterations of a loop: a value that lies in a buffer must not have been overwritten
when an op, or an expression inside it, reads it. For devices of one agent, where program order is the order of time; but ops that
run side by side overwrite nothing that another of them reads.
"""
from __future__ import annotations

from ..ir.core import Kernel, Loop, Op, Program, Stmt, walk
from ..ir.ops import BESIDE


class OverwrittenError(ValueError):
    """A buffer was given to a second value while the first is still read."""


def check_storage(p: Program) -> Program:
    """`p` itself; OverwrittenError where a buffer holds another value than the one that an op reads."""
    for k in p.kernels:
        _Storage(p, k).body(k.body)
    return p


class _Storage:
    def __init__(self, p: Program, k: Kernel) -> None:
        self.where = f"{p.name}, kernel {k.name}"
        self.defs = {o.out: o for o in walk(k.body) if o.out}
        self.home = {o.out: o.buffer for o in self.defs.values() if o.buffer}  # value -> buffer
        self.holds: dict[str, str] = {}  # buffer -> the value in it now

    def leaves(self, a: str) -> list[str]:
        """The stored values that reading `a` reads."""
        o = self.defs.get(a)
        return [a] if o is None or o.buffer else [x for b in o.args for x in self.leaves(b)]

    def read(self, a: str, reader: str) -> None:
        buffer = self.home.get(a, "")
        if buffer and self.holds.get(buffer) != a:
            raise OverwrittenError(f"{self.where}: {reader} reads {a}, but {buffer} holds {self.holds.get(buffer)} by then")

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Follow which value each buffer holds. OverwrittenError where a value is read after another took its place."""
        row: list[Op] = []  # ops side by side
        for s in body:
            if isinstance(s, Op) and s.attr(BESIDE):
                row = self.beside([*row, s])
            if isinstance(s, Loop):
                self.loop(s)
            elif s.buffer or not s.out:
                for a in (x for arg in s.args for x in self.leaves(arg)):
                    self.read(a, s.out or s.kind)
                if s.buffer:
                    self.holds[s.buffer] = s.out

    def beside(self, row: list[Op]) -> list[Op]:
        """The row, or an empty one once it is complete, and what its ops read is proved to stay."""
        if len(row) < row[0].attr(BESIDE):
            return row
        for o in row:
            for a in (x for arg in o.args for x in self.leaves(arg)):
                for other in row:
                    if other is not o and other.buffer == self.home.get(a):
                        raise OverwrittenError(f"{self.where}: {other.out} (line {other.line}) overwrites {a}, which {o.out} "
                                               "reads side by side with it")
        return []

    def loop(self, lp: Loop) -> None:
        """Follow a loop for two iterations, the second with what the first leaves."""
        for c in lp.carried:
            self.home[c.name] = self.home[c.result] = self.home.get(c.init, "")
        for iteration in range(2):
            for c in lp.carried:
                start = c.init if iteration == 0 else c.next
                self.read(start, f"carried {c.name}")
                self.holds[self.home[c.name]] = c.name
            self.body(lp.body)
        for c in lp.carried:
            self.read(c.next, f"carried {c.result}")
            self.holds[self.home[c.result]] = c.result
