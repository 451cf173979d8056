"""Makes native launchers: C++ functions that make a whole settled call, without Python between its kernels.

native_launcher.cc compares the options and tensors with those of the call that it was made for, allocates results and workspaces,
and launches.
"""
from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import platform
import subprocess
import sysconfig
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache as once
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...host.plan import Plan
from ...targets import machine
from .. import cache
from .arguments import FINAL, INITIAL, RAW_INPUTS

SOURCE = Path(__file__).with_name("native_launcher.cc")
HEADERS = SOURCE.with_suffix(".h"), SOURCE.with_name("native_driver.h"), SOURCE.with_name("native_keywords.h")
#: The origin of a kernel's tensor, as in native_launcher.cc: dense memory at an argument's address, a workspace, or a constant.
ARGUMENT, WORKSPACE, FIXED = range(3)
#: CUDA's driver, which starts kernels.
DRIVER = "libcuda.so.1"


class Asked(NamedTuple):
    """What a launcher compares or looks at besides the kinds of tensors.

    options, decode: those of the call. same: whether initial and final state are one tensor. written: indices of arguments that
    the call writes; where they share memory with another the launcher declines. scale: for calls without one. look: called with
    all tensors where some are given after those of the kernels; it raises what is wrong with them. states: indices of initial
    and final state. inputs: of so many first arguments none may want gradients.
    """

    options: tuple[Any, ...]
    decode: bool
    same: bool
    written: tuple[int, ...]
    scale: float
    look: Callable[[tuple[Any, ...]], None]
    states: tuple[int, int] = (INITIAL, FINAL)
    inputs: int = RAW_INPUTS + 1


@once
def file_name() -> str:
    """The library's file name. It changes with the source, the versions of torch and Python, and the machine's architecture."""
    texts = [path.read_bytes() for path in (SOURCE, *HEADERS)]
    machines = torch.__version__, str(sysconfig.get_config_var("SOABI")), platform.machine()
    return f"native_launcher_{cache.digest(*texts, *machines)}.so"


def compile_to(path: Path, source: Path = SOURCE) -> None:
    """Compile an extension against torch; RuntimeError with what the compiler said, or where there is none."""
    compiler = machine.cxx()
    if not compiler:
        raise RuntimeError(f"{source.name}: no C++ compiler; install g++, or set CXX")
    home = Path(torch.__file__).parent
    libraries = [f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10", "-ldl"]
    done = subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{home / 'include'}",
                           f"-I{sysconfig.get_path('include')}", str(source), "-o", str(path), *libraries],
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name}: {done.stderr}")


def in_cache() -> Path:
    """The library in the package's cache, compiled unless it is there."""
    return cache.made(cache.folder() / "native_launcher" / file_name(), compile_to)


def imported(path: Path) -> Any:
    """The extension module in this file."""
    loader = importlib.machinery.ExtensionFileLoader("native_launcher", str(path))
    spec = importlib.util.spec_from_loader("native_launcher", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class NotReady(Exception):
    """The library is being compiled. The call takes the way through Python, and a later one asks again."""


_compiling: dict[Path, threading.Thread] = {}


def _compile(path: Path) -> None:
    """Compile the library. `_library` says what is wrong, in the thread of a call."""
    with contextlib.suppress(OSError, RuntimeError):
        cache.made(path, compile_to)


def ready(ahead: Path, wait: bool = False) -> bool:
    """Whether no call has to wait for the compiler. If not, a thread compiles meanwhile, since that takes seconds.

    wait: wait for it here, for tests."""
    path = cache.folder() / "native_launcher" / file_name()
    if ahead.exists() or path.exists() or not machine.cxx():
        return True
    if path not in _compiling:
        _compiling[path] = threading.Thread(target=_compile, args=(path,), name="gdn_codegen compiles its launcher", daemon=True)
        _compiling[path].start()
    if wait:
        _compiling[path].join()
    return not _compiling[path].is_alive()


#: Makes functions that translate keywords (known_keywords.py), once a library is loaded.
keywords: Callable[[dict[str, Any]], Callable[..., Any]] | None = None


@lru_cache(maxsize=64)
def _library(ahead: Path) -> Any:
    """The function that makes launchers, or None.

    If kernels were compiled ahead of time, nothing is compiled here: the library is beside them, or is not used."""
    global keywords
    path = ahead / file_name()
    if not path.exists():
        if ahead.exists():
            return None
        try:
            path = in_cache()
        except (OSError, RuntimeError) as e:
            warnings.warn(f"calls take the slower way through Python: {e}", RuntimeWarning, stacklevel=2)
            return None
    library = imported(path)
    keywords = library.keywords
    return library.make


@once
def _ffi() -> tuple[int, int, int]:
    """Addresses of the functions of TVM's FFI that the launcher calls; zeros without the package."""
    if importlib.util.find_spec("tvm_ffi") is None:
        return 0, 0, 0
    from tvm_ffi import libinfo
    library = ctypes.CDLL(libinfo.find_libtvm_ffi())
    names = "TVMFFIFunctionCall", "TVMFFIEnvSetStream", "TVMFFIObjectDecRef"
    a, b, c = (ctypes.cast(getattr(library, n), ctypes.c_void_p).value or 0 for n in names)
    return a, b, c


@once
def _drives(driver: str) -> bool:
    """Whether CUDA's driver is here, for launches that call it."""
    try:
        ctypes.CDLL(driver)
    except OSError:
        return False
    return True


def is_nvidia(device: torch.device) -> bool:
    """Whether a device is one of CUDA's driver, which is here (native_driver.h)."""
    return device.type == "cuda" and not torch.version.hip and _drives(DRIVER)


def row(compiled: tuple[Any, ...], slots: Sequence[int]) -> tuple[Any, ...]:
    """A launch for native_launcher.cc: its form, the kernel's address, the grid, its parameters, and what keeps the kernel.

    compiled: as Host's launchers give it: the kernel, (instances, threads, bytes of shared memory) or None for a function of
    TVM's FFI, and its parameters, of which tensors are given by their place in `slots`. Triton's kernels take two more for
    scratch memory, which these do not use.
    """
    kernel, grid, parameters, held = compiled
    given = [(what, slots[x] if what == "t" else int(x)) for what, x in parameters]
    if grid is None:
        return "ffi", kernel.__chandle__(), (0, 0, 0), given, held
    return "cuda", kernel, grid, [*given, ("i", 0), ("i", 0)], held


def launcher(ahead: Path, asked: Asked, arguments: Sequence[Tensor | None], slots: Sequence[tuple[Any, ...]],
             launches: Sequence[tuple[Any, ...]], results: Sequence[int], made: Sequence[Tensor] = (), poison: bool = False,
             rows: Callable[[], Tensor] | None = None) -> Callable[..., Any] | None:
    """A function of such arguments as a tuple, options, scale and decode: the results of the call. None, and nothing is launched,
    on other options, or arguments of other kinds (shape, strides, dtype, device, 16-byte alignment, None or not). The function
    is None where it cannot be made.

    slots: (ARGUMENT, index, shape that kernels see), (WORKSPACE, tensor of its shape) or (FIXED, tensor). launches: what `row`
    gives. made: tensors like those that the call makes, whose indices follow those of arguments; rows: makes the tensor after
    them. results: indices, -1 for None. ahead: the folder of kernels that were compiled ahead.
    """
    make, exchange = _library(ahead), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if make is None or exchange is None or (any(how == "cuda" for how, *_ in launches) and not _drives(DRIVER)):
        return None
    first = arguments[0]
    assert first is not None
    initial, final = asked.states
    run: Callable[..., Any] = make(dict(
        asked._asdict(), initial=initial if len(arguments) > final else -1, final=final, arguments=list(arguments),
        made=list(made), poison=poison, rows=rows, torch=exchange, ffi=_ffi(),
        driver=DRIVER if _drives(DRIVER) else "", nvidia=is_nvidia(first.device),
        slots=list(slots), launches=list(launches), results=list(results)))
    return run


def kernels_ahead(m: Any) -> Path:
    """The folder of kernels of module `m` that were compiled ahead. It need not be there."""
    return Path(m.__file__).with_suffix(".kernels")


def call_launcher(plan: Plan, ahead: Path, asked: Asked, arguments: Sequence[Tensor | None], place: Sequence[int], ends: int
                  ) -> Callable[..., Any] | None:
    """The call of a plan as one function, as `launcher` gives it.
    None where it cannot be one: some tensor must be copied or looked at, or kernels start only from Python. NotReady while the
    launcher is being compiled.

    place: where what the module was given (states, buffers and so on) is among arguments; ends: where cu_seqlens is; ahead: the
    folder of kernels that were compiled ahead.
    """
    native, host = plan.native, plan.host
    if native is None:
        return None
    made_here = ("result", "workspace") if host.poison else ("result",)
    made = [x for kind, x, *_ in native.sources if kind in made_here]
    slots: list[tuple[Any, ...]] = []
    memory: list[int] = []  # of each of the module's tensors, which of ours it is
    for kind, *rest in native.sources:
        if kind == "given" or kind in made_here:
            memory.append(place[rest[0]] if kind == "given" else len(arguments) + sum(n >= len(arguments) for n in memory))
            slots.append((ARGUMENT, memory[-1], rest[1] if kind != "workspace" else tuple(rest[0].shape)))
        else:
            memory.append(-1)
            slots.append((WORKSPACE if kind == "workspace" else FIXED, rest[0]))
    given = arguments[ends]
    slots.append((ARGUMENT, len(arguments) + len(made), (plan.sequences + 1,)) if given is None else
                 (ARGUMENT, ends, tuple(given.shape)))
    launches = []
    for go, tensors, numbers in native.launches:
        compiled = go.compiled(len(tensors), len(numbers)) if hasattr(go, "compiled") else None
        if compiled is None:
            return None
        launches.append(row(compiled, (*tensors, len(slots) - 1)))
    if not ready(ahead):
        raise NotReady
    results = [-1 if n is None else n for n in host.results(memory, plan.wanted)]
    return launcher(ahead, asked, arguments, slots, launches, results, made, host.poison, native.rows if given is None else None)
