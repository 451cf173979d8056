"""check_read_back: proves that a barrier stands between a write to global memory and a read of it by the same instance.

For devices with one agent, whose threads share tiles. The checker runs the ops in order, each loop for three iterations. It keeps
the memory that stores have written since the last barrier of the block. No op may read it.
"""
from __future__ import annotations

from ..ir.core import Loop, Program, Stmt
from ..ir.printer import op_text
from .happens_before import RaceError

ITERATIONS = 3


def check_read_back(p: Program) -> Program:
    """Returns `p`, or raises RaceError if a thread may read what another thread of its block is still writing."""
    for k in p.kernels:
        if not k.agents:
            _Check(p, k.name).body(k.body)
    return p


class _Check:
    def __init__(self, p: Program, kernel: str) -> None:
        self.where = f"{p.name}, kernel {kernel}"
        self.shared = {t.name: t.over for t in p.tensors if t.over}
        self.fresh: dict[str, str] = {}  # memory -> the store that wrote it since the last barrier

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Run a body. RaceError for a read of memory that was written since the last barrier."""
        for s in body:
            if isinstance(s, Loop):
                for _ in range(ITERATIONS):
                    self.body(s.body)
                continue
            if s.kind == "barrier":
                self.fresh.clear()
            name = s.attr("tensor")
            memory = self.shared.get(name, name)
            if s.kind == "store":
                self.fresh[memory] = op_text(s)
            elif memory in self.fresh:
                raise RaceError(f"{self.where}: {op_text(s)} reads what {self.fresh[memory]} wrote, without a barrier between")
