"""`gdn_codegen bench` on a GPU: our builds and the peers installed here, on the same tensors.

- Device time: how long at least one kernel of a call runs (CUPTI through torch.profiler) with a cold L2. It is the median of
  the runs.
- Wall time: what a call adds to a queue of calls. The GPU waits for the host only if the host is slower.
- Graph time: what a replay of a CUDA graph of the call adds to a queue.
- Host time: how long a call takes to return, in a series of calls. Launch time: the same for torch's `add_` to one number. It
  shows how fast the CPU core is, because cores differ and may be slow for a while.
- Errors: RMSE over RMS against the page in float64, on some heads.
"""
from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..ir.page import Algorithm
from ..runtime import cache
from ..runtime.build import Build, lowered
from ..runtime.call import tables
from ..runtime.progress import under_way
from ..runtime.roofline import Ceilings, Cost, costs
from ..schedule.contract import PLAIN
from .bench_ahead import compile_first, first_calls
from .bench_calls import Auto, ours_of
from .bench_table import kept, table
from .configurations import compiled_side_by_side
from .peer_ops import LIBRARIES
from .peers import Absent, Peer, Problem, Refused, Run
from .plots import gpu_plots, pyplot
from .problems import Reference, errors, problem, reference
from .shapes import Shape
from .verify import TOLERANCE

#: Bytes to write so that nothing of earlier calls is left in L2: more than the L2 of any GPU so far.
FLUSH_BYTES = 128 * 2**20
#: Seconds of rest after which a GPU that had lowered its clock to limit its power is as fast as at first (H200: half of it).
REST = 0.5
CALL = "gdn_codegen bench: a call"


# --- times -----------------------------------------------------------------------------------------------------------
def attribute(calls: Sequence[tuple[float, float]], kernels: Sequence[tuple[str, float, float]]) -> list[dict[str, float]]:
    """For each call (start, end), the time of each kernel (name, start, duration) that began in it, in the order of their first
    launch. A call ends after its last kernel. Kernels between calls are left out. A kernel may start before the one before it
    has ended, and wait for it. Its time counts from that end, so that no microsecond counts twice."""
    out: list[dict[str, float]] = []
    for start, end in calls:
        mine: dict[str, float] = {}
        done = start  # when all kernels so far have ended
        for name, at, duration in sorted(kernels, key=lambda k: k[1]):
            if start <= at < end:
                mine[name] = mine.get(name, 0.0) + max(0.0, at + duration - max(at, done))
                done = max(done, at + duration)
        out.append(mine)
    return out


def medians(runs: Sequence[dict[str, float]]) -> tuple[float, dict[str, float]]:
    """The median of the sums, and the median of each kernel's times."""
    names = list(dict.fromkeys(n for r in runs for n in r))
    return (statistics.median(sum(r.values()) for r in runs),
            {n: statistics.median(r.get(n, 0.0) for r in runs) for n in names})


def device_time(run: Run, n: int) -> tuple[float, dict[str, float]]:
    """ms of a call on the device, and of each kernel."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile, record_function
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    time.sleep(REST)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for _ in range(n):
            flush.zero_()
            torch.cuda.synchronize()
            with record_function(CALL):
                run()
                torch.cuda.synchronize()
    events = [(e.name, e.device_type, e.time_range.start, e.time_range.end) for e in p.events()]
    calls = [(start, end) for name, where, start, end in events if name == CALL and where == DeviceType.CPU]
    kernels = [(name, start, end - start) for name, where, start, end in events if where == DeviceType.CUDA and name != CALL]
    found = attribute(calls, kernels)
    if len(found) != n or not all(found):
        raise RuntimeError(f"the profiler saw kernels in {sum(map(bool, found))} of {n} calls")
    total, each = medians(found)
    return total / 1e3, {name: us / 1e3 for name, us in each.items()}


def wall_time(f: Callable[[], object], n: int) -> float:
    """ms that a call takes of a queue of n, gaps between kernels and waiting for the host included: the time of n flushes of L2,
    each with a call after it, less that of n flushes. The median of 5 such differences."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def queue(*works: Callable[[], object]) -> float:
        """ms of `works`, called one after another, in a queue of n."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for _ in range(3):  # so that the host is ahead
            flush.zero_()
        start.record()
        for _ in range(n):
            for work in works:
                work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / n

    return statistics.median(queue(flush.zero_, f) - queue(flush.zero_) for _ in range(5))


def host_time(run: Callable[[], object], n: int) -> float:
    """us until a call returns, on average over n calls that wait for no kernel. The fastest of the repetitions of half a second,
    since a host is at times slower by half."""
    fastest, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < 0.5:
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(n):
            run()
        fastest = min(fastest, (time.perf_counter() - before) / n * 1e6)
    torch.cuda.synchronize()
    return fastest


def graph_time(run: Run, n: int) -> float:
    """ms that a replay of a CUDA graph of the call adds to a queue."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return wall_time(graph.replay, n)


def ceilings() -> Ceilings:
    """The rates of a copy of 1 GiB and of a float16 product of side 8192 on this GPU."""
    def seconds(f: Callable[[], object]) -> float:
        f()
        return wall_time(f, 5) / 1e3
    a, b = (torch.empty(2**30, dtype=torch.int8, device="cuda") for _ in range(2))
    copied = 2 * 2**30 / seconds(lambda: b.copy_(a))
    x, y, z = (torch.randn(8192, 8192, device="cuda").half() for _ in range(3))
    return Ceilings(copied, 2 * 8192**3 / seconds(lambda: torch.mm(x, y, out=z)))


# --- rows ------------------------------------------------------------------------------------------------------------
def our_costs(b: Build, s: Shape) -> dict[str, Cost]:
    """Bytes and operations of each kernel of a build at a shape, without initial states."""
    p = lowered(b)
    return costs(p, s.lens, s.H, s.HV, absent=[t.name for t in p.role("input") if t.optional])


def kernel_rows(times: dict[str, float], known: dict[str, Cost], top: Ceilings | None) -> list[dict[str, Any]]:
    """A row for each kernel. Rows of our kernels also have bytes, operations, and the ratio of the ideal to the measured time."""
    rows = []
    for seen, ms in times.items():
        name = next((n for n in known if seen.startswith(f"{n}_kernel")), None)
        row: dict[str, Any] = {"name": name or seen[:80], "ms": round(ms, 5)}
        if name and top:
            c = known[name]
            row |= {"bytes": c.bytes, "asked": c.asked, "flops": c.flops,
                    "share": top.floor(c) * 1e3 / ms if ms else None}
        rows.append(row)
    return rows


def row(s: Shape, who: str, version: str, note: str = "") -> dict[str, Any]:
    """A row without figures. who: the implementation. note: a remark for the reader."""
    return {"shape": s.name, "lens": list(s.lens), "H": s.H, "HV": s.HV, "who": who, "version": version, "note": note}


def outcome(base: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row with its figures, or with the error because of which it has none."""
    try:
        return base | work()
    except Absent as e:
        return base | {"absent": str(e)}
    except Refused as e:
        return base | {"refused": str(e)}
    except Exception as e:  # a row that stops is a finding, and the others still run
        return base | {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"}


def judged(error_o: float, error_state: float, limit: float | None) -> dict[str, str]:
    """{"error": text} where an error is above the limit or NaN, else {}."""
    if limit is None or (error_o <= limit and error_state <= limit):
        return {}
    return {"error": f"off by {error_o:.1e} (o) and {error_state:.1e} (state); at most {limit:g}"}


@torch.no_grad()
def measured(base: dict[str, Any], prepare: Callable[[], Run], want: Reference, runs: int, known: dict[str, Cost],
             top: Ceilings | None, limit: float | None, graphs: bool = False, host: bool = True) -> dict[str, Any]:
    """The outcome of a row. limit: the error that our own rows may reach. graphs: whether the call is also captured in a graph,
    which peers may not support. host: whether the host is timed."""
    def work() -> dict[str, Any]:
        """Run once and compare, then take the times."""
        started = time.perf_counter()
        run = prepare()
        results = run()
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        error_o, error_state = errors(results, want)
        add = partial(results[0].new_zeros(1).add_, 1)
        del results
        for _ in range(3):
            run()
        # before the profiler is there, which stays and slows the host
        hosts = {"host_us": round(host_time(run, runs), 2), "launch_us": round(host_time(add, runs), 2)} if host else {}
        device, each = device_time(run, runs)
        wall = wall_time(run, runs)
        graph = graph_time(run, runs) if graphs else None
        return {"device_ms": round(device, 5), "wall_ms": round(wall, 5), **hosts, "graph_ms": graph and round(graph, 5),
                "first_call_s": round(first, 2), "error_o": error_o, "error_state": error_state,
                "kernels": kernel_rows(each, known, top), **judged(error_o, error_state, limit)}
    return outcome(base, work)


# --- facts -----------------------------------------------------------------------------------------------------------
def clocks() -> dict[str, str]:
    """The GPU's clocks as nvidia-smi reads them."""
    names = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,persistence_mode"
    if shutil.which("nvidia-smi") is None:
        return {}
    done = subprocess.run(["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"], capture_output=True, text=True,
                          timeout=30, check=False)
    values = done.stdout.splitlines()[0].split(", ") if done.returncode == 0 and done.stdout else []
    return dict(zip(names.split(","), values, strict=False))


def facts(command: str, options: dict[str, Any]) -> dict[str, Any]:
    """The facts of a run that a reader needs to repeat it."""
    from .. import __version__
    from ..targets import find, names
    from ..targets.machine import version
    versions = {n: v for n in ("torch", *(find(t).toolchain.package for t in names())) if n and (v := version(n))}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"command": command, "gpu": gpu, "clocks": clocks(), "python": platform.python_version(),
            "cuda": torch.version.cuda, "versions": {"gdn_codegen": __version__, **versions}, "options": options}


def check_build(b: Build | Auto) -> None:
    """Refuse builds that the benchmark cannot compare. It has plain forms of inputs, and keys of norm 1."""
    if isinstance(b, Build) and replace(b.contract, strided=False) not in (PLAIN, tables.UNIT):
        raise ValueError(f"accept: got {str(b.contract)!r}; accepted: k=unit, strided, both, or none")


def bench(builds: Sequence[Build | Auto], todo: Sequence[Shape], peers: Sequence[Peer], *, page: Algorithm, gates: str = "layer",
          seed: int = 0, runs: int = 15, dtype: str = "float16", dims: tuple[int, int] = (128, 128), command: str = "",
          json_to: str | None = None, plot_to: str | None = None, detail: bool = False, jobs: int | None = None) -> int:
    """Run all, printing each shape and writing each row as it is there; 1 where a row of ours failed. jobs: of compile_first."""
    for b in builds:
        check_build(b)
    if not torch.cuda.is_available():
        raise ValueError("target: got a target that is timed on a GPU, and torch sees none; accepted: pto")
    cache.places(json=json_to, plot=plot_to)
    if plot_to is not None:
        pyplot()  # what is missing is said before the work
    options = {"algorithm": page.name, "gates": gates, "seed": seed, "runs": runs, "dtype": dtype, "K": dims[0], "V": dims[1]}
    compile_first(first_calls(builds, todo, peers, page, gates, seed, dtype, dims), jobs)
    top = ceilings()
    data: dict[str, Any] = {"facts": facts(command, options), "ceilings": asdict(top), "rows": []}
    print(f"{data['facts']['gpu']}: {top.bytes / 1e12:.2f} TB/s of a copy, {top.flops / 1e12:.0f} TFLOP/s of a product",
          flush=True)
    for i, s in enumerate(todo):
        found = shape_rows(s, problem(s, dtype, *dims, gates, seed, algorithm=page), builds, peers, runs, top, jobs)
        here = kept(found, data, json_to)
        torch.cuda.empty_cache()
        print("\n".join([f"[{i + 1}/{len(todo)}]", *table({**data, "rows": here}, detail)[1:]]), flush=True)
    for path in gpu_plots(data, Path(plot_to)) if plot_to is not None else []:
        print(path)
    return int(any("error" in r for r in data["rows"] if r["who"] not in LIBRARIES))


def shape_rows(s: Shape, x: Problem, builds: Sequence[Build | Auto], peers: Sequence[Peer], runs: int,
               top: Ceilings, jobs: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a shape: the peers', then ours. jobs: threads in which configurations of a peer compile."""
    want = reference(x)
    for p in peers:
        with under_way(f"{s.name}: {p.name}"), compiled_side_by_side(jobs):
            yield measured(row(s, p.name, p.version, p.note), partial(p.prepare, x), want, runs, {}, top, None)
    for wish in builds:
        b, who, prepare, steps = ours_of(wish, x)
        with under_way(f"{s.name}: {who}"):
            known = our_costs(b, replace(s, lens=tuple(steps * n for n in s.lens)))
            yield measured(row(s, who, "", b.name), partial(prepare, x), want, runs, known, top, TOLERANCE[b.dtype], True)
