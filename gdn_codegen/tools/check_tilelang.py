"""Compiles the kernels of a generated TileLang module with nvcc, for a GPU that need not be here."""
from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..runtime.build import Build
from ..runtime.defaults import better
from ..runtime.load import import_path
from ..runtime.progress import under_way

#: Bytes of shared memory a block may use (CUDA C++ Programming Guide, compute capability 9.0).
SHARED = {"sm_90a": 227 * 1024}


@dataclass(frozen=True)
class Compiled:
    """One kernel. shared: dynamic shared memory of a block, in bytes; registers of a thread; spills: bytes that a thread
    stores and loads because registers ran out; wgmma, tma: whether products and copies became such; serialised: whether ptxas
    has each wgmma wait for the one before (its C7510 to C7519). error: why it does not build.
    advice: what to do about spills."""

    kernel: str
    arch: str
    seconds: float = 0.0
    shared: int = 0
    registers: int = 0
    spills: int = 0
    wgmma: bool = False
    tma: bool = False
    serialised: bool = False
    error: str = ""
    advice: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.kernel} {self.arch}: {self.error}"
        spilled = f", warning: spills {self.spills} bytes{self.advice}" if self.spills else ""
        spilled += ", warning: each wgmma waits for the one before" if self.serialised else ""
        return (f"{self.kernel} {self.arch}: {self.shared} bytes shared, {self.registers} registers"
                f"{', wgmma' if self.wgmma else ''}{', tma' if self.tma else ''}, {self.seconds:.0f} s{spilled}")


def check(b: Build, path: Path) -> list[tuple[str, bool]]:
    """For each kernel a line, and True if it compiles."""
    return [(str(replace(c, advice=better(b, c.arch)) if c.spills else c), not c.error) for c in compiled(path)]


def compiled(path: Path, kernels: Sequence[str] = (), arch: str = "sm_90a") -> list[Compiled]:
    """The kernels of the module at `path` (all, or those named), compiled for `arch`."""
    if shutil.which("nvcc") is None:
        raise RuntimeError("nvcc is not on PATH: compiling for a GPU needs a CUDA toolkit")
    launcher: Any = import_path(path)._launcher
    out = []
    for name in kernels or launcher.kernels:
        with under_way(f"compiling {name} for {arch}"):
            out.append(_compile(launcher, name, arch))
    return out


def _compile(launcher: Any, name: str, arch: str) -> Compiled:
    """Lower one kernel of a module to CUDA and compile it with nvcc. What fails is in the result's `error`."""
    import tilelang
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    start = time.perf_counter()
    try:
        with tilelang.tvm.transform.PassContext(config=launcher.passes[name]), \
                tilelang.tvm.target.Target({"kind": "cuda", "arch": arch}) as target:
            source = tilelang.lower(launcher.program(name), target=target)
    except Exception as e:  # TVM raises what its passes raise
        return Compiled(name, arch, error=" ".join(f"{type(e).__name__}: {e}".split())[-300:])
    text = source.kernel_source
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(text, encoding="utf-8")
        fast = ["--use_fast_math"] if launcher.passes[name].get("tl.enable_fast_math", False) else []
        command = ["nvcc", "-std=c++20", "-w", "-O3", *fast, f"-gencode=arch=compute_{arch[3:]},code={arch}", "-cubin",
                   f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", "-Xptxas=-v", "-o", f"{folder}/kernel.cubin",
                   str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said, seconds = done.stderr, time.perf_counter() - start
    if done.returncode:
        return Compiled(name, arch, seconds, error=f"nvcc: {next(iter(re.findall('.*error.*', said)), said[-300:])}")
    shared = _shared(source)
    over = shared > SHARED[arch]
    return Compiled(name, arch, seconds, shared, _number(r"Used (\d+) registers", said),
                    _number(r"(\d+) bytes spill stores", said) + _number(r"(\d+) bytes spill loads", said), "wgmma" in text,
                    "tma_load" in text, bool(re.search(r"\(C751\d\).*wgmma", said)),
                    f"needs {shared} bytes of shared memory, a block of {arch} has {SHARED[arch]}" if over else "")


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _shared(source: Any) -> int:
    """Dynamic shared memory of the lowered kernel, from the attribute that its launcher reads."""
    for f in source.device_mod.functions.values():
        found = f.attrs.get("dyn_shared_memory_buf") if f.attrs else None
        if found is not None:
            return int(found)
    return 0
