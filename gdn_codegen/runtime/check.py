"""`build --check`: compile a generated module as far as this machine allows."""
from __future__ import annotations

import importlib
from pathlib import Path

from .build import Build


def check(b: Build, path: Path) -> list[tuple[str, bool]]:
    """A line and a verdict for each kernel and architecture tried."""
    module = importlib.import_module(f"{__package__}.check_{b.target}")
    results: list[tuple[str, bool]] = module.check(path)
    return results
