"""clocks: vector clocks, by which checkers know what is surely over.

A pipe runs ops one after the other. A clock says of each pipe how many of its ops are surely complete. What a pipe knows grows
where it waits for something that another one announced.
"""
from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

Pipe = TypeVar("Pipe", bound=Hashable)
Clock = list[int]


def joined(a: Clock, b: Clock) -> Clock:
    """What is known where both are."""
    return [x if x > y else y for x, y in zip(a, b, strict=True)]


class Clocks(Generic[Pipe]):
    """The clocks of `pipes`. issuers: of a pipe the one that issues its ops, whose knowledge it has; itself where none is named.
    unordered: pipes whose ops overlap, so that one does not know the one before it."""

    def __init__(self, pipes: Sequence[Pipe], issuers: Mapping[Pipe, Pipe], unordered: Collection[Pipe] = ()) -> None:
        self.names = list(pipes)
        self.number = {p: n for n, p in enumerate(self.names)}
        self.issuer = [self.number[issuers.get(p, p)] for p in self.names]
        self.unordered = {self.number[p] for p in unordered}
        self.count = [0] * len(self.names)  # ops issued so far
        self.clock: list[Clock] = [[0] * len(self.names) for _ in self.names]

    def known(self, pipe: int) -> Clock:
        """What the next op of `pipe` may rely on."""
        if self.issuer[pipe] != pipe:
            self.clock[pipe] = joined(self.clock[pipe], self.clock[self.issuer[pipe]])
        return self.clock[pipe]

    def learn(self, pipe: int, what: Clock) -> None:
        """Let the next op of `pipe` rely on what is complete according to `what`."""
        self.clock[pipe] = joined(self.clock[pipe], what)

    def issue(self, pipe: int) -> int:
        """One more op; its number on its pipe."""
        self.known(pipe)
        self.count[pipe] += 1
        if pipe not in self.unordered:
            self.clock[pipe][pipe] = self.count[pipe]
        return self.count[pipe]

    def after(self, pipe: int) -> Clock:
        """What is known once all ops that `pipe` has issued are complete."""
        out = list(self.known(pipe))
        out[pipe] = self.count[pipe]
        return out

    def settle(self, pipe: int) -> None:
        """Every op of `pipe` so far is complete before its next one begins."""
        self.clock[pipe][pipe] = self.count[pipe]
