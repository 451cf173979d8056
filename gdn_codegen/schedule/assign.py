"""assign: who computes each op. Requires stage "decomposed"; produces stage "assigned".

On a device of one agent that is all there is to it.
"""
from __future__ import annotations

from dataclasses import replace

from ..devices import Device
from ..ir.core import Loop, Program, Stmt


def assign(p: Program, device: Device) -> Program:
    """`p` with an agent on every op."""
    agent = device.agents[0]

    def each(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(replace(s, body=each(s.body)) if isinstance(s, Loop) else replace(s, agent=agent) for s in body)

    return replace(p, stage="assigned", kernels=tuple(replace(k, body=each(k.body)) for k in p.kernels))
