"""Writes and imports generated modules."""
from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from . import cache
from .build import Build, render
from .progress import first_call
from .targets import installs

_importing = threading.RLock()


def _written(path: Path, text: str) -> Path:
    """The file with this text; one that has it already is left alone."""
    if not path.exists() or path.read_bytes() != text.encode():
        cache.write(path, text)
    return path


def write(b: Build, out: Path) -> Path:
    """The generated module of `b` at out/TARGET/NAME.py."""
    return _written(out / b.target / f"{b.name}.py", render(b))


def import_path(path: Path) -> ModuleType:
    """Import a generated module from any folder."""
    name = f"gdn_codegen_generated_{path.parent.name}_{path.stem}_{cache.digest(str(path.resolve()))[:8]}"
    with _importing:  # it is in sys.modules, half made, until it is run through
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"path: got {path}; accepted: a generated Python module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and source inspection look the module up
        try:
            spec.loader.exec_module(module)
        except BaseException as e:
            del sys.modules[name]
            if isinstance(e, ModuleNotFoundError) and (needed := installs(e.name or "")):
                raise ValueError(f"target: got {e.name}, which is not installed; accepted: the same after {needed}") from e
            raise
        return module


def import_line(path: Path, function: str) -> str:
    """The Python line that imports a generated module's function."""
    parts = path.with_suffix("").parts
    if path.is_absolute() or any(not x.isidentifier() for x in parts):
        return f"import sys; sys.path.insert(0, {str(path.parent)!r}); from {path.stem} import {function}"
    return f"from {'.'.join(parts)} import {function}"


def cached(b: Build) -> Path:
    """The generated module of `b` in the package's cache. The second of a pair has a file for each first one."""
    text = render(b)
    digest = cache.digest(text, *([cached(b.earlier).name] if b.earlier is not None else []))
    try:
        return _written(cache.folder() / "modules" / b.target / f"{b.name}_{digest}.py", text)
    except OSError as e:
        raise ValueError(f"GDN_CODEGEN_CACHE: got {cache.folder()}: {e.strerror}; accepted: a folder that can be written") from e


@lru_cache(maxsize=256)
def module(b: Build) -> ModuleType:
    """The generated module of `b`, built into the cache on first use. The second of a pair launches both."""
    with first_call(f"building {b.target} {b.name}"):
        m = import_path(cached(b))
    if b.earlier is not None and m.HOST.earlier is None:
        m.HOST.earlier = copy(module(b.earlier).HOST)  # of its own, since a self-check changes it
    return m


def function(b: Build) -> Callable[..., Any]:
    """The op of `b`."""
    fn: Callable[..., Any] = getattr(module(b), b.function)
    return fn
