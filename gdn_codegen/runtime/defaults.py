"""Chooses the schedule of a build that names none: the schedule that the op would choose on the GPUs of the command line."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..schedule import ScheduleError, changes, spelled
from ..targets import architecture
from .build import Build
from .call.choose import Choice, modelled, unfit


def planned(about: Build, gpus: Sequence[str], parts: bool, chunk: int | None, fields: dict[str, Any], shared_kib: int = 0
            ) -> Choice:
    """The first of the model's builds that fits. Tables are not read, since they are for shapes, and the command line names none.

    about: a build without arch, of any schedule. gpus: architectures, none for any. parts: whether long sequences are split.
    chunk: None where it is open. fields: of the schedule, as they are asked for. shared_kib: what blocks may take, as in Facts.
    """
    names = set(map(architecture, gpus))
    arch = names.pop() if len(names) == 1 else ""
    why: list[tuple[str, str]] = []
    for x, reason in modelled(about, arch, parts, (0, 0, 0), chunk):
        try:
            x = x.for_shared(shared_kib)
            x = replace(x, schedule=replace(x.plan, **fields)) if fields else x
            against = unfit(x)
        except ScheduleError as e:
            against = str(e)
        if not against:
            return Choice(x, (*why, (f"schedule {x.plan.name}, chunks of {x.chunk}", reason)))
        why.append((f"not {x.name}", against))
    raise ScheduleError(why[0][1])


def words(b: Build) -> str:
    """The options that ask for a build's schedule."""
    more = [f"--set {n}={spelled(v)}" for n, v in changes(b.plan, b.arch).items() if n != "partition"]
    parts = [f"--partition {b.plan.partition}"] if b.plan.partition else []
    arch = [f"--arch {b.arch}"] if b.arch else []
    return " ".join([f"--schedule {b.plan.name} --chunk {b.chunk}", *parts, *more, *arch])


def better(b: Build, gpu: str) -> str:
    """The end of a warning about spills on a GPU: the schedule that the op would choose there."""
    try:
        best = planned(replace(b, arch=""), (gpu,), bool(b.plan.partition), None, {}).build
    except ScheduleError:  # none of the model's fits this page: only its own schedule does
        return ""
    if (best.plan, best.chunk, best.arch) == (b.plan, b.chunk, b.arch):
        return ", and is what the op takes there all the same"
    return f": {words(best)} is what the op takes there"
