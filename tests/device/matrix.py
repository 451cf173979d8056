"""The whole contract on a device: calls drawn so that each pair of options meets, each against the recurrence in float64.

    python tests/device/matrix.py --out result.json                          # ten minutes, on one GPU; what it leaves is told
    python tests/device/matrix.py --seed 0 --only tilelang:17                # one build of it, with traces
    python tests/device/matrix.py --again result.json --limit 300 --out both.json  # what had no time or failed, once more
    python tests/device/matrix.py --write docs/verification.md result.json   # the page of a run
    python tests/device/matrix.py --write docs/verification.md --suites suites.json "commit, date, device"
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice, takewhile, zip_longest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]
# Outputs and workspaces start as NaN, and nothing is shared with a user's cache.
os.environ["GDN_CODEGEN_POISON"] = "1"
os.environ.setdefault("GDN_CODEGEN_CACHE", str(Path(tempfile.gettempdir()) / f"gdn_codegen_matrix_{os.getuid()}"))
os.environ.setdefault("TILELANG_CACHE_DIR", str(Path(os.environ["GDN_CODEGEN_CACHE"]) / "tilelang"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from matrix_page import kept, page, suites
from matrix_plan import Cover
from matrix_run import Pool, called, fits, serve

from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

#: Seconds past the budget in which the run comes to its end.
MARGIN = 20


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: small sizes, for a look at the matrix itself")
    p.add_argument("--targets", default="tilelang,triton", help="joined by commas")
    p.add_argument("--seed", type=int, default=0, help="another draw of the same contract")
    p.add_argument("--builds", type=int, default=0, help="stop after this many builds (default: when each pair is met)")
    p.add_argument("--more", action="store_true", help="when each pair is met go on at random, until the budget ends")
    p.add_argument("--budget", type=float, default=540, help="seconds, from start to end; what is left then is not run")
    p.add_argument("--limit", type=float, default=90, help="seconds that one call may take, its compile included")
    p.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes; each compiles, runs and checks")
    p.add_argument("--again", metavar="RESULT", help="of a run's result: the calls that failed, were slow or not run; --out gets "
                   "the result of both")
    p.add_argument("--commit", default="", help="what the result names where there is no git")
    p.add_argument("--out", help="the file for the result (JSON)")
    p.add_argument("--only", metavar="TARGET:N", help="one build of the draw, in this process, with traces")
    p.add_argument("--write", nargs="+", metavar=("PAGE", "RESULT"), help="write a run's page; what it says of suites stays")
    p.add_argument("--suites", nargs=2, metavar=("RESULT", "FACTS"), help="with --write: a run of tests/suites, and its facts")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p


def hopper(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() == (9, 0) and not torch.version.hip


def jobs(cover: Cover, seed: int, more: bool) -> Iterator[list[dict[str, Any]]]:
    """The calls of each build. A number tells a call's tensors, too."""
    for n, rows in enumerate(cover.rows(more)):
        yield [{"target": cover.target, "n": n, "call": i, "seed": 1009 * (1000 * seed + n) + i,
                "room": row.pop("no room", ""), "row": row} for i, row in enumerate(dict(r) for r in rows)]


def covers(a: argparse.Namespace) -> list[Cover]:
    return [Cover(t, a.seed, hopper(a.device), a.device == "cpu", fits) for t in a.targets.split(",")]


def drawn_jobs(of: list[Cover], seed: int, more: bool) -> Iterator[list[dict[str, Any]]]:
    """Builds of the targets in turn."""
    return (j for j in chain.from_iterable(zip_longest(*(jobs(c, seed, more) for c in of))) if j)


#: What is worth another try, first of all what failed.
UNSETTLED = ("wrong", "error", "not run", "slow")


def name(c: dict[str, Any]) -> str:
    """A call's name in its draw."""
    return f"{c['target']}:{c['n']}.{c['call']}"


def kept_in(plan: list[list[dict[str, Any]]], draw: Iterator[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    """The draw, which `plan` gets as it is asked for."""
    for jobs_of_build in draw:
        plan.append(jobs_of_build)
        yield jobs_of_build


def unsettled(plan: list[list[dict[str, Any]]], calls: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The calls of a draw that a run left without a result, by build: what failed first."""
    rank = {name(c): UNSETTLED.index(c["status"]) if c["status"] in UNSETTLED else -1 for c in calls}
    not_run = UNSETTLED.index("not run")
    left = [[j for j in jobs if rank.get(name(j), not_run) >= 0] for jobs in plan]
    return sorted((js for js in left if js), key=lambda js: min(rank.get(name(j), not_run) for j in js))


def first_run(a: argparse.Namespace, plan: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The result that --again names. SystemExit where its calls are not those of this draw."""
    first: dict[str, Any] = json.loads(Path(a.again).read_text())
    drawn = {name(j): j["row"] for js in plan for j in js}
    other = [name(c) for c in first["calls"] if drawn.get(name(c)) != tupled(c["row"])]
    if other:
        raise SystemExit(f"--again: got {a.again}, whose calls are others than those drawn here ({other[0]}); accepted: a result "
                         f"of the same draw: seed {first['seed']}, and a commit with the same levels and schedules")
    return first


def only(a: argparse.Namespace) -> int:
    """One build's calls in this process."""
    target, n = a.only.split(":")
    a.targets = target
    todo = next(islice(jobs(covers(a)[0], a.seed, True), int(n), None))
    bad = 0
    for job in todo:
        print(json.dumps(job["row"]))
        result = called(target, job["row"], job["seed"], a.device)
        print(result.pop("trace", ""), json.dumps(result), sep="\n")
        bad += result["status"] in ("wrong", "error")
    return int(bad > 0)


def device_facts(a: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in a.targets.split(","):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "?"
    if a.device == "cuda":
        versions["CUDA of torch"] = str(torch.version.cuda)
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": a.commit or git.stdout.strip() or "unknown", "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if a.device == "cuda" else "CPU", "versions": versions,
            "admission": os.environ.get("GDN_CODEGEN_ADMIT") != "0"}


def ended(a: argparse.Namespace, pool: Pool, todo: Iterator[list[dict[str, Any]]], start: float) -> list[dict[str, Any]]:
    """The results of all calls that the budget allows. The calls of a build follow one another in one process, so that it
    compiles once."""
    done: list[dict[str, Any]] = []
    told = time.monotonic()
    while time.monotonic() - start < a.budget:
        pool.feed(todo)
        if not pool.left():
            break
        for job, result in pool.results(1.0):
            done.append({**job, **result})
            if result["status"] in ("wrong", "error"):
                print(f"{result['status']}: {job['target']}:{job['n']}.{job['call']} {result['why'][:160]}", flush=True)
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"{told - start:.0f} s: {len(done)} calls, {dict(Counter(d['status'] for d in done))}", flush=True)
    return done


def gpus(a: argparse.Namespace) -> list[str]:
    """The GPUs that workers take in turn, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [] if a.device == "cpu" else named.split(",") if named else list(map(str, range(torch.cuda.device_count())))


def run(a: argparse.Namespace, start: float) -> int:
    """The run, its result file and its summary; 1 where something is wrong."""
    # the same interpreter, which another name may not find
    command = [sys.executable, str(Path(__file__)), "--worker", "--device", a.device, "--targets", a.targets]
    logs = Path(tempfile.mkdtemp(prefix="gdn_codegen_matrix_"))
    pool = Pool(command, a.workers, logs, a.limit, gpus(a))
    plan: list[list[dict[str, Any]]] = []
    first: dict[str, Any] = {"calls": []}
    try:
        of, facts = covers(a), device_facts(a)
        print(f"{facts['device']}, seed {a.seed}, {a.workers} processes, {a.budget:.0f} s at most, "
              + ", ".join(f"{c.target}: {c.pairs} pairs" for c in of) + f"; logs in {logs}", flush=True)
        draw = kept_in(plan, islice(drawn_jobs(of, a.seed, a.more), a.builds or None))
        if a.again:
            deque(draw, 0)
            first = first_run(a, plan)
            draw = iter(unsettled(plan, first["calls"]))
        done = ended(a, pool, draw, start)
    finally:
        pool.end()
    if not a.more and not a.again:  # the rest, to say what was not run, as far as that is soon known
        deque(takewhile(lambda _: time.monotonic() - start < a.budget + MARGIN, draw), 0)
    tried = set(map(name, done))
    facts |= {"seconds": round(time.monotonic() - start), "workers": a.workers, "limit": a.limit}
    if a.again:
        facts = {n: first[n] for n in facts} | {"again": [*first.get("again", []), {**facts, "calls": len(done)}]}
    calls = [c for c in first["calls"] if name(c) not in tried] + done
    ran = [c for c in calls if c["status"] not in ("refused", "not admitted", "slow")]
    pairs = {c.target: c.met(tupled(d["row"]) for d in ran if d["target"] == c.target) for c in of}
    known = set(map(name, calls))
    not_run = [name(j) for js in plan for j in js if name(j) not in known]
    result = {**facts, "seed": a.seed, "on": a.device, "builds": len({(d["target"], d["n"]) for d in calls}), "pairs": pairs,
              "not_run": not_run, "asked": a.builds, "calls": calls}
    if a.out:
        Path(a.out).write_text(json.dumps(result, indent=0))
    print(page(result).partition("\n- ")[2])
    return int(any(d["status"] in ("wrong", "error") for d in calls))


def tupled(row: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(x) if isinstance(x, list) else x for n, x in row.items()}


def main() -> int:
    start, a = time.monotonic(), parser().parse_args()
    if a.write:
        path, *given = map(Path, a.write)
        before = path.read_text(encoding="ascii") if path.exists() else ""
        text = page(json.loads(given[0].read_text())) if given else before.removesuffix(kept(before))
        last = suites(json.loads(Path(a.suites[0]).read_text()), a.suites[1]) if a.suites else kept(before)
        path.write_text(text + last, encoding="ascii")
        return 0
    for target in a.targets.split(","):
        if target not in OWN or not runs(target, a.device) or (a.device == "cuda" and not torch.cuda.is_available()):
            raise SystemExit(f"targets: got {target}, which does not run {a.device} tensors here")
    if a.again:
        first = json.loads(Path(a.again).read_text())
        a.seed, a.builds, a.targets = first["seed"], first["asked"], ",".join(first["pairs"])
    if a.worker:
        serve(a.device)
        return 0
    return only(a) if a.only else run(a, start)


if __name__ == "__main__":
    sys.exit(main())
