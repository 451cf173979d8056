"""What `bench` compiles before it measures: the first call of each row at each shape, in processes of their own that run side by
side. Modules, kernels and verdicts of admission are then in the caches from which the rows of the measuring process take them.

A row that fails here fails again where it is measured, and says why.
"""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from ..ir.page import Algorithm
from ..runtime.build import Build
from .bench_calls import Auto, directions, ours_of
from .configurations import compiled_side_by_side
from .layer_inputs import as_layers_pass
from .peer_ops import peers_of
from .peers import Absent, Peer, Refused
from .problems import problem
from .shapes import Shape

#: Settings under which Triton's autotuner keeps what it measured. It measures here beside other processes.
KEPT = ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING")


@dataclass(frozen=True)
class FirstCall:
    """A call to be made once. who: a build, an op, or the name of a peer. algorithm: as `find` takes it. gates: one kind.
    backward: whether gradients are computed, too. layer: whether inputs are those of a layer. threads: of
    `compiled_side_by_side`, for a peer."""

    who: Build | Auto | str
    shape: Shape
    algorithm: str
    dtype: str
    dims: tuple[int, int]
    gates: str
    seed: int
    backward: bool = False
    layer: bool = False
    device: str = "cuda"
    threads: int = 1

    @property
    def name(self) -> str:
        """What lines of progress call it."""
        who = self.who
        return f"{self.shape.name}: " + (who if isinstance(who, str) else
                                         f"{who.target} {who.name if isinstance(who, Build) else 'auto'}")

    def make(self) -> None:
        """Make the call, and nothing of what cannot be called."""
        os.environ.update(dict.fromkeys(KEPT, "0"))
        x = problem(self.shape, self.dtype, *self.dims, self.gates, self.seed, self.device, self.algorithm)
        x, peer = as_layers_pass(x, self.seed) if self.layer else x, isinstance(self.who, str)
        prepare = peers_of(x.page)[self.who].prepare if isinstance(self.who, str) else ours_of(self.who, x)[2]
        with compiled_side_by_side(self.threads if peer else 1), contextlib.suppress(Absent, Refused):
            if self.backward:
                directions(prepare, x)[1]()
            else:
                with torch.no_grad():
                    prepare(x)()
        if self.device == "cuda":
            torch.cuda.synchronize()


def first_calls(builds: Sequence[Build | Auto], shapes: Sequence[Shape], peers: Sequence[Peer], page: Algorithm, gates: str,
                seed: int, dtype: str, dims: tuple[int, int], backward: bool = False, layer: bool = False) -> list[FirstCall]:
    """The first calls of all rows, those of a shape together. gates: kinds, of which the first is drawn: kernels are the same for
    all. Of absent peers there are none."""
    rows = [p.name for p in peers if not p.absence()] + list(builds)
    return [FirstCall(who, s, str(who.algorithm) if isinstance(who, Build) else page.name, dtype, dims, gates.split(",")[0],
                      seed, backward, layer) for s in shapes for who in rows]


def compile_first(calls: Sequence[FirstCall], jobs: int | None) -> None:
    """Make the calls in processes, with a line on stderr as each ends. jobs: how many processes at a time, by default one for
    each core that this process may use. A single call gains nothing, and is left to the row itself. Where there are more cores
    than calls, peers compile in several threads each; in two at least, as rows of ours are done earlier."""
    cores = jobs or len(os.sched_getaffinity(0))
    jobs = min(cores, len(calls))
    if jobs < 2:
        return
    calls = [replace(c, threads=max(2, cores // jobs)) for c in calls]
    _say(f"compiling for {len(calls)} rows in {jobs} processes (--jobs)")
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_alone, c): c for c in calls}
        for i, done in enumerate(as_completed(running), 1):
            _say(f"[{i}/{len(calls)}] {running[done].name}: {done.result()}")


def _alone(call: FirstCall) -> str:
    """Make a call in a process of its own, which may die. The seconds that it took, or how it ended."""
    start = time.perf_counter()
    process = multiprocessing.get_context("spawn").Process(target=_quietly, args=(call,))
    process.start()
    process.join()
    how = "" if process.exitcode == 0 else f", and failed (exit status {process.exitcode})"
    return f"{time.perf_counter() - start:.0f} s{how}"


def _quietly(call: FirstCall) -> None:
    """Make a call whose error is not printed: its row prints it. What toolchains print goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            call.make()
    except Exception:
        sys.exit(1)


def _say(line: str) -> None:
    print(f"gdn_codegen: {line}", file=sys.stderr, flush=True)
