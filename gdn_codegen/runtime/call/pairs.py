"""Pairs of builds: the first one declines some calls, by a counter on the device (passes/cut/if_declined.py)."""
from __future__ import annotations

from dataclasses import replace

from ...derived_pages import Derived
from ...schedule.contract import PLAIN
from ...targets.candidates import Candidate
from ..build import Build

#: Fields of a contract by which a call stores states after chunks or tokens. Both builds of a pair have chunks of their own.
STORING = ("checkpoints", "rows", "slots", "accepted", "parents", "frozen", "positions")


def of_candidate(b: Build, x: Candidate) -> Build | None:
    """The build of a candidate for the inputs of `b`. None where it is of a pair, and calls of `b` cannot have one."""
    found = replace(b, schedule=x.schedule, chunk=x.chunk or b.chunk, arch=x.arch)
    if x.earlier is None:
        return found
    stores = any(getattr(b.contract, n) != getattr(PLAIN, n) for n in STORING)
    if stores or isinstance(b.page, Derived):
        return None
    schedule, chunk = x.earlier
    return replace(found, earlier=replace(b, schedule=schedule, chunk=chunk, arch=x.arch))
