"""Finds out what this machine has: versions of packages, tools, devices."""
from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache

#: Tools that targets need besides their packages, to compile for a GPU or the simulator -> what to install.
TOOLS = {"nvcc": "a CUDA toolkit with nvcc on PATH", "c++": "g++ 12 or newer, or CXX"}
NO_GPU = "no GPU that torch sees"


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`. ok: whether `what` works for `target` on this machine. detail: a version, or what to install."""

    target: str
    what: str
    ok: bool
    detail: str


def version(module: str) -> str:
    """The version of an installed distribution, without an import. "" if it is missing."""
    return _distribution(module) if importlib.util.find_spec(module) is not None else ""


@lru_cache(maxsize=64)
def _distribution(module: str) -> str:
    """The version in a distribution's metadata, which takes a millisecond to read."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed
    try:
        return installed(module)
    except PackageNotFoundError:
        return "unknown version"


def first_line(*command: str) -> str:
    """The first line that a command prints; for nvcc the last line. Its path if it prints nothing. "" if it is missing or
    fails."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if command[0] == "nvcc" and lines else (lines[0] if lines else path)


def cxx() -> str | None:
    """The command of the C++ compiler: `$CXX`, or the first of g++ and clang++ on the path. None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def compiler() -> bool:
    """Whether there is a C++ compiler. Kernels for the CPU need one."""
    return shutil.which(cxx() or "") is not None


def lacks_compiler() -> str:
    """The message if there is no C++ compiler, else ""."""
    return "" if compiler() else f"a C++ compiler is missing: install {TOOLS['c++']}"


def gpu() -> str:
    """The name of the first GPU that torch finds, "" if it finds none."""
    import torch
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
