"""`build --check`: compile a generated module as far as this machine allows."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..runtime.build import Build
from ..runtime.targets import install
from ..targets import Line, find


def missing(target: str) -> str:
    """What to install before a target's modules can be compiled; "" if nothing is missing."""
    return install(target) or find(target).toolchain.check_needs()


def check(b: Build, path: Path, archs: Sequence[str] = ()) -> Sequence[Line]:
    """What compiling the module at `path` tells. archs: of the target's check_archs, none for those that it has by itself."""
    run = b.of.toolchain.check
    if run is None:
        return [("nothing to compile", True)]
    if needed := missing(b.target):
        return [(f"not compiled, for want of a toolchain: {needed}", None)]
    return run(b, path, archs)
