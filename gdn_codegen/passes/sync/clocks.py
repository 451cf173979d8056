"""clocks: vector clocks of the pipes of a device, from which `synchronise` knows which ops are complete. The checker has its own
(prove/clocks.py).

A pipe is (agent, name). `known[a][b]` is the number of ops of pipe b that are surely complete before the next op of pipe a
starts. The ops of a pipe run in order, unless the device lists the pipe as unordered. The issuing pipe of an agent issues the
ops of all its pipes. So all of them know what the issuing pipe knows.
"""
from __future__ import annotations

from ...devices import Cores
from .accesses import Pipe


class Pipes:
    """The pipes of a device that run ops of a kernel, and the issuing pipes of all agents, by number. issuer: for each pipe, the
    issuing pipe of its agent."""

    def __init__(self, device: Cores, used: set[Pipe]) -> None:
        self.names = [(a, n) for a in device.agents for n in dict.fromkeys([device.issuer, *device.pipes[a].values()])
                      if n == device.issuer or (a, n) in used]
        self.number = {p: i for i, p in enumerate(self.names)}
        self.unordered = {i for i, p in enumerate(self.names) if p[1] in device.unordered}
        self.issuer = [self.number[a, device.issuer] for a, _ in self.names]


class Clocks:
    """Vector clocks of all pipes. No op has been issued at first. A clock is a list that is replaced, never changed."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes
        self.issued = [0] * len(pipes.names)
        self.known = [[0] * len(pipes.names) for _ in pipes.names]
        self.heard = list(self.known)  # for each pipe, the clock of its issuer from which it learned last

    def learn(self, pipe: int, what: list[int]) -> None:
        """Let the next op of `pipe` rely on the completion of the ops that `what` counts."""
        self.known[pipe] = [a if a > b else b for a, b in zip(self.known[pipe], what, strict=True)]

    def start(self, pipe: int) -> list[int]:
        """The counts of ops that the next op of `pipe` may rely on."""
        own, said = self.known[pipe], self.known[self.pipes.issuer[pipe]]
        if said is not own and said is not self.heard[pipe]:
            self.heard[pipe] = said
            self.learn(pipe, said)
        return self.known[pipe]

    def run(self, pipe: int) -> list[int]:
        """Issue an op. Returns the counts of ops that are complete once it is. Its number on its pipe is the pipe's own count."""
        self.issued[pipe] += 1
        done = self.snapshot(pipe)
        if pipe not in self.pipes.unordered:
            self.known[pipe] = done
        return done

    def wait(self, pipe: int, what: list[int] | None) -> int:
        """Issue a wait, which learns `what`. Returns its number on its pipe."""
        self.issued[pipe] += 1
        known = self.known[pipe]
        learned = [a if a > b else b for a, b in zip(known, what or known, strict=True)]
        if pipe not in self.pipes.unordered:
            learned[pipe] = self.issued[pipe]
        self.known[pipe] = learned
        return self.issued[pipe]

    def snapshot(self, pipe: int) -> list[int]:
        """The counts of ops that are complete once all ops of `pipe` so far are."""
        known = self.start(pipe)
        if known[pipe] != self.issued[pipe]:
            known = known.copy()
            known[pipe] = self.issued[pipe]
        return known

    def barrier(self, pipe: int) -> None:
        """Let the next op of `pipe` rely on all ops of the pipe so far."""
        self.known[pipe] = self.snapshot(pipe)

    def drain(self, agent: str) -> None:
        """Let the issuer of an agent wait for all pipes of the agent."""
        for p, i in self.pipes.number.items():
            if p[0] == agent:
                self.learn(self.pipes.issuer[i], self.snapshot(i))
