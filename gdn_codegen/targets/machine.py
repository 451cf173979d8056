"""What this machine has: versions, tools, devices."""
from __future__ import annotations

import importlib.util
import shutil
import subprocess
from dataclasses import dataclass

from ..runtime import cxx

#: What targets need to compile for a GPU or the simulator, beside their packages, and what brings it.
TOOLS = {"nvcc": "a CUDA toolkit with nvcc on PATH", "c++": "g++ 12 or newer, or CXX"}
NO_GPU = "no GPU that torch sees"


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`: ok says whether `what` of `target` works here; detail is a version or what to install."""

    target: str
    what: str
    ok: bool
    detail: str


def version(module: str) -> str:
    """The installed version of a distribution, without importing it; "" where it is missing."""
    if importlib.util.find_spec(module) is None:
        return ""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed
    try:
        return installed(module)
    except PackageNotFoundError:
        return "unknown version"


def first_line(*command: str) -> str:
    """The first line that a command prints, of nvcc the last; its path where it prints none, "" where it is missing."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if command[0] == "nvcc" and lines else (lines[0] if lines else path)


def compiler() -> bool:
    """Whether there is a C++ compiler, which kernels for the CPU need."""
    return shutil.which(cxx.compiler() or "") is not None


def lacks_compiler() -> str:
    """What is said where there is none."""
    return "" if compiler() else f"a C++ compiler is missing: install {TOOLS['c++']}"


def gpu() -> str:
    """The name of the first GPU that torch sees, or ""."""
    import torch
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
