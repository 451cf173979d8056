"""The log of `gdn_codegen tune`, and the table that is made from it alone.

Each measurement is a line, written to disk before the next one begins. So a run that is killed loses at most one measurement.
"""
from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..runtime import cache
from ..runtime.build import Build
from ..runtime.call import tables
from ..runtime.call.request import DEFAULT_CHUNK
from ..runtime.call.tables import Row
from ..schedule import changes
from ..schedule.contract import Contract
from .tune_jobs import Job, gradient_choice, model_choice, step_choice

#: A candidate replaces the model's choice if it takes at most this share of its time.
MARGIN = 0.98


@dataclass
class Log:
    """Results by job's key, kept in a file of one JSON object a line. Its first line says what they were measured on."""

    path: Path
    head: dict[str, Any]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    headed: bool = False

    def load(self) -> Log:
        """Read what is there; lines that a kill cut short are passed over and named in `lost`."""
        data = self.path.read_bytes() if self.path.exists() else b""
        for i, line in enumerate(data.splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError) as e:
                if isinstance(e, LogError):
                    raise
                self.lost.append(i)
        if data and not data.endswith(b"\n"):
            self._write(b"\n")
        if not self.headed:  # a new file, or one whose first line a kill cut short
            self.append(self.head)
        return self

    def _take(self, record: dict[str, Any]) -> None:
        if "versions" in record:
            self.headed = True
            if record != self.head:
                raise LogError(f"log: got {self.path}, which is of {record}; accepted: a log of {self.head}, or another --out")
        elif "begun" in record:
            self.begun[record["begun"]] += 1
        else:
            self.results[record["key"]] = record

    def append(self, record: dict[str, Any]) -> None:
        """Writes a line. It is on disk when this returns."""
        self._write((json.dumps(record) + "\n").encode())
        self._take(record)

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with cache.naming(self.path):
                while data:  # a disk that is nearly full takes a part of it
                    data = data[os.write(fd, data):]
                os.fsync(fd)
        finally:
            os.close(fd)


class LogError(ValueError):
    """A log that belongs to other measurements."""


def job_of(key: str, table: str) -> Job:
    """The job of a log's key."""
    k = json.loads(key)
    about = {n: k[n] for n in tables.ABOUT} | {"contract": Contract.parse(k["accept"])}
    return Job(tables.chosen(about, k["build"], table), k["H"], k["HV"], tuple(k["lens"]),
               table if table in tables.SHARED else "")


def table(log: Log, arch: str, units: int) -> dict[str, Any]:
    """The table of a log: for each kind of input, shape and chunk (in that of decoding: target) the fastest build; the model's
    choice unless another takes MARGIN of its time or less; of equals the one with fewer fields changed. The same log gives the
    same table."""
    name = log.head["target"]
    groups: dict[str, list[tuple[float, str, Job]]] = {}
    for key, r in sorted(log.results.items()):
        if "ms" in r:
            j = job_of(key, name)
            groups.setdefault(j.about, []).append((r["ms"], key, j))
    rows = []
    for _, found in sorted(groups.items()):
        model = replace(found[0][2], build=_modelled(found[0][2], arch, units)).key
        model_ms = next((ms for ms, key, _ in found if key == model), None)
        parts: dict[Any, list[tuple[float, str, Job]]] = {}
        for x in found:
            b = x[2].build
            parts.setdefault((b.target if name in tables.SHARED else "", 0 if name == tables.DECODE else b.chunk), []).append(x)

        def cost(x: tuple[float, str, Job], model: str = model) -> tuple[float, int, str]:
            return x[0] * (MARGIN if x[1] == model else 1), len(changes(x[2].build.plan, x[2].build.arch)), x[1]
        for _, those in sorted(parts.items()):
            ms, _, best = min(those, key=cost)
            rows.append(tables.as_json(Row(log.head["device"], best.build, best.extent, ms, model_ms, table=name)))
    return {**log.head, "rows": rows}


def _modelled(j: Job, arch: str, units: int) -> Build:
    """The model's choice for the inputs of a job, at its size and for the shared memory of its GPU."""
    kib = j.build.plan.shared_kib
    if j.table == tables.BACKWARD:
        return gradient_choice(j.build, arch, j.extent.shape_class, units, kib)
    if j.table == tables.DECODE:
        return step_choice(j.build, j.extent, units, kib)
    plain = replace(j.build, schedule=Build(j.build.target).schedule, chunk=DEFAULT_CHUNK, arch="")
    return model_choice(plain, j.extent, arch, units, kib)


def log_beside(path: Path, target: str, names: Sequence[str]) -> Log:
    """The log of a table (of a target, or of decoding) for a device with these names. It is not read yet."""
    return Log(path.with_suffix(".jsonl"), {"device": names[0], "kind": names[1], "target": target,
                                            "versions": tables.versions(target)})
