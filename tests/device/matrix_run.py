"""One call of the matrix, and the processes that make them: a crash, a hang or a lost GPU context ends one process alone."""
from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from calls import Drawn, checked, elsewhere, made
from matrix_plan import Row, Way, drawn, way
from matrix_reference import Means, chunked, expected_on
from reference import in_parts, rms_error

from gdn_codegen import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.admit import LEFT, Refused
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.load import module
from gdn_codegen.schedule import ScheduleError

Result = dict[str, Any]
#: Of refusals: our form, and what a Triton that miscompiles kernels is refused with.
FORM = re.compile(r"[\w.\[\]]+: got .*; accepted: ", re.DOTALL)
MISCOMPILED = "miscompiles this module's kernels"
#: A worker that gets this signal says where it is. LLVM takes SIGUSR1 and SIGUSR2 for itself.
ASKED = signal.SIGWINCH
#: Functions in which a process compiles, as a trace names them.
COMPILES = re.compile(r" in (compiled|_compile_for_cpu|_do_compile|compile|make_\w+)$", re.MULTILINE)
#: Where keys are alike, and of few channels all are, and in tf32, a call may be off by so many times what a chunked form with an
#: exact inverse is, and by so much at most.
ALIKE, MOST, FEW_CHANNELS = 4, 0.25, 32


def fits(target: str, how: Way, row: Row) -> str:
    """Why a build has no room; what the op chooses has some or is refused."""
    if how.plan is None:
        return ""
    return unfit(Build(target, row["chunk"], row["layout"], schedule=how.plan, dtype=row["dtype"], head_dim_k=row["K"],
                       head_dim_v=row["V"], arch=how.arch))


def _allowed(c: Drawn, device: str, expected: Callable[[Means], Any]) -> float:
    """Where keys are alike: some of what roundings cost a plain form, which no fixed number says. With K = 16, beta = 1.5 and 384
    tokens that forget nothing that form is off by 0.012 in bfloat16, with K = 160 and more such tokens by 0.0014 in tf32."""
    tf32 = c.tf32 and c.dtype == "float32"
    if not sum(c.lengths) or (c.alike is None and c.K > FEW_CHANNELS and not tf32):
        return 0.0
    means = made(c, expected)[1]["means"]
    got = chunked(means, "tf32" if tf32 else c.dtype, c.chunk or 64, device)
    return min(MOST, ALIKE * max(map(rms_error, got, expected(means))))


@contextlib.contextmanager
def _asked(how: Way, used: list[str]) -> Iterator[None]:
    """The op's builds for the architecture and with the parts that a way asks for; their names go to `used`."""
    def loaded(b: Build) -> Any:
        b = replace(b, arch=how.arch) if how.arch else b
        m = module(b)
        used.append(m.__name__.removeprefix("gdn_codegen_generated_"))
        if b.plan.partition:
            in_parts(getattr(m, b.function), how.parts)
        return m
    kept, launch.module = launch.module, loaded
    launch.forget()
    try:
        yield
    finally:
        launch.module = kept


def called(target: str, row: Row, seed: int, device: str) -> Result:
    """What came of one call: ok, refused, not admitted, wrong or error."""
    used: list[str] = []
    start = time.perf_counter()
    said: dict[str, Any] = {}
    told: list[warnings.WarningMessage] = []
    try:
        how = way(row)
        c = drawn(target, row, how.plan, seed, tf32=target == "tilelang" and device != "cpu")
        with _asked(how, used), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            expected = expected_on(device)
            c.allowed = _allowed(c, device, expected)
            op = recurrent_gated_delta_rule if c.decode else chunk_gated_delta_rule
            said = {"status": "ok", "errors": checked(c, elsewhere(op, device), expected), "allowed": c.allowed}
    except AssertionError as e:
        said = {"status": "wrong", "why": str(e.args[0] if e.args else e)}
    except Refused as e:
        said = {"status": "not admitted", "why": str(e)[:600]}
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        refused = isinstance(e, ScheduleError) or (isinstance(e, ValueError) and FORM.match(str(e))) or MISCOMPILED in text
        said = {"status": "refused" if refused else "not admitted" if LEFT in text else "error", "why": text[:900]}
        if not refused:
            said["trace"] = traceback.format_exc()[-3000:]
    over = [str(w.message)[:400] for w in told if "take another build" in str(w.message)]
    said |= {"passed over": over} if over else {}
    return {**said, "build": used[-1] if used else "", "seconds": round(time.perf_counter() - start, 2)}


def serve(device: str) -> None:
    """A worker: jobs come as lines of JSON, results go as such. What compilers print goes to the standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    faulthandler.register(ASKED, sys.stderr)
    for line in sys.stdin:
        job = json.loads(line)
        result = called(job["target"], job["row"], job["seed"], device)
        lost = False
        if device != "cpu":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # many processes share a GPU's memory
            except Exception as e:  # the context is lost, and with it the process
                lost, result = True, {**result, "lost": True, "why": result.get("why") or f"{type(e).__name__}: {e}"}
                result["status"] = result["status"] if result["status"] == "not admitted" else "error"
        print(json.dumps(result), file=out, flush=True)
        if lost:
            return


@dataclass
class Worker:
    """A process, the job that it has, and those that follow in it. `compiled`: it was seen past its compile when time was up."""

    process: subprocess.Popen[str]
    log: Path
    queue: list[dict[str, Any]]
    job: dict[str, Any] | None = None
    since: float = 0.0
    compiled: bool = False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its compilers too: the group is its own
        self.process.wait()


class Pool:
    """So many workers, GPUs in turn. A job is a dict, and its result comes back beside it. limit: seconds of a job, its compile
    included; grace: further seconds of one that has compiled by then."""

    def __init__(self, command: list[str], workers: int, logs: Path, limit: float, gpus: Sequence[str] = (),
                 grace: float = 30) -> None:
        self.command, self.logs, self.limit, self.gpus, self.grace = command, logs, limit, gpus, grace
        self.events, self.started = selectors.DefaultSelector(), 0
        self.workers = [self._start([]) for _ in range(workers)]

    def _start(self, queue: list[dict[str, Any]]) -> Worker:
        log = self.logs / f"worker{self.started}.log"
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[self.started % len(self.gpus)]} if self.gpus else {}
        self.started += 1
        with open(log, "w") as f:
            process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=f, text=True,
                                       start_new_session=True, env={**os.environ, **gpu})
        w = Worker(process, log, queue)
        assert process.stdout is not None
        self.events.register(process.stdout, selectors.EVENT_READ, w)
        return w

    def _late(self, w: Worker) -> tuple[str, str] | None:
        """Status and reason of a job that takes too long, by where its process is. None: it has compiled, and may go on."""
        if w.compiled:
            most = self.limit + self.grace
            return ("error", f"no answer in {most:.0f} s") if self._taken(w) > most else None
        with contextlib.suppress(ProcessLookupError):
            os.kill(w.process.pid, ASKED)
            time.sleep(0.3)
        w.compiled = not COMPILES.search(w.log.read_text(errors="replace"))
        return None if w.compiled else ("slow", f"too slow to compile: no answer in {self.limit:.0f} s")

    def _taken(self, w: Worker) -> float:
        return time.monotonic() - w.since

    def _replaced(self, w: Worker, why: str, status: str = "error") -> tuple[dict[str, Any] | None, Result]:
        self.events.unregister(w.process.stdout)  # type: ignore[arg-type]
        w.end()
        lines = w.log.read_text(errors="replace").strip().splitlines()[-40:]
        self.workers[self.workers.index(w)] = self._start(w.queue)
        return w.job, {"status": status, "why": f"{why} (exit {w.process.returncode})", "trace": "\n".join(lines), "build": "",
                       "seconds": round(self._taken(w), 2)}

    def left(self) -> list[dict[str, Any]]:
        """Jobs without a result."""
        return [job for w in self.workers for job in ([w.job] if w.job else []) + w.queue]

    def feed(self, todo: Iterator[list[dict[str, Any]]]) -> None:
        """A job for each worker that has none: of its own queue, or of the next build."""
        for w in self.workers:
            if w.job is None:
                w.queue = w.queue or list(next(todo, []))
                if w.queue:
                    self._give(w, w.queue.pop(0))

    def _give(self, w: Worker, job: dict[str, Any]) -> None:
        w.job, w.since, w.compiled = job, time.monotonic(), False
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `results` sees
            w.process.stdin.write(json.dumps(job) + "\n")  # type: ignore[union-attr]
            w.process.stdin.flush()  # type: ignore[union-attr]

    def results(self, seconds: float) -> Iterator[tuple[dict[str, Any], Result]]:
        """What comes within so many seconds, the first wakes."""
        for event, _ in self.events.select(seconds):
            w = event.data
            line = w.process.stdout.readline()
            if line:
                (job, w.job), result = (w.job, None), json.loads(line)
                if result.get("lost"):  # it is about to end, and what follows goes to another
                    self._replaced(w, "")
                yield job, result
            else:
                job, result = self._replaced(w, "the process ended")
                if job is not None:
                    yield job, result
        for w in list(self.workers):
            if w.job is not None and self._taken(w) > self.limit and (late := self._late(w)):
                status, why = late
                rest = w.queue[:] if status == "slow" else []  # of the same build
                del w.queue[:len(rest)]
                job, result = self._replaced(w, why, status)
                assert job is not None
                yield job, result
                yield from ((job, {**result, "seconds": 0.0}) for job in rest)

    def end(self) -> None:
        for w in self.workers:
            w.end()
