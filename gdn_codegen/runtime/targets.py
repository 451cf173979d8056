"""Which targets run on this machine, on what, and what is missing for the rest."""
from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import cxx

#: What a target needs to compile for a GPU or the simulator, beside its package, and what brings it.
TOOLS = {"nvcc": "a CUDA toolkit with nvcc on PATH", "c++": "g++ 12 or newer, or CXX"}


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`: ok says whether `what` of `target` works here; detail is a version or what to install."""

    target: str
    what: str
    ok: bool
    detail: str


def _version(module: str) -> str:
    """The installed version of a distribution, without importing it; "" where it is missing."""
    if importlib.util.find_spec(module) is None:
        return ""
    from importlib.metadata import PackageNotFoundError, version
    try:
        return version(module)
    except PackageNotFoundError:
        return "unknown version"


def _first_line(*command: str) -> str:
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


def serves(target: str, device: str) -> bool:
    """Whether `target` has kernels for tensors of `device` ("cuda", "cpu", "npu") anywhere."""
    return device != ("cuda" if target == "pto" else "npu")


def install(target: str) -> str:
    """What brings a target's package; "" where it is here, or none is needed."""
    return f"pip install 'gdn_codegen[{target}]'" if target in ("triton", "tilelang") and not _version(target) else ""


def lacks_package(target: str, device: str) -> str:
    """Why nothing of `target` can run tensors of `device` here, and what to install; "" where something may."""
    if not serves(target, device):
        return f"it has no kernels for {device} tensors"
    return f"its package is missing: {install(target)}" if install(target) else ""


def lacks_tools(target: str, device: str) -> str:
    """What compiling kernels for tensors of `device` needs and is not here; "" where nothing is missing. Kernels that a cache
    has, or that were compiled ahead, run without."""
    if device == "cpu" and target != "triton" and not compiler():
        return f"a C++ compiler is missing: install {TOOLS['c++']}"
    if target == "tilelang" and device == "cuda" and shutil.which("nvcc") is None:
        return f"nvcc is missing: install {TOOLS['nvcc']}, or compile ahead (gdn_codegen build --compile)"
    if target == "pto" and device == "npu" and shutil.which("bisheng") is None:
        return "bisheng is missing: install the CANN toolkit"
    return ""


def lacks(target: str, device: str) -> str:
    """Why `target` runs no tensors of `device` here, and what to install; "" where it does. What a GPU's kernels are compiled
    with is not asked for."""
    return lacks_package(target, device) or (lacks_tools(target, device) if device == "cpu" else "")


def runs(target: str, device: str) -> bool:
    """Whether `target` runs tensors of `device` here."""
    return not lacks(target, device)


def pto_headers() -> tuple[Path | None, str]:
    """The folder of <pto/pto-inst.hpp> below PTO_ISA_ROOT, or why there is none."""
    root = os.environ.get("PTO_ISA_ROOT")
    if not root:
        return None, "set PTO_ISA_ROOT to a PTO-ISA installation"
    for folder in (Path(root) / "include", Path(root)):
        if (folder / "pto" / "pto-inst.hpp").exists():
            return folder, ""
    return None, f"PTO_ISA_ROOT: {root} has no include/pto/pto-inst.hpp"


def findings() -> list[Finding]:
    """What `doctor` prints."""
    import torch

    from .. import __version__
    from ..tools import cache_command
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    triton, tilelang, nvcc = _version("triton"), _version("tilelang"), _first_line("nvcc", "--version")
    gxx, bisheng = _first_line(cxx.compiler() or "g++", "--version"), shutil.which("bisheng") or ""
    npu, (headers, no_headers) = _version("torch_npu"), pto_headers()
    need_gpu = "no GPU that torch sees"
    return [
        Finding("", "versions", True,
                f"gdn_codegen {__version__}, Python {platform.python_version()}, torch {torch.__version__}"),
        Finding("", "cache", *cache_command.facts()),
        Finding("triton", "package", bool(triton), triton or "pip install 'gdn_codegen[triton]'"),
        Finding("triton", "CPU tensors", bool(triton), "Triton's interpreter" if triton else "needs the package"),
        Finding("triton", "GPU tensors", bool(triton and gpu), gpu or need_gpu),
        Finding("tilelang", "package", bool(tilelang), tilelang or "pip install 'gdn_codegen[tilelang]'"),
        Finding("tilelang", "CPU tensors", bool(tilelang and gxx),
                "TileLang's C backend" if tilelang and gxx else f"needs the package and {TOOLS['c++']}"),
        Finding("tilelang", "nvcc", bool(nvcc), nvcc or f"needs {TOOLS['nvcc']}"),
        Finding("tilelang", "GPU tensors", bool(tilelang and gpu and nvcc), gpu or need_gpu),
        Finding("pto", "CPU tensors", bool(gxx), f"the bundled simulator, {gxx}" if gxx else f"needs {TOOLS['c++']}"),
        Finding("pto", "PTO-ISA headers", headers is not None, str(headers or no_headers)),
        Finding("pto", "bisheng", bool(bisheng), bisheng or "needs the CANN toolkit: bisheng on PATH"),
        Finding("pto", "NPU tensors", bool(npu and bisheng), npu or "needs torch_npu and an Ascend NPU"),
    ]


def choose(device: str, target: str = "auto") -> str:
    """The target for tensors of `device`: the caller's, unless it cannot run them here, or the first that does."""
    if target != "auto":
        if why := lacks_package(target, device):
            raise ValueError(f"target: got {target!r}, and {why}; accepted: a target that runs {device} tensors here, as "
                             "`gdn_codegen doctor` lists them")
        return target
    order = {"cuda": ("tilelang", "triton"), "npu": ("pto",)}.get(device, ("tilelang", "triton", "pto"))
    for target in order:
        if runs(target, device):
            return target
    raise ValueError(f"target: got 'auto', but none of {', '.join(order)} runs {device} tensors here; "
                     "`gdn_codegen doctor` says what is missing")
