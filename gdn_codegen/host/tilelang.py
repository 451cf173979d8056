"""The part of a generated TileLang module that compiles and launches its kernels.

Below the line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import tilelang
import torch
import tvm_ffi
from tilelang.contrib import nvcc

from .tables import Tables
from .tensors import _dense, _fail, _is_apart, _steps

# --- copied from here on ---
# all generated modules of a process share it: where two threads parse Python, CPython 3.11 now and then raises SystemError, "AST
# constructor recursion depth mismatch"
_tracing = vars(tilelang).setdefault("_one_trace_at_a_time", threading.Lock())


def _fits_units(t: Tables, name: str, x: torch.Tensor) -> bool:
    """True if kernels can read a tensor with dense rows without a copy: its strides are multiples of its unit, no two indices
    share an element, and rows of tiles are aligned to 16 bytes. The C backend has no bfloat16."""
    if x.ndim == 4 and x.data_ptr() % 16:
        return False
    if 0 in x.stride() or not _is_apart(x) or any(far % t.units[name] for far in _steps(x.stride(), t.layout)):
        return False
    return x.dtype != torch.bfloat16 or x.is_cuda


def _as_dense(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the address and shape of `x`, and dense strides: kernels get strides as separate arguments."""
    dense = _dense(x.shape)
    return x if x.stride() == dense else x.as_strided(x.shape, dense)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`; if it has no tokens, a tensor of the same kind with one token."""
    return x if x.numel() or x.shape[0] == 0 else x.new_empty([max(1, d) for d in x.shape])


def _cpu_flags() -> list[str]:
    """Flags of gcc. The last one identifies the kind of processor, so that different machines can share TileLang's disk cache."""
    features = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            features = next((line for line in f if line.startswith(("flags", "Features"))), features)
    kind = hashlib.sha256(features.encode()).hexdigest()[:8]
    return ["-O2", "-ftree-vectorize", "-march=native", "-fno-math-errno", "-fno-trapping-math", f"-DPROCESSOR_{kind}"]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_data(run: Any, fixed: Sequence[int], tensors: int, numbers: int) -> tuple[Any, ...]:
    """A launch as data, for the native launcher: the function, no grid, its parameters, and what keeps it.

    Parameters: tensors and cu_seqlens ("t", place), whole numbers ("i", number), numbers ("d", place)."""
    given = [*(("t", n) for n in range(tensors + 1)), *(("i", x) for x in fixed), *(("d", n) for n in range(numbers))]
    return run, None, given, run


class TileLangLauncher:
    """Compiles and launches the kernels of one module.

    file: the path of the module. kernels: name -> a function from the namespace of device functions to the kernel's program.
    functions: these namespaces, for "cuda" and, if kernels run on a CPU, "cpu". stored: for each kernel, the tensors that it
    stores to. groups: kernels with warp groups, whose text has all barriers. arch: the one architecture that the module is for;
    "" if its text runs on any GPU.

    passes: options of TVM's passes, by kernel.
    """

    #: The emitted text keeps every access in bounds.
    PASSES: ClassVar[dict[str, bool]] = {"tl.disable_safe_memory_legalize": True, "tl.enable_fast_math": True}

    def __init__(self, tables: Tables, file: str, kernels: Mapping[str, Callable[[Any], Any]], functions: Mapping[str, Any],
                 stored: Mapping[str, Collection[str]], groups: Collection[str] = (), arch: str = "") -> None:
        self.tables, self.file, self.kernels, self.functions, self.stored = tables, file, kernels, functions, stored
        self.arch = arch
        self.passes = {n: {**self.PASSES, **({"tl.disable_thread_storage_sync": True} if n in groups else {})} for n in kernels}
        self.compiling = threading.Lock()
        self.for_cpu = functools.cache(self._compile_for_cpu)
        self.loaded = functools.cache(self._load)
        self.together = functools.cache(self._together)

    def __call__(self, name: str, instances: int, sizes: Sequence[int], ints: Sequence[int], device: torch.device
                 ) -> Callable[[Sequence[Any], Any, Sequence[float]], None]:
        """A function that launches the kernel on its tensors, cu_seqlens and numbers."""
        if self.arch and device.type != "cuda":
            _fail(self.tables.inputs[0][0], f"device {device}", f"a CUDA device (this module was built for {self.arch})")
        fixed = (sizes[2], *(sizes[6:] if self.tables.kernel(name)[1] == "parts" or self.tables.pipelined else ()), *ints)
        with self.compiling:
            made = self.ready(name, device)
        if device.type == "cpu":
            return lambda tensors, cu, scalars: self.run_on_cpu(name, tensors, (cu, *fixed, *scalars))
        run = made.main  # without TileLang's wrapper, which costs time
        if self.arch and not sizes[1]:  # a copy of a tile describes the whole tensor, which has no empty dim
            return lambda tensors, cu, scalars: run(*map(_with_rows, tensors), cu, *fixed, *scalars)

        def launch(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            run(*tensors, cu, *fixed, *scalars)

        def launch_strided(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            run(*map(_as_dense, tensors), cu, *fixed, *scalars)

        chosen = launch_strided if self.tables.strided else launch
        chosen.compiled = functools.partial(_as_data, run, fixed)  # type: ignore[attr-defined]
        return chosen

    def ready(self, name: str, device: torch.device) -> Any:
        """The kernel, compiled for the device."""
        if device.type == "cpu":
            return self.for_cpu(name)
        with torch.cuda.device(device):
            return self.loaded(name, self.arch or "sm_" + nvcc.get_target_arch(torch.cuda.get_device_capability(device)))

    def _together(self, names: tuple[str, ...], device: torch.device) -> None:
        """Compile the kernels of a call side by side, of which each would wait for the one before. TileLang holds its state for
        each thread, runs its passes without Python's lock, and nvcc and gcc are processes of their own. Raises the error of the
        first of `names` that has one. What is then under way ends by itself."""
        threads = min(len(names), _cores())
        if threads < 2 or (self.arch and device.type != "cuda"):
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # other threads keep away from the device
            return
        with self.compiling:
            pool = ThreadPoolExecutor(threads)
            try:
                for made in [pool.submit(self.ready, name, device) for name in names]:
                    made.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def program(self, name: str, cpu: bool = False) -> Any:
        """The kernel's program for TileLang. One thread of the process traces at a time."""
        with _tracing:
            return self.kernels[name](self.functions["cpu" if cpu else "cuda"])

    def library(self, name: str, arch: str) -> str:
        """The path of a kernel compiled ahead for an architecture (gdn_codegen build --compile), in a folder beside this module.
        The name has a hash of the module's text, the compilers' versions and the kind of machine."""
        with open(self.file, "rb") as f:
            made = hashlib.sha256(f.read() + f"{tilelang.__version__} {tvm_ffi.__version__} {platform.machine()}".encode())
        return os.path.join(os.path.splitext(self.file)[0] + ".kernels", f"{name}_{arch}_{made.hexdigest()[:16]}.so")

    def compiled(self, name: str, arch: str) -> Any:
        """The kernel, compiled by nvcc. TileLang keeps it on disk, in TILELANG_CACHE_DIR, for other processes too."""
        target = {"kind": "cuda", "arch": arch}
        with self.locked(name, arch), tilelang.tvm.target.Target(target):  # some device functions ask for it
            return tilelang.compile(self.program(name), target=target, pass_configs=self.passes[name])

    def run_on_cpu(self, name: str, tensors: Sequence[Any], rest: Sequence[Any]) -> None:
        """Run a kernel compiled for the CPU. Tensors in bfloat16, which the C backend does not have, are widened to float32."""
        tensors = [*map(_as_dense, tensors)] if self.tables.strided else tensors
        wide = [x.float() if x.dtype == torch.bfloat16 else x for x in tensors]
        self.for_cpu(name)(*wide, *rest)
        for n, x, y in zip(self.tables.kernel(name)[3], tensors, wide, strict=True):
            if y is not x and n in self.stored[name]:
                x.copy_(y)

    @contextlib.contextmanager
    def locked(self, name: str, arch: str) -> Iterator[None]:
        """Hold a lock, so that one process compiles and the others find the result in TileLang's cache. Without that cache, or
        without file locks, each process compiles."""
        folder = os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache")
        with contextlib.ExitStack() as held:
            if os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() not in ("1", "true", "yes", "on"):
                with contextlib.suppress(ImportError, OSError):
                    import fcntl
                    os.makedirs(folder, exist_ok=True)
                    lock = os.path.join(folder, f".{os.path.basename(self.library(name, arch))}.lock")
                    f = held.enter_context(open(lock, "a"))
                    fcntl.flock(f, fcntl.LOCK_EX)  # a killed holder frees it
            yield

    def _compile_for_cpu(self, name: str) -> Any:
        """The kernel, compiled by gcc. TileLang keeps it on disk, in TILELANG_CACHE_DIR, for other processes too."""
        with self.locked(name, "cpu"), tilelang.tvm.target.Target("c"):
            return tilelang.compile(self.program(name, cpu=True), target="c", target_host="c", execution_backend="cython",
                                    compile_flags=_cpu_flags(), pass_configs=self.passes[name])

    def _load(self, name: str, arch: str) -> Any:
        """The object with the compiled function: a library compiled ahead, a new executable, or a module of TileLang's cache."""
        ahead = self.library(name, arch)
        if os.path.exists(ahead):
            try:
                return tilelang.tvm.runtime.load_module(ahead)
            except Exception as e:
                warnings.warn(f"{ahead} cannot be loaded, so the kernel is compiled again: {e}", RuntimeWarning, stacklevel=2)
        made = self.compiled(name, arch).adapter.get_exportable_executable()
        return made.jit() if hasattr(made, "jit") else made
