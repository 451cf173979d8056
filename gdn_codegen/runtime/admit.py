"""The admission check: a build serves a device only after its kernels gave the right results there, on a small problem.

The problem, the page in float64 and the comparison are the generated module's own (`check`, host/check.py). This module
keeps the verdict: in memory for this process, and in a file beside the module, so that later processes run nothing.
"""
from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..targets import find
from . import cache
from .build import Build
from .call.request import Call
from .call.tables import versions


class Refused(RuntimeError):
    """A build whose kernels give wrong results on a device."""


#: Errors of a GPU's driver after which the process can run nothing on the device.
LOST = re.compile(r"illegal memory access|misaligned address|illegal instruction|unspecified launch failure|"
                  r"CUDA_ERROR_(ILLEGAL_ADDRESS|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION|LAUNCH_FAILED)")
_passed: set[Any] = set()
_checking = threading.RLock()


def wanted(b: Build, device: torch.device) -> bool:
    """True if the build must be checked on the device. A target that interprets compiles nothing, and needs no check."""
    return os.environ.get("GDN_CODEGEN_ADMIT") != "0" and device.type not in b.of.interprets


def captures(device: torch.device) -> bool:
    """True if a CUDA graph is captured on the device. Nothing is checked then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def admit(b: Build, m: Any, call: Call, prepare: Callable[[], object]) -> None:
    """Check the build on the device, or read its verdict, once per process. Raises Refused if its kernels are wrong there.

    Some targets compile for the call's head counts, for packed sequences, for given and for wanted states (Target.per_call).
    Kernels of the others are the same for all calls; two kinds of calls check them. prepare: plans the call, and so refuses a bad
    one before the check.
    """
    device, heads = call.device, (call.extent.H, call.extent.HV)
    kind = (heads, (call.packed, call.starts, call.wanted)) if b.of.per_call else ()
    key = m, device, kind
    if key in _passed or not wanted(b, device) or captures(device):
        return
    with _checking:  # other threads wait
        if key in _passed:
            return
        tried = (device, heads) in m.check.done
        m.check.done.add((device, heads))  # launches with a Triton that miscompiles would check again
        try:
            prepare()
            verdict = _verdict(b, m, device, kind)
            if verdict["wrong"]:
                raise Refused(said(verdict))
            tried = True
        finally:
            if not tried:
                m.check.done.discard((device, heads))
        _passed.add(key)


def _verdict(b: Build, m: Any, device: torch.device, kind: Any) -> dict[str, Any]:
    """The verdict on a build's kernels on a device: from its file, or from a small problem that runs now and writes the file.

    m: the build's module. kind: (head counts, call) where the target checks each of these (Target.per_call), else ().
    Raises RuntimeError if the check ends this process's use of the GPU.
    """
    about = {"build": f"{b.target} {b.name}", "module": Path(m.__file__).name, "device": name(device), "driver": driver(device),
             "versions": {n: v for of in (versions(b.target), compilers(b.target, device), assembler(m, device))
                          for n, v in of.items() if v}, "kind": repr(kind)}
    path = Path(m.__file__).with_suffix(".verdicts") / f"{cache.digest(json.dumps(about, sort_keys=True))}.json"
    found = _read(path, about)
    if found is None:
        if device.type == "cuda":  # what went wrong before is not this build's
            torch.cuda.synchronize(device)
        try:
            errors = m.check.errors(device, *([kind[0], (kind[1],)] if kind else []))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as e:
            if device.type != "cuda" or not LOST.search(str(e)):
                raise
            found = _written(path, about, {"memory": (math.inf, 0.0)})
            raise RuntimeError(f"{said({**found, 'path': str(path)})}. {LEFT} ({str(e).splitlines()[0]})") from e
        found = _written(path, about, errors)
    return {**found, "path": str(path)}


#: The error text if the process cannot use the device any more.
LEFT = ("The small problem of the check ended this process's use of the GPU: the kernels reach memory that is not theirs. "
        "Another process passes this build over")


def _written(path: Path, about: dict[str, Any], errors: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Write the verdict to its file, and return it."""
    found = {**about, "errors": {n: [str(e), str(accepted)] for n, (e, accepted) in errors.items()},
             "wrong": [n for n, (e, accepted) in errors.items() if not e <= accepted],
             "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    try:
        cache.write(path, json.dumps(found, indent=1) + "\n")
    except OSError:
        pass  # a cache that cannot be written, in an image: each process checks anew
    return found


def _read(path: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict in a file; None if there is no file, or it is about something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = all(found[n] == x for n, x in about.items()) and {"errors", "wrong", "date"} <= set(found)
        return found if whole and isinstance(found["wrong"], list) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def said(verdict: dict[str, Any]) -> str:
    """The text of a refusal, which says what to report."""
    off = ", ".join(f"{n} by {float(e):.1e} ({float(a):.0e} is accepted)" for n, (e, a) in verdict["errors"].items()
                    if n in verdict["wrong"])
    about = ", ".join(f"{n} {v}" for n, v in verdict["versions"].items())
    return (f"gdn_codegen: the kernels of {verdict['build']} give wrong results on {verdict['device']} (driver "
            f"{verdict['driver']}, {about}): off are {off}, RMSE over RMS. Please report this line, and {verdict['path']}. "
            "GDN_CODEGEN_ADMIT=0 turns this check off")


# --- what a verdict depends on ---------------------------------------------------------------------------------------
def _first(path: str, pattern: str) -> str:
    """The first match of a pattern in a file; "" if there is none."""
    try:
        found = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"))
        return found[1].strip() if found else ""
    except OSError:
        return ""


@lru_cache(maxsize=64)
def name(device: torch.device) -> str:
    """The name of a kind of device. A verdict holds for all devices of a kind."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return " ".join(filter(None, ("cpu", platform.machine(), _first("/proc/cpuinfo", r"model name\s*:(.*)"))))
    return str(getattr(torch, device.type).get_device_name(device))


@lru_cache(maxsize=64)
def driver(device: torch.device) -> str:
    """The version of the device's driver; "" if it has none."""
    if device.type == "cuda":
        return (_first("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)")
                or _first("/sys/module/amdgpu/version", r"(.*)") or str(torch.version.hip or torch.version.cuda))
    return _first("/usr/local/Ascend/driver/version.info", r"Version=(.*)") if device.type == "npu" else "none"


@lru_cache(maxsize=64)
def compilers(target: str, device: torch.device) -> dict[str, str]:
    """The compiler of a target's kernels on the device, by its path."""
    path = shutil.which(find(target).toolchain.compiler(device.type) or "-")
    return {Path(path).name: os.path.realpath(path)} if path else {}


def assembler(m: Any, device: torch.device) -> dict[str, str]:
    """The release of the assembler of a module's kernels, where a toolchain has several."""
    return {"ptxas": m._ptxas()} if device.type == "cuda" and hasattr(m, "_ptxas") else {}


def forget() -> None:
    """Forget the verdicts of this process (for tests)."""
    _passed.clear()
