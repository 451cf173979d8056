"""Compiles a generated PTO module's C++ for the simulator."""
from __future__ import annotations

import tempfile
from pathlib import Path

from .. import pto_sim
from ..runtime.build import Build
from ..runtime.load import import_path
from ..runtime.progress import under_way


def check(b: Build, path: Path) -> list[tuple[str, bool]]:
    """A line that says whether g++ compiles the source, and True if it does."""
    module = import_path(path)
    names = [symbol for symbol, *_ in module.SYMBOLS.values()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cpp"
        source.write_text(module.SOURCE)
        try:
            with under_way(f"compiling {', '.join(names)} for the simulator"):
                pto_sim.build(source, names, Path(folder) / "kernel.so")
        except pto_sim.PtoSimError as e:
            return [(f"{', '.join(names)}: {e}", False)]
    number = "1 kernel" if len(names) == 1 else f"{len(names)} kernels"
    return [(f"{number}, {', '.join(names)}: {pto_sim.compiler()} compiles them", True)]
