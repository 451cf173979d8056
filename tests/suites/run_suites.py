"""Other projects' suites against our op, where checkouts are given.

    SUITE_FLA=~/flash-linear-attention SUITE_AITER=~/aiter python tests/suites/run_suites.py [--every 4] [--seconds 140]
"""
from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
NAMES = ("fla", "fla_plugin", "flashqla", "flashinfer", "aiter")
VARIABLES = {"fla": "SUITE_FLA", "fla_plugin": "SUITE_FLA_PLUGIN",
             "flashqla": "SUITE_FLASHQLA", "flashinfer": "SUITE_FLASHINFER", "aiter": "SUITE_AITER"}


def checkout(name: str) -> Path | None:
    """The folder that the environment names, None where it names none."""
    given = os.environ.get(VARIABLES[name])
    return Path(given).expanduser().resolve() if given else None


def _own() -> dict[str, str]:
    """This process's environment, but for what says that it is a worker of pytest's: a suite is a run of its own."""
    return {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_")}


class Run:
    """A suite in a process of its own."""

    def __init__(self, name: str, root: Path, every: int = 1, seconds: float = 0, workers: int = 0,
                 words: tuple[str, ...] = ()) -> None:
        adapter = importlib.import_module("suite").adapter(name)
        paths = adapter.PATHS
        missing = [p for p in paths if not (root / p).exists()]
        if missing:
            raise ValueError(f"{VARIABLES[name]}: got {root}; accepted: a checkout with {', '.join(missing)}")
        self.name, self.seconds = name, seconds
        self.folder = tempfile.TemporaryDirectory(prefix=f"suite_{name}_")
        self.result, self.log = Path(self.folder.name) / "result.json", Path(self.folder.name) / "log"
        said = {"SUITE": name, "SUITE_ROOT": str(root), "SUITE_OUT": str(self.result), "SUITE_EVERY": str(every),
                "SUITE_SECONDS": str(seconds), "GDN_CODEGEN_POISON": "1",
                "TORCHDYNAMO_DISABLE": "1",  # of what they compile nothing is ours
                "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "suite", "-p", "no:cacheprovider", "--show-capture=no",
                   "--rootdir", str(root), "-c", os.devnull, *adapter.WORDS, *(["-n", str(workers)] if workers else []), *words,
                   *(str(root / p) for p in paths)]
        self.start = time.monotonic()
        with open(self.log, "w") as f:
            self.process = subprocess.Popen(command, cwd=root, env={**_own(), **said}, stdout=f, stderr=subprocess.STDOUT)

    def wait(self) -> dict[str, Any]:
        """What came of it. A suite past its time ends by itself after the test that it is in, or is ended."""
        late = False
        try:
            left = self.start + self.seconds + 40 - time.monotonic()
            self.process.wait(max(1.0, left) if self.seconds else None)
        except subprocess.TimeoutExpired:
            late = True
            self.process.kill()
            self.process.wait()
        log = self.log.read_text(errors="replace")
        out: dict[str, Any] = {"passed": 0, "failed": {}, "done": False}
        out.update(json.loads(self.result.read_text()) if self.result.exists() else {})
        if (self.process.returncode not in (0, 1, 2) or not self.result.exists()) and not late:
            out["failed"]["the run itself"] = "\n".join(log.strip().splitlines()[-8:])
        return {"suite": self.name, **out, "log": log[-20000:]}


def lines(r: dict[str, Any]) -> list[str]:
    """A suite's result as it is printed."""
    count = lambda name: sum(r.get(name, {}).values())
    out = [f"{r['suite']}: {r['passed']} passed, {len(r['failed'])} failed, {count('skipped')} skipped by themselves, "
           f"{count('different')} differ, {count('left out')} left out, {r.get('seconds', 0)} s" +
           (", not all run: time was up" if not r["done"] else "")]
    out += [f"  FAILED {n}: {why}" for n, why in r["failed"].items()]
    for name in ("different", "skipped", "left out"):
        out += [f"  {name}: {n} {why}" for why, n in r.get(name, {}).items()]
    return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--every", default="1", help="run every n-th parameter set of each test: n, or n by suite, as 1,flashinfer=40")
    p.add_argument("--seconds", type=float, default=0, help="begin no test after this many")
    p.add_argument("--workers", type=int, default=0, help="processes of a suite (pytest-xdist)")
    p.add_argument("--out", help="the file for all results (JSON)")
    p.add_argument("words", nargs="*", help="for pytest, after --, as -k NAME")
    a = p.parse_args()
    given = {n: root for n in NAMES if (root := checkout(n))}
    if not given:
        raise SystemExit(f"set one of {', '.join(VARIABLES.values())} to a checkout")
    os.environ.setdefault("GDN_CODEGEN_CACHE", str(Path(tempfile.gettempdir()) / f"gdn_codegen_suites_{os.getuid()}"))
    os.environ.setdefault("TILELANG_CACHE_DIR", str(Path(os.environ["GDN_CODEGEN_CACHE"]) / "tilelang"))
    start = time.monotonic()
    every = {n or "all": int(x) for n, _, x in (item.rpartition("=") for item in a.every.split(","))}
    runs = [Run(n, root, every.get(n, every.get("all", 1)), a.seconds, a.workers, tuple(a.words)) for n, root in given.items()]
    results = []
    for r in runs:
        results.append(r.wait())
        print("\n".join(lines(results[-1])), flush=True)
    print(f"{time.monotonic() - start:.0f} s")
    if a.out:
        Path(a.out).write_text(json.dumps(results, indent=1))
    return int(any(r["failed"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
