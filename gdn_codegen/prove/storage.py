"""check_storage: proves that no value is overwritten before its last read.

The checker tracks the value that each buffer holds, op by op, through two iterations of a loop. When an op reads a value,
directly or through an expression, the value must still be in its buffer. This is for devices with one agent, which runs ops in
program order. Ops that one statement runs in parallel must not overwrite each other's operands.
"""
from __future__ import annotations

from ..ir.core import Kernel, Loop, Op, Program, Stmt
from ..ir.ops import BESIDE


class OverwrittenError(ValueError):
    """An op reads a value after another value has replaced it in its buffer."""


def check_storage(p: Program) -> Program:
    """Returns `p`, or raises OverwrittenError if a buffer holds another value than the one that an op reads from it."""
    for k in p.kernels:
        _Storage(p, k).body(k.body)
    return p


class _Storage:
    def __init__(self, p: Program, k: Kernel) -> None:
        self.where = f"{p.name}, kernel {k.name}"
        self.defs = {o.out: o for o in k.ops if o.out}
        self.home = {o.out: o.buffer for o in self.defs.values() if o.buffer}  # value -> buffer
        self.buffers = {b.name for b in k.buffers}
        self.holds: dict[str, str] = {}  # buffer -> the value in it now

    def leaves(self, a: str) -> list[str]:
        """The values with storage that a read of `a` reads."""
        o = self.defs.get(a)
        return [a] if o is None or o.buffer else [x for b in o.args for x in self.leaves(b)]

    def read(self, a: str, reader: str) -> None:
        buffer = self.home.get(a, "")
        if buffer and self.holds.get(buffer) != a:
            raise OverwrittenError(f"{self.where}: {reader} reads {a}, but {buffer} holds {self.holds.get(buffer)} by then")

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Track the value in each buffer. OverwrittenError if a value is read after another one has replaced it."""
        row: list[Op] = []  # ops that one statement runs in parallel, so far
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
        """Check a group of parallel ops once it is complete. Returns the group if it is incomplete, else an empty list."""
        if len(row) < row[0].attr(BESIDE):
            return row
        for o in row:
            for a in (x for arg in o.args for x in self.leaves(arg)):
                for other in row:
                    if other is not o and other.buffer == self.home.get(a):
                        raise OverwrittenError(f"{self.where}: {other.out} ({other.line}) overwrites {a}, which "
                                               f"{o.out} reads side by side with it")
        return []

    def loop(self, lp: Loop) -> None:
        """Track a loop for two iterations. The second starts with the buffers as the first leaves them."""
        for c in lp.carried:
            own = c.name if c.name in self.buffers else self.home.get(c.init, "")  # its own, or the initial value's
            self.home[c.name] = self.home[c.result] = own
        for iteration in range(2):
            for c in lp.carried:
                start = c.init if iteration == 0 else c.next
                self.read(start, f"carried {c.name}")
                self.holds[self.home[c.name]] = c.name
            self.body(lp.body)
        for c in lp.carried:
            self.read(c.next, f"carried {c.result}")
            self.holds[self.home[c.result]] = c.result
