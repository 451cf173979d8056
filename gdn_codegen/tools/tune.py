"""`gdn_codegen tune`: times candidates ahead of all calls, and writes the table from which calls choose.

Each measurement is a line of a log, written to disk before the next one begins. So a run that is killed loses at most one
measurement, and the same command continues it. The table is made from the log alone.
"""
from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ..host.check import Check
from ..host.host import Host
from ..ir import interpret
from ..runtime import cache
from ..runtime.build import Build, lowered
from ..runtime.call import choose, choose_decode, tables
from ..runtime.call.request import DECODE_CHUNK, DEFAULT_CHUNK
from ..runtime.call.tables import Extent, Row
from ..runtime.load import cached, import_path, module
from ..runtime.progress import under_way
from ..schedule import changes, varied
from ..schedule.contract import Contract
from . import bench_gpu
from .candidates import candidates
from .compile_ahead import compile_ahead
from .peers import Problem
from .problems import BETAS, Reference, alike, errors, head_errors, problem, reference
from .shapes import Shape
from .verify import TOLERANCE

#: A candidate replaces the model's choice if it takes at most this share of its time.
MARGIN = 0.98
#: With nearly equal keys a candidate's error may be at most so many times that of its target's `fused`, or what `Check`
#: accepts.
ALIKE = 2


# --- jobs -------------------------------------------------------------------------------------------------------------
def model_choice(about: Build, x: Extent, arch: str, units: int) -> Build:
    """The build that a call gets if no table has a row for it."""
    return next((b for b, _ in choose.modelled(
        about, arch, 2 * x.walks <= units, x.shape_class, None, x.shared) if choose.fits(b)), about)


def step_choice(about: Build, x: Extent, units: int) -> Build:
    """The build that a decoding step gets if no table has a row for it and both targets run."""
    plain = replace(about, chunk=DECODE_CHUNK, arch="")
    return next((b for b, _ in choose_decode.modelled(plain, x, units, choose_decode.PREFERRED["cuda"]) if choose.fits(b)), plain)


@dataclass(frozen=True)
class Job:
    """A build to be timed at a shape, for a table."""

    build: Build
    H: int
    HV: int
    lens: tuple[int, ...]
    table: str = ""  # "decode", or its target's

    @property
    def shape(self) -> Shape:
        """The shape, named by its lengths and head counts."""
        each = f"{len(self.lens)} x {self.lens[0]}" if len(set(self.lens)) == 1 else " + ".join(map(str, self.lens))
        return Shape(f"{each}, {self.H}/{self.HV}", self.lens, self.H, self.HV)

    @property
    def extent(self) -> Extent:
        """The size of a call at this shape."""
        return Extent(self.H, self.HV, len(self.lens), sum(self.lens))

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs as the log has them."""
        about = {n: getattr(self.build, n) for n in tables.ABOUT}
        return {**about, "accept": str(self.build.contract), "H": self.H, "HV": self.HV, "lens": list(self.lens)}

    @property
    def about(self) -> str:
        """Inputs that times may be compared on."""
        return json.dumps(self.inputs, sort_keys=True)

    @property
    def key(self) -> str:
        """What the log calls it."""
        return json.dumps({**self.inputs, "build": tables.choice_json(self.build, self.table)}, sort_keys=True)


def jobs(about: Build, shapes: Sequence[Shape], arch: str, units: int) -> list[Job]:
    """All that there is to time: at each shape the model's choice, then one candidate after the other at all shapes, but for
    parts as long as a sequence."""
    every = candidates(about, arch)
    first = {s: model_choice(about, Extent(s.H, s.HV, len(s.lens), sum(s.lens)), arch, units) for s in shapes}
    found = [Job(b, s.H, s.HV, s.lens) for s, b in first.items()] + [
        Job(b, s.H, s.HV, s.lens) for b in every for s in shapes if sensible(b, s, units)]
    return list({j.key: j for j in found}.values())


def sensible(b: Build, s: Shape, units: int) -> bool:
    """True if a candidate is worth timing: parts of a given length are shorter than a sequence, the number of walks is between
    half and six times the multiprocessors, and a kernel batches no heads or as many as possible."""
    if b.plan.value_heads not in (0, Extent(s.H, s.HV, len(s.lens), sum(s.lens)).shared):
        return False
    size = b.plan.part_chunks * b.chunk
    walks = s.HV * sum(-(-n // size) for n in s.lens) if size else units
    return size < max(s.lens) and units <= 2 * walks <= 12 * units


# --- log and table ---------------------------------------------------------------------------------------------------
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
               table if table == tables.DECODE else "")


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
            parts.setdefault(x[2].build.target if name == tables.DECODE else x[2].build.chunk, []).append(x)

        def cost(x: tuple[float, str, Job], model: str = model) -> tuple[float, int, str]:
            return x[0] * (MARGIN if x[1] == model else 1), len(changes(x[2].build.plan, x[2].build.arch)), x[1]
        for _, those in sorted(parts.items()):
            ms, _, best = min(those, key=cost)
            rows.append(tables.as_json(Row(log.head["device"], best.build, best.extent, ms, model_ms, table=name)))
    return {**log.head, "rows": rows}


def _modelled(j: Job, arch: str, units: int) -> Build:
    """The model's choice for the inputs of a job, at its size."""
    if j.table == tables.DECODE:
        return step_choice(j.build, j.extent, units)
    plain = replace(j.build, schedule=Build(j.build.target).schedule, chunk=DEFAULT_CHUNK, arch="")
    return model_choice(plain, j.extent, arch, units)


# --- measuring -------------------------------------------------------------------------------------------------------
class DeviceLost(RuntimeError):
    """The GPU does not answer any more. Further measurements of this process would say nothing about candidates."""


class Meter(Protocol):
    """What `tune` can measure of a build."""

    def wrong(self, b: Build) -> str:
        """Why its kernels are wrong; "" if they are not."""
    def workspace(self, b: Build, s: Shape) -> int:
        """Bytes that a call holds between its kernels."""
    def time(self, b: Build, s: Shape) -> dict[str, Any]:
        """{"ms", "wall_ms"}, or {"dropped": why there is no time}."""


@dataclass
class Gpu:
    """A meter that measures times as `gdn_codegen bench` does."""

    runs: int = 15

    def wrong(self, b: Build) -> str:
        """Why results differ from float64; "" if they do not.

        Sequences have several chunks, a partial one, or less than one; one head has no decay. Then keys are nearly equal.
        """
        s = small(b.chunk)
        x = problem(s, b.dtype, b.head_dim_k, b.head_dim_v)
        x.g[:, :, 0] = 0.0
        try:
            got = errors(*bench_gpu.ours(b, x)(), reference(x, range(4)))
            if not all(e <= TOLERANCE[b.dtype] for e in got):
                return f"off by {got[0]:.1e} (o) and {got[1]:.1e} (state)"
            y, want, accepted = _alike(b.target, b.chunk, b.dtype, b.head_dim_k, b.head_dim_v)
            each = by_beta(*head_errors(*bench_gpu.ours(b, y)(), want))
        except Exception as e:  # whatever a toolchain raises is a finding
            self.alive()
            return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        return next((f"off by {e:.1e} ({of}) on similar keys, beta {beta}; {accepted[of, beta]:.1e} is accepted"
                     for (of, beta), e in each.items() if not e <= accepted[of, beta]), "")

    def workspace(self, b: Build, s: Shape) -> int:
        """Bytes that a call holds between its kernels."""
        host: Host = module(b).HOST
        return host.workspace_bytes(sum(s.lens), len(s.lens), s.HV, "cuda")

    def time(self, b: Build, s: Shape) -> dict[str, Any]:
        """ms of a call on the device and in a queue, or why the build is dropped."""
        about = s, b.dtype, b.head_dim_k, b.head_dim_v
        x, want = _inputs(*about), _reference(*about)
        row = bench_gpu.measured({}, lambda: bench_gpu.ours(b, x), want, self.runs, {}, None, TOLERANCE[b.dtype], host=False)
        self.alive()
        return {"dropped": row["error"]} if "error" in row else {"ms": row["device_ms"], "wall_ms": row["wall_ms"]}

    def alive(self) -> None:
        """Raises DeviceLost if the GPU does not answer any more."""
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
        except Exception as e:
            raise DeviceLost(str(e).splitlines()[0]) from e


def small(chunk: int) -> Shape:
    """The shape on which kernels are checked: two key heads, and eight value heads."""
    return Shape("small", (11 * chunk + 3, chunk // 2 + 1, 2 * chunk), 2, 8)


def in_short_parts(b: Build) -> Build:
    """The same kernels with parts of one chunk, so that even a short sequence has parts that need summaries."""
    return replace(b, schedule=replace(b.plan, part_chunks=1)) if b.plan.partition else b


@lru_cache(maxsize=4)
def _inputs(s: Shape, dtype: str, K: int, V: int) -> Problem:
    return problem(s, dtype, K, V)


@lru_cache(maxsize=16)  # two heads of each shape, which take longer to compute than to hold
def _reference(s: Shape, dtype: str, K: int, V: int) -> Reference:
    return reference(_inputs(s, dtype, K, V))


def by_beta(o: Sequence[float], state: Sequence[float]) -> dict[tuple[str, float], float]:
    """Errors on similar keys: for each beta the RMS over its value heads, which differ in draws."""
    return {(of, beta): math.sqrt(sum(e * e for e in each[i::len(BETAS)]) / len(each[i::len(BETAS)]))
            for of, each in (("o", o), ("state", state)) for i, beta in enumerate(BETAS)}


@lru_cache(maxsize=4)
def _alike(target: str, chunk: int, dtype: str, K: int, V: int) -> tuple[Problem, Reference, dict[tuple[str, float], float]]:
    """A problem with similar keys, its float64 results, and the accepted errors.

    The accepted errors come from the interpreter, which rounds as kernels do. It runs `fused`, with V in blocks if that does not
    fit otherwise, or a schedule that needs less memory."""
    s = small(chunk)
    x = alike(problem(s, dtype, K, V))
    want = reference(x, range(s.HV))
    plans: list[Any] = ["fused", *(varied("fused", v_block=n) for n in (64, 32) if n < V), "replay", "staged"]
    builds = [Build(target, chunk, schedule=plan, dtype=dtype, head_dim_k=K, head_dim_v=V) for plan in plans]
    p = lowered(next(filter(choose.fits, builds), builds[-1]))
    given = {n: getattr(x, n)[0].cpu() for n in ("q", "k", "v", "g", "beta")}
    got = interpret.interpret(p, interpret.Problem(list(s.lens), s.H, s.HV), given, {"scale": x.scale}, exact=False)
    known = by_beta(*head_errors(got["o"][None].to(x.q.device), got["final_state"].to(x.q.device), want))
    return x, want, {n: max(Check.ACCEPTED[dtype], ALIKE * e) for n, e in known.items()}


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


def log_beside(path: Path, target: str, names: Sequence[str]) -> Log:
    """The log of a table (of a target, or of decoding) for a device with these names. It is not read yet."""
    return Log(path.with_suffix(".jsonl"), {"device": names[0], "kind": names[1], "target": target,
                                            "versions": tables.versions(target)})


def tune(about: Build, shapes: Sequence[Shape], names: Sequence[str], arch: str, units: int, meter: Meter,
         out: Path | None = None, **options: Any) -> int:
    """Tune for inputs of a kind, by `tuned`."""
    cache.place("out", out or tables.own_path(names[0], about.target))  # before jobs, which lowers
    return tuned(about.target, jobs(about, shapes, arch, units), names, arch, units, meter, out, **options)


def tuned(name: str, todo: Sequence[Job], names: Sequence[str], arch: str, units: int, meter: Meter, out: Path | None = None,
          **options: Any) -> int:
    """Measure, and write the log and the table. Returns 1 if nothing could be measured or the device was lost.

    name: of the table: a target, or "decode". names: of the device, from `choose.names`. out: the path of the table; the log is
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
    return listed(about.target, jobs(about, shapes, arch, units), names, out)


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
    return compiled_ahead(list(dict.fromkeys(map(in_short_parts, candidates(about, arch)))), arch, heads)


def compiled_ahead(builds: Sequence[Build], arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Compile those of the builds that fit; a line for each."""
    todo = [b for b in builds if choose.fits(b)]
    for i, b in enumerate(todo, 1):
        start = time.monotonic()
        with under_way(f"compiling {b.name} for {arch}"):
            if b.target == "triton":
                list(compile_ahead(b, cached(b), arch, heads))
            else:
                launcher: Any = import_path(cached(b))._launcher
                for name in launcher.kernels:
                    launcher.compiled(name, arch)
        yield f"[{i}/{len(todo)}] {b.name}: {time.monotonic() - start:.0f} s"


def here() -> tuple[tuple[str, ...], str, int]:
    """Names, architecture and multiprocessors of the GPU."""
    if not torch.cuda.is_available():
        raise ValueError("tune: got a machine where torch sees no GPU; accepted: one with the GPU to tune for")
    device = torch.device("cuda", torch.cuda.current_device())
    return choose.names(device), choose.architecture(device), choose.units(device)
