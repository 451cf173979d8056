"""`build --check`: compile a generated module as far as this machine allows."""
from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..runtime.build import Build
from ..runtime.targets import TOOLS, compiler, install

#: A line, and whether it is no error; None where it says what was not checked.
Line = tuple[str, "bool | None"]
#: Targets whose text runs on any GPU, and the architectures for which it can be compiled here.
ARCHES = {"triton": ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")}


def missing(target: str) -> str:
    """What to install before a target's modules can be compiled; "" where all is here."""
    if install(target):
        return install(target)
    if target == "tilelang" and shutil.which("nvcc") is None:
        return TOOLS["nvcc"]
    return TOOLS["c++"] if target == "pto" and not compiler() else ""


def check(b: Build, path: Path, arches: Sequence[str] = ()) -> list[Line]:
    """What compiling the module at `path` tells. arches: some of ARCHES."""
    if needed := missing(b.target):
        return [(f"not compiled, for want of a toolchain: {needed}", None)]
    module = importlib.import_module(f"{__package__}.check_{b.target}")
    results: list[Line] = module.check(b, path, *([arches] if arches else []))
    return results
