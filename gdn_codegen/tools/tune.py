"""`gdn_codegen tune`: times candidates ahead of all calls, and writes the table from which calls choose.

A run that is killed loses at most one measurement, and the same command continues it (`tune_log.py`).
"""
from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..runtime import cache
from ..runtime.build import Build
from ..runtime.call import choose, tables
from ..runtime.call.device import facts
from ..runtime.load import cached
from ..runtime.progress import under_way
from .candidates import candidates
from .compile_ahead import fill_cache
from .shapes import Shape
from .tune_jobs import Job, in_short_parts, jobs, shared_kib
from .tune_log import Log, job_of, log_beside, table
from .tune_meter import DeviceLost, Meter


@dataclass
class Tuner:
    """A run. memory: bytes that a candidate may hold between its kernels; budget: seconds, after which no job begins."""

    log: Log
    meter: Meter
    arch: str
    units: int
    budget: float | None = None
    memory: int = 8 * 2**30
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    _wrong: dict[Build, str] = field(default_factory=dict)
    _best: dict[str, tuple[float, str]] = field(default_factory=dict)  # by inputs: ms and a build's name

    def run(self, todo: Sequence[Job]) -> list[Job]:
        """Measure what the log does not have; the jobs still pending."""
        for line in self.log.lost:
            self.say(f"{self.log.path}: line {line} is not whole, and left out")
        pending = [j for j in todo if j.key not in self.log.results]
        for key, r in self.log.results.items():
            if "ms" in r:
                j = job_of(key, self.log.head["target"])
                self._best[j.about] = min(self._best.get(j.about, (math.inf, "")), (r["ms"], j.build.name))
        self.say(f"{len(todo)} measurements, {len(todo) - len(pending)} of them in {self.log.path}")
        start, measured = self.clock(), 0
        while pending and not (self.budget is not None and self.clock() - start >= self.budget):
            j = pending[0]
            with under_way(f"{j.shape.name}: {j.build.name}"):
                result = self.judge(j)
            self.log.append({"key": j.key, **result})
            pending, measured = pending[1:], measured + 1
            each = (self.clock() - start) / measured
            self.say(f"[{len(todo) - len(pending)}/{len(todo)}] {j.shape.name}: {j.build.name}: {self.told(j, result)}; "
                     f"{self.left(each * len(pending), start)}")
        if pending:
            self.say(f"{len(pending)} pending: the same command goes on")
        return pending

    def left(self, seconds: float, start: float) -> str:
        """The text about the remaining time. seconds: an estimate. start: when the run began, by the tuner's clock."""
        budget = f", {max(0.0, self.budget - (self.clock() - start)):.0f} s of the budget" if self.budget is not None else ""
        return f"about {seconds:.0f} s left{budget}"

    def told(self, j: Job, result: dict[str, Any]) -> str:
        """The text about a job's result. Keeps the best time of these inputs."""
        if "dropped" in result:
            return f"dropped: {result['dropped']}"
        ms, name = min(self._best.get(j.about, (math.inf, "")), (result["ms"], j.build.name))
        self._best[j.about] = ms, name
        return f"{result['ms']:.4f} ms (best {ms:.4f}, {name})"

    def judge(self, j: Job) -> dict[str, Any]:
        """The time of a job, or why its build is dropped."""
        why = choose.unfit(j.build)
        if not why and self.log.begun[j.key] >= 2:
            why = "stopped the process twice"
        if why:
            return {"dropped": why}
        self.log.append({"begun": j.key})
        kernels = in_short_parts(j.build)
        if kernels not in self._wrong:
            self._wrong[kernels] = self.meter.wrong(kernels)
        if self._wrong[kernels]:
            return {"dropped": self._wrong[kernels]}
        held = self.meter.workspace(j.build, j.shape)
        if held > self.memory:
            return {"dropped": f"holds {held / 2**30:.1f} GiB between its kernels, {self.memory / 2**30:.1f} are allowed"}
        return self.meter.time(j.build, j.shape)


def tune(about: Build, shapes: Sequence[Shape], names: Sequence[str], arch: str, units: int, meter: Meter,
         out: Path | None = None, **options: Any) -> int:
    """Tune for inputs of a kind, by `tuned`."""
    cache.place("out", out or tables.own_path(names[0], about.target))  # before jobs, which lowers
    return tuned(about.target, jobs(about, shapes, arch, units, shared_kib(names)), names, arch, units, meter, out, **options)


def tuned(name: str, todo: Sequence[Job], names: Sequence[str], arch: str, units: int, meter: Meter, out: Path | None = None,
          **options: Any) -> int:
    """Measure, and write the log and the table. Returns 1 if nothing could be measured or the device was lost.

    name: of the table: a target, or "decode". names: of the device, from its facts. out: the path of the table; the log is
    beside it. By default it is the path where calls on this device look. options: of Tuner.
    """
    path = out or tables.own_path(names[0], name)
    cache.place("out", path)
    if path.suffix != ".json":  # its log is what the name with .jsonl says
        raise ValueError(f"out: got {path}; accepted: a name that ends in .json")
    with cache.lock(path):
        log = log_beside(path, name, names).load()
        tuner = Tuner(log, meter, arch, units, **options)
        lost = False
        try:
            tuner.run(todo)
        except DeviceLost as e:
            tuner.say(f"the device is lost ({e}): the same command goes on without what lost it, if it does so twice")
            lost = True
        finally:
            made = table(log, arch, units)
            cache.write(path, json.dumps(made, indent=1) + "\n")
            tuner.say(f"{path}: {len(made['rows'])} rows")
    return int(lost or not made["rows"])


def listing(about: Build, shapes: Sequence[Shape], names: Sequence[str], arch: str, units: int, out: Path | None = None
            ) -> list[str]:
    """Lines for `--list`: what a run would measure, and its result if the log has one."""
    return listed(about.target, jobs(about, shapes, arch, units, shared_kib(names)), names, out)


def listed(name: str, todo: Sequence[Job], names: Sequence[str], out: Path | None = None) -> list[str]:
    """Lines for the jobs of one table, with their results."""
    log = log_beside(out or tables.own_path(names[0], name), name, names)
    if log.path.exists():
        log.load()
    lines = []
    for j in todo:
        r = log.results.get(j.key, {})
        said = f"{r['ms']:.4f} ms" if "ms" in r else f"dropped: {r['dropped']}" if r else choose.unfit(j.build) or "pending"
        lines.append(f"{j.shape.name:24} {j.build.name:44} {said}")
    return lines


def compile_candidates(about: Build, shapes: Sequence[Shape], arch: str) -> Iterator[str]:
    """Fill the toolchains' caches (TILELANG_CACHE_DIR, TRITON_CACHE_DIR) with what a run on such a GPU would compile; a line for
    each build. Needs no GPU."""
    heads = sorted({(2, 8), *((s.H, s.HV) for s in shapes)})  # those of the check, too
    builds = (in_short_parts(b.for_shared(shared_kib((arch,)))) for b in candidates(about, arch))
    return compiled_ahead(list(dict.fromkeys(builds)), arch, heads)


def compiled_ahead(builds: Sequence[Build], arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Compile those of the builds that fit; a line for each."""
    todo = [b for b in builds if choose.fits(b)]
    for i, b in enumerate(todo, 1):
        start = time.monotonic()
        with under_way(f"compiling {b.name} for {arch}"):
            fill_cache(b, cached(b), arch, heads)
        yield f"[{i}/{len(todo)}] {b.name}: {time.monotonic() - start:.0f} s"


def here() -> tuple[tuple[str, ...], str, int]:
    """Names, architecture and multiprocessors of the GPU."""
    if not torch.cuda.is_available():
        raise ValueError("tune: got a machine where torch sees no GPU; accepted: one with the GPU to tune for")
    found = facts(torch.device("cuda", torch.cuda.current_device()))
    return found.names, found.arch, found.units
