"""Writes and imports generated modules."""
from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from . import cache
from .build import Build, render


def write(b: Build, out: Path) -> Path:
    """The generated module of `b` at out/TARGET/NAME.py; an unchanged file is left alone."""
    path, text = out / b.target / f"{b.name}.py", render(b)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        cache.write(path, text)
    return path


def check_environment() -> None:
    """Modules take this for a number as they are imported, and then name no variable."""
    chunks = os.environ.get("GDN_CODEGEN_PART_CHUNKS", "0")
    if not chunks.isdecimal():
        raise ValueError(f"GDN_CODEGEN_PART_CHUNKS: got {chunks!r}; accepted: the chunks of a part, 0 to choose")


def import_path(path: Path) -> ModuleType:
    """Import a generated module from any folder."""
    name = f"gdn_codegen_generated_{path.parent.name}_{path.stem}_{cache.digest(str(path.resolve()))[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"path: got {path}; accepted: a generated Python module")
    check_environment()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and source inspection look the module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def cached(b: Build) -> Path:
    """The generated module of `b` in the package's cache."""
    text = render(b)
    path = cache.folder() / "modules" / b.target / f"{b.name}_{cache.digest(text)}.py"
    return cache.made(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@lru_cache(maxsize=256)
def module(b: Build) -> ModuleType:
    """The generated module of `b`, built into the cache on first use."""
    return import_path(cached(b))


def function(b: Build) -> Callable[..., Any]:
    """The op of `b`."""
    fn: Callable[..., Any] = getattr(module(b), b.function)
    return fn
