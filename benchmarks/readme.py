"""The figures of README.md, each by its commands: python benchmarks/readme.py OUT [NAME ...] [--list]

Runs the commands of all figures, or of those that are named, one after another, and writes what each printed to OUT/NAME.txt. A
figure whose text is complete, with exit status 0, is not made again; delete the file to make it anew. All but "tests" need an
NVIDIA Hopper GPU, and are compared with the other libraries that are installed. --list prints the commands alone. Exits with 1 if
a command failed.
"""
from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DONE = "readme.py: exit status 0"


@dataclass(frozen=True)
class Figure:
    """says: words of README.md beside the figure. commands: {out} is the folder, {python} this Python."""

    says: str
    commands: tuple[str, ...]


BENCH = "{python} -m gdn_codegen.cli bench --runs 7"
SHAPES = "--shapes benchmarks/shapes/{0}.json --json {{out}}/{0}.json --plot {{out}}/{0}.png"
FIGURES = {
    "prefill": Figure("Device time of four libraries relative to ours at ten shapes", tuple(
        f"{BENCH} --target tilelang --schedule auto {SHAPES.format(x)}"
        for x in ("headline", "serving"))),
    "gradient": Figure("the gradient of Gated DeltaNet takes 0.58 of FLA's time on TileLang, and 0.65 on Triton", (
        f"{BENCH} --backward --target tilelang --dtype bfloat16 --peers fla",
        f"{BENCH} --backward --target triton --dtype bfloat16 --peers fla")),
    "results": Figure("last compared with float64 on one H100, in 798 calls", (
        "{python} tests/device/matrix.py --out {out}/matrix.json",)),
    "device_tests": Figure("`pytest -m device tests/device` ran on four H100s", (
        "{python} -m pytest -q -m device tests/device",)),
    "tests": Figure("the command above 804 s of tests", (
        '{python} -m pytest -q -n 2 --dist worksteal -m "not slow"', "{python} -m pytest -q -n 2 --dist worksteal"))}


def commands(name: str, out: Path) -> list[list[str]]:
    """The commands of a figure, as words."""
    return [[w.format(out=out, python=sys.executable) for w in shlex.split(c)] for c in FIGURES[name].commands]


def made(name: str, out: Path) -> bool:
    """Whether the figure's commands all succeed, or did before."""
    path = out / f"{name}.txt"
    if path.exists() and path.read_text().endswith(f"{DONE}\n"):
        return True
    with open(path, "w") as f:
        for words in commands(name, out):
            print(shlex.join(words), flush=True)
            print(f"$ {shlex.join(words)}", file=f, flush=True)
            status = subprocess.run(words, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT, check=False).returncode
            if status:
                print(f"readme.py: exit status {status}", file=f)
                return False
        print(DONE, file=f)
    return True


def main(argv: list[str] | None = None) -> int:
    """Make the figures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for what the commands print")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    a = parser.parse_args(argv)
    for name in a.names:
        if name not in FIGURES:
            parser.error(f"NAME: got {name!r}; accepted: {', '.join(FIGURES)}")
    names = a.names or list(FIGURES)
    if a.list:
        print("\n".join(f"{name}: {shlex.join(words)}" for name in names for words in commands(name, a.out.resolve())))
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in names if not made(name, a.out.resolve())]
    for name in names:
        print(f"{name}: {'failed, see' if name in failed else 'in'} {a.out / name}.txt")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
