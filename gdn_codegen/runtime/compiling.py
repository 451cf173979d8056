"""The call in which a build's kernels compile: that it is under way, and what to do where they do not compile."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .progress import first_call
from .targets import lacks_tools


class DoesNotCompile(ValueError):
    """A build that its toolchain does not compile, or that has no room on the GPU."""


@contextlib.contextmanager
def compiling(m: Any, device: str) -> Iterator[None]:
    """ValueError in place of a toolchain's own error: what to install, or that another build is needed. m: the generated module,
    at .../TARGET/NAME.py; device: the type of it."""
    path = Path(getattr(m, "__file__", ""))
    target = path.parent.name
    with first_call(f"first call of {target} {path.stem}"):
        try:
            yield
        except ValueError:  # what the call itself refuses
            raise
        except Exception as e:
            if why := lacks_tools(target, device):
                raise ValueError(f"target: got {target!r}, and {why}; accepted: one that compiles here") from e
            if why := _said(e):
                raise DoesNotCompile(f"schedule: got {path.stem} for {target}, {why}; accepted: another schedule, chunk_size or "
                                     "target, or None to choose") from e
            raise


def _said(e: Exception) -> str:
    """What a toolchain's error has against a build; "" for any other error. By name, as the toolchains may not be installed."""
    if type(e).__name__ == "OutOfResources":  # of Triton
        return "which takes {} of {}, and the GPU has {}".format(*(getattr(e, n, "?") for n in ("required", "name", "limit")))
    text = " ".join(str(e).split())
    if "CUDA error" in text or "CUDALaunch" in text:  # of a launch
        return ""
    if type(e).__name__ == "InternalError" or "ptxas" in text or type(e).__name__ == "CompilationError":
        return f"which its compiler does not take ({type(e).__name__}: {text[-200:]})"
    return ""
