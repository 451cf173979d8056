"""The first call of a build, in which its kernels compile: progress on stderr, and errors for kernels that do not compile."""
from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...targets import find, names
from ..progress import first_call
from ..targets import lacks_tools


class DoesNotCompile(ValueError):
    """A build that its toolchain does not compile, or that has no room on the GPU."""


@contextlib.contextmanager
def compiling(m: Any, device: str) -> Iterator[None]:
    """ValueError in place of a toolchain's own error: what to install, or that another build is needed. m: the generated module,
    at .../TARGET/NAME.py; device: the type of it."""
    target, name = _target_and_name(getattr(m, "__file__", ""))
    with first_call(f"first call of {target} {name}"):
        try:
            yield
        except Exception as e:
            if isinstance(e, ValueError) and not _is_theirs(e):  # what the call itself refuses
                raise
            if why := lacks_tools(target, device):
                raise ValueError(f"target: got {target!r}, and {why}; accepted: a target that compiles here") from e
            if why := _said(e):
                raise DoesNotCompile(f"schedule: got {name} for {target}, {why}; accepted: another schedule, chunk_size or "
                                     "target, or None to choose") from e
            raise


@lru_cache(maxsize=256)
def _target_and_name(file: str) -> tuple[str, str]:
    """The target and the name of a generated module."""
    path = Path(file)
    return path.parent.name, path.stem


def _is_theirs(e: Exception) -> bool:
    """Whether a toolchain raised the error. If it passed through C++, TVM's FFI keeps only the files of the earlier frames."""
    at = e.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return False
    file = at.tb_frame.f_code.co_filename
    return str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _packages() or file.startswith(_folders())


def _packages() -> tuple[str, ...]:
    """Packages of the toolchains."""
    return tuple(x for n in names() for x in find(n).toolchain.modules)


@lru_cache(maxsize=1)
def _folders() -> tuple[str, ...]:
    """Where the toolchains are installed."""
    found = (importlib.util.find_spec(n) for n in _packages())
    return tuple(f"{folder}{os.sep}" for spec in found if spec for folder in spec.submodule_search_locations or ())


def _said(e: Exception) -> str:
    """Why a toolchain refused a build; "" for other errors. Compares names of types, as the toolchains may not be installed."""
    if type(e).__name__ == "OutOfResources":  # of Triton
        return "which takes {} of {}, and the GPU has {}".format(*(getattr(e, n, "?") for n in ("required", "name", "limit")))
    text = " ".join(str(e).split())
    if any(x in text for x in ("CUDA error", "CUDALaunch", "Triton Error [")):  # of a launch
        return ""
    if type(e).__name__ in ("InternalError", "CompilationError") or "ptxas" in text or _is_theirs(e):
        return f"which its compiler does not take ({type(e).__name__}: {text[-200:]})"
    return ""
