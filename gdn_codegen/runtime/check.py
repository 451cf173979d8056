"""`build --check`: compile a generated module as far as this machine allows."""
from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path

from .build import Build

#: Packages and programs without which a target's modules cannot be compiled.
NEEDS = {"triton": (("triton",), ()), "tilelang": (("tilelang",), ("nvcc",)), "pto": ((), ("g++",))}


def check(b: Build, path: Path) -> list[tuple[str, bool]]:
    """A line and a verdict for each kernel and architecture tried; a line that says so where nothing can be."""
    packages, programs = NEEDS[b.target]
    missing = [n for n in packages if importlib.util.find_spec(n) is None] + [n for n in programs if shutil.which(n) is None]
    if missing:
        return [(f"not compiled: {', '.join(missing)} is missing here", True)]
    module = importlib.import_module(f"{__package__}.check_{b.target}")
    results: list[tuple[str, bool]] = module.check(path)
    return results
