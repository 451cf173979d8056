"""clocks: vector clocks, from which checkers derive which ops are complete.

A pipe issues ops in order. A clock has one entry for each pipe: the number of its ops that are known to be complete. When a pipe
waits for a signal, it learns the clock that the signal carries.
"""
from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

Pipe = TypeVar("Pipe", bound=Hashable)
Clock = list[int]


def joined(a: Clock, b: Clock) -> Clock:
    """The union of what two clocks know: the maximum of each entry."""
    return [x if x > y else y for x, y in zip(a, b, strict=True)]


class Clocks(Generic[Pipe]):
    """The clocks of `pipes`.

    issuers: pipe -> the pipe that issues its ops (default: itself). A pipe knows what its issuer knows.
    unordered: pipes whose ops overlap. On such a pipe an op cannot assume that earlier ops are complete.
    """

    def __init__(self, pipes: Sequence[Pipe], issuers: Mapping[Pipe, Pipe], unordered: Collection[Pipe] = ()) -> None:
        self.names = list(pipes)
        self.number = {p: n for n, p in enumerate(self.names)}
        self.issuer = [self.number[issuers.get(p, p)] for p in self.names]
        self.unordered = {self.number[p] for p in unordered}
        self.count = [0] * len(self.names)  # ops issued so far
        self.clock: list[Clock] = [[0] * len(self.names) for _ in self.names]  # clocks are replaced, never changed
        self.heard = list(self.clock)  # for each pipe, the clock of its issuer that it has joined last

    def known(self, pipe: int) -> Clock:
        """The ops that are known to be complete when the next op of `pipe` starts."""
        own, issuer = self.clock[pipe], self.clock[self.issuer[pipe]]
        if issuer is not own and issuer is not self.heard[pipe]:
            self.heard[pipe] = issuer
            own = self.clock[pipe] = joined(own, issuer)
        return own

    def learn(self, pipe: int, what: Clock) -> None:
        """Add the clock `what` to the knowledge of `pipe`."""
        self.clock[pipe] = joined(self.clock[pipe], what)

    def issue(self, pipe: int) -> int:
        """Issue an op on `pipe`. Returns its number on this pipe, from 1."""
        self.count[pipe] += 1
        if pipe not in self.unordered:
            own = self.clock[pipe] = self.known(pipe).copy()
            own[pipe] = self.count[pipe]
        return self.count[pipe]

    def wait(self, pipe: int, what: Clock) -> int:
        """Issue a wait on `pipe`, which learns `what`. Returns its number on this pipe."""
        self.count[pipe] += 1
        own = self.clock[pipe] = joined(self.known(pipe), what)
        if pipe not in self.unordered:
            own[pipe] = self.count[pipe]
        return self.count[pipe]

    def after(self, pipe: int) -> Clock:
        """The clock once all ops that `pipe` has issued are complete. A signal carries this clock."""
        out = self.known(pipe).copy()
        out[pipe] = self.count[pipe]
        return out

    def settle(self, pipe: int) -> None:
        """Record that all earlier ops of `pipe` are complete before its next op starts (a barrier of the pipe)."""
        self.clock[pipe] = self.after(pipe)
