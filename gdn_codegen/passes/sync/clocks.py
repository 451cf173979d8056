"""clocks: vector clocks of the pipes of a device, from which `synchronise` knows which ops are complete. The checker has its own
(prove/clocks.py).

A pipe is (agent, name). The clock `known[a]` has an entry for each pipe b: the number of ops of pipe b that are surely complete
before the next op of pipe a starts. The ops of a pipe run in order, unless the device lists the pipe as unordered. The issuing
pipe of an agent issues the ops of all its pipes. So all of them know what the issuing pipe knows.

A clock is one integer with a field of BITS bits for each pipe. The highest bit of each field stays free. So one subtraction
compares all entries of two clocks, which takes a fraction of the time of a comparison of lists.
"""
from __future__ import annotations

from ...devices import Cores
from .accesses import Pipe

#: The bits of a field. A traversal has far fewer ops and waits on a pipe than fit into one.
BITS = 24


class Pipes:
    """The pipes of a device that run ops of a kernel, and the issuing pipes of all agents, by number. issuer: for each pipe, the
    issuing pipe of its agent. one: for each pipe, the clock whose only entry is 1 for that pipe. free: the highest bits of all
    fields."""

    def __init__(self, device: Cores, used: set[Pipe]) -> None:
        self.names = [(a, n) for a in device.agents for n in dict.fromkeys([device.issuer, *device.pipes[a].values()])
                      if n == device.issuer or (a, n) in used]
        self.number = {p: i for i, p in enumerate(self.names)}
        self.unordered = {i for i, p in enumerate(self.names) if p[1] in device.unordered}
        self.issuer = [self.number[a, device.issuer] for a, _ in self.names]
        self.one = [1 << BITS * i for i in range(len(self.names))]
        self.free = sum(one << BITS - 1 for one in self.one)

    def entry(self, clock: int, pipe: int) -> int:
        """The entry of a clock for a pipe."""
        return clock >> BITS * pipe & (1 << BITS) - 1

    def covers(self, a: int, b: int) -> bool:
        """Whether no entry of clock `a` is less than that of `b`."""
        return (a | self.free) - b & self.free == self.free

    def join(self, a: int, b: int) -> int:
        """The clock with the larger entry of `a` and `b` for each pipe."""
        larger = (a | self.free) - b & self.free  # the highest bits of the fields in which `a` is not less
        return b ^ (a ^ b) & larger - (larger >> BITS - 1)


class Clocks:
    """Vector clocks of all pipes. No op has been issued at first."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes
        self.issued = [0] * len(pipes.names)
        self.known = [0] * len(pipes.names)
        self.heard = list(self.known)  # for each pipe, the clock of its issuer from which it learned last
        self._join, self._issuer, self._unordered, self._one = pipes.join, pipes.issuer, pipes.unordered, pipes.one

    def learn(self, pipe: int, what: int) -> None:
        """Let the next op of `pipe` rely on the completion of the ops that `what` counts."""
        self.known[pipe] = self._join(self.known[pipe], what)

    def start(self, pipe: int) -> int:
        """The counts of ops that the next op of `pipe` may rely on."""
        known, said = self.known[pipe], self.known[self._issuer[pipe]]
        if said != self.heard[pipe]:
            self.heard[pipe] = said
            if said != known:
                known = self.known[pipe] = self._join(known, said)
        return known

    def wait(self, pipe: int, what: int) -> int:
        """Issue a wait, which learns `what`. Returns its number on its pipe."""
        number = self.issued[pipe] = self.issued[pipe] + 1
        known = self._join(self.known[pipe], what)
        self.known[pipe] = known if pipe in self._unordered else known + self._one[pipe]
        return number

    def snapshot(self, pipe: int) -> int:
        """The counts of ops that are complete once all ops of `pipe` so far are."""
        known = self.known[pipe]
        if self.known[self._issuer[pipe]] != self.heard[pipe]:
            known = self.start(pipe)
        if pipe in self._unordered:  # other pipes count all of their ops already
            known += (self.issued[pipe] - self.pipes.entry(known, pipe)) * self._one[pipe]
        return known

    def barrier(self, pipe: int) -> None:
        """Let the next op of `pipe` rely on all ops of the pipe so far."""
        self.known[pipe] = self.snapshot(pipe)

    def drain(self, agent: str) -> None:
        """Let the issuer of an agent wait for all pipes of the agent."""
        for p, i in self.pipes.number.items():
            if p[0] == agent:
                self.learn(self.pipes.issuer[i], self.snapshot(i))
