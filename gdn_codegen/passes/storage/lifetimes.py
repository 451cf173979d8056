"""lifetimes: between which statements of a kernel a value is live. `pack` uses it.

Statements are numbered in program order. A loop has a number for its end. A value that is computed before a loop and read in it
is live to the loop's end, as is a carried value.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from ...ir.core import Loop, Op, Stmt


class Lifetimes:
    """The first and the last statement between which each value of a body is live.

    defs: the op of each value. view: whether an op has no storage. A read of such a value is one of its operands.
    """

    def __init__(self, body: tuple[Stmt, ...], defs: Mapping[str, Op], view: Callable[[Op], bool]) -> None:
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self._defs, self._view, self._at = defs, view, 0
        self._body(body)

    def _body(self, body: tuple[Stmt, ...]) -> None:
        """Number the statements of a body."""
        for s in body:
            if isinstance(s, Loop):
                self._loop(s)
                continue
            self._at += 1
            for a in s.args:
                self._read(a)
            if s.out:
                self.first[s.out] = self.last[s.out] = self._at

    def _loop(self, s: Loop) -> None:
        """Number the statements of a loop."""
        for c in s.carried:
            self._read(c.init)
            self.first[c.name] = self._at
        start = self._at
        self._body(s.body)
        self._at += 1
        for c in s.carried:
            self._read(c.next)
            self.first[c.result] = self.last[c.name] = self.last[c.result] = self._at
        carried = {c.name for c in s.carried}
        for name, end in list(self.last.items()):
            if self.first[name] <= start < end or name in carried:
                self.last[name] = max(end, self._at)

    def _read(self, name: str) -> None:
        """Extend the lifetime of a value, and of values under it if it is a view, to this statement."""
        self.last[name] = self._at
        o = self._defs.get(name)
        if o is not None and o.type is not None and o.type.rank and self._view(o):  # a number has been computed
            for a in o.args:
                self._read(a)
