"""`build --compile`: kernels compiled before the first call, on a machine that needs no GPU.

TileLang's kernels are files beside the generated module, which loads them. Triton's are in Triton's own cache (TRITON_CACHE_DIR),
under the keys that launches look up.
"""
from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..runtime import cache, progress
from ..runtime.build import Build
from ..runtime.call import native_launcher
from ..runtime.load import import_path
from ..runtime.progress import under_way
from ..runtime.targets import install
from ..targets import find, names
from .check import missing
from .check_triton import compiling_for, dtypes

#: Kernels of a module that are compiled at a time; 0: as many as cores.
AT_A_TIME = 0


def compile_one_by_one() -> None:
    """Let this process compile one kernel at a time, and say nothing of how long it takes: it is one of several."""
    global AT_A_TIME
    AT_A_TIME, progress.PATIENCE = 1, threading.TIMEOUT_MAX


def check_ahead(b: Build, arch: str, heads: Sequence[tuple[int, int]]) -> None:
    """ValueError unless `compile_ahead` can compile the build's kernels with these options. Writes nothing."""
    ahead = b.of.toolchain.ahead
    if ahead is None:
        raise ValueError(f"compile: got {b.target}, whose kernels compile on first use; accepted: "
                         f"{', '.join(n for n in names() if find(n).toolchain.ahead)}")
    if b.arch and b.arch != arch:
        raise ValueError(f"compile: got {arch!r}; accepted: {b.arch}, the architecture of this module")
    if ahead.heads and not heads:
        raise ValueError(f"compile: got {b.target} without the head counts that its kernels are compiled for; accepted: the same "
                         "with --compile-heads H/HV")
    if not re.fullmatch(ahead.archs, arch):
        raise ValueError(f"compile: got {arch!r}; accepted for {b.target}: {ahead.accepted}")
    if needed := install(b.target):
        raise ValueError(_missing(arch, needed))


def _missing(arch: str, needed: str) -> str:
    return f"compile: got {arch!r}, and a toolchain is not installed; accepted: the same after installing it: {needed}"


def compile_ahead(b: Build, path: Path, arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Compile the kernels of the module at `path` for an architecture; a line for each. heads: H and HV (triton)."""
    check_ahead(b, arch, heads)
    assert b.of.toolchain.ahead is not None
    return b.of.toolchain.ahead.run(path, arch, heads)


def fill_cache(b: Build, path: Path, arch: str, heads: Sequence[tuple[int, int]]) -> None:
    """Compile the kernels of the module at `path` for an architecture into the toolchain's own cache, with no files beside the
    module."""
    check_ahead(b, arch, heads)
    ahead = b.of.toolchain.ahead
    assert ahead is not None
    for _ in (ahead.fill or ahead.run)(path, arch, heads):
        pass


def tilelang_cache(path: Path, arch: str) -> Iterator[str]:
    """Compiles the kernels of a TileLang module into TileLang's cache. Their names, one by one."""
    launcher: Any = import_path(path)._launcher
    for name in launcher.kernels:
        launcher.compiled(name, arch)
        yield name


def tilelang(path: Path, arch: str) -> Iterator[str]:
    """Compiles the kernels of a TileLang module side by side: TileLang's passes run without Python's lock, and nvcc is a process
    of its own."""
    launcher: Any = import_path(path)._launcher
    logging.getLogger("tilelang.jit.kernel").setLevel(logging.WARNING)
    wanted: list[tuple[Path, Callable[[Path], object]]] = [
        (Path(launcher.library(name, arch)), partial(_export, launcher, name, arch)) for name in launcher.kernels]
    wanted.append((wanted[0][0].with_name(native_launcher.file_name()), _copy_launcher))
    with ThreadPoolExecutor(AT_A_TIME or len(os.sched_getaffinity(0))) as pool:
        running = [pool.submit(_library, *x, arch) for x in wanted]
        try:
            for x in running:
                yield x.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _library(library: Path, make: Callable[[Path], object], arch: str) -> str:
    """Make a file unless it is there. A line on it."""
    start, there = time.perf_counter(), library.exists()
    try:
        with under_way(f"compiling {library.name}"):
            cache.made(library, make)
    except Exception as e:
        if needed := missing("tilelang"):
            raise ValueError(_missing(arch, needed)) from e
        raise
    took = "is there" if there else f"{time.perf_counter() - start:.1f} s"
    return f"{library}: {took}, {library.stat().st_size} bytes"


def tilelang_on_cpu(path: Path) -> Iterator[str]:
    """Compiles the kernels of a TileLang module by gcc, into TileLang's cache."""
    launcher: Any = import_path(path)._launcher
    for name in launcher.kernels:
        start = time.perf_counter()
        with under_way(f"compiling {name} for the CPU"):
            launcher.for_cpu(name)
        yield f"{name} cpu: {time.perf_counter() - start:.1f} s, in TileLang's cache"


def _copy_launcher(to: Path) -> None:
    shutil.copyfile(native_launcher.in_cache(), to)


def _export(launcher: Any, name: str, arch: str, to: Path) -> None:
    launcher.compiled(name, arch).export_library(str(to))


class _Compiles:
    """Takes the place of a kernel in a module's launcher: a launch then only compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names
        self.variants: dict[str, int] = {}  # hash of a compiled variant -> bytes of its binary

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*args: Any, **options: Any) -> Any:
            found = self.kernel.warmup(*args, grid=grid, **options)
            self.variants[found.hash] = len(found.asm.get("cubin") or found.asm.get("hsaco") or b"")
            return found
        return compile_only


class _Device:
    type, index = "cuda", 0


def _target(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget
    nvidia = re.fullmatch(r"sm_(\d+)a?", arch)
    return GPUTarget("cuda", int(nvidia[1]), 32) if nvidia else GPUTarget("hip", arch, 64)


def triton(path: Path, arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Compiles the kernels of a Triton module by its own launcher, so that its launches find them by their keys."""
    import torch
    module = fresh(path)
    module._launcher.kernels = {n: _Compiles(k) for n, k in module._launcher.kernels.items()}
    module._is_suspect = lambda device: False
    dtype = dtypes(module.TABLES)
    with compiling_for(_target(arch)):
        for name, _, _, tensors, scalars in module.TABLES.kernels:
            start = time.perf_counter()
            given = [torch.empty(0, dtype=getattr(torch, dtype[t]), device="meta") for t in tensors]
            with under_way(f"compiling {name} for {arch}"):
                for pair in heads:
                    for sizes, flags in _variants(module, name, pair):
                        module._launcher(name, 1, sizes, flags, _Device())(given, torch.int32, [0.5] * len(scalars))
            size = sum(module._launcher.kernels[name].variants.values())
            yield f"{name} {arch}: {time.perf_counter() - start:.1f} s, {size} bytes, in Triton's cache"


def _variants(module: Any, name: str, heads: tuple[int, int]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """The sizes and integers of launches, one for each variant that a kernel is compiled for. Apart from head counts any sizes
    will do, since kernels are not specialised on them."""
    for ints in product(*((0, 1) if n.startswith("has_") else (16,) for n in module.TABLES.ints[name])):
        yield (2, 32, 0, *heads, 2, *([] if module.TABLES.part_cost is None else [2, 16])), list(ints)


def fresh(path: Path) -> Any:
    """The module at `path`, imported anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
