"""`build --check`: compile a generated module as far as this machine allows."""
from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

from .build import Build

#: Packages and programs without which a target's modules cannot be compiled.
NEEDS = {"triton": (("triton",), ()), "tilelang": (("tilelang",), ("nvcc",)), "pto": ((), ("g++",))}
#: Targets whose text runs on any GPU, and the architectures for which it can be compiled here.
ARCHES = {"triton": ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")}


def check(b: Build, path: Path, arches: Sequence[str] = ()) -> list[tuple[str, bool]]:
    """Lines, and whether each is no error; one that says so where nothing can be compiled. arches: some of ARCHES."""
    packages, programs = NEEDS[b.target]
    missing = [n for n in packages if importlib.util.find_spec(n) is None] + [n for n in programs if shutil.which(n) is None]
    if missing:
        return [(f"not compiled: {', '.join(missing)} is missing here", True)]
    module = importlib.import_module(f"{__package__}.check_{b.target}")
    results: list[tuple[str, bool]] = module.check(path, *([arches] if arches else []))
    return results
