"""Makes native launchers: C++ functions that start all kernels of a settled call, without Python between the kernels.

native_launcher.cc compares the arguments with the kind of call that it was made for, allocates workspaces, and launches.
"""
from __future__ import annotations

import itertools
import operator
import platform
import subprocess
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...host.plan import Plan
from ...host.tensors import _new
from ...targets import machine
from .. import cache

SOURCE = Path(__file__).with_name("native_launcher.cc")
#: The origin of a kernel's tensor, as in native_launcher.cc: dense memory at an argument's address, a workspace, or a constant.
ARGUMENT, WORKSPACE, FIXED = range(3)


def file_name() -> str:
    """The library's file name. It changes with the source, the version of TVM's FFI and the machine's architecture."""
    import tvm_ffi
    return f"native_launcher_{cache.digest(SOURCE.read_bytes(), tvm_ffi.__version__, platform.machine())}.so"


def compile_to(path: Path, source: Path = SOURCE) -> None:
    """Compile a source that exports functions of TVM's FFI; RuntimeError with what the compiler said, or where there is none."""
    from tvm_ffi import libinfo
    compiler = machine.cxx()
    if not compiler:
        raise RuntimeError(f"{source.name}: no C++ compiler; install g++, or set CXX")
    done = subprocess.run([compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{libinfo.find_include_path()}",
                           f"-I{libinfo.find_dlpack_include_path()}", str(source), "-o", str(path), libinfo.find_libtvm_ffi()],
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name}: {done.stderr}")


@lru_cache(maxsize=64)
def _library(ahead: Path) -> Any:
    """The function that makes launchers, or None.

    If kernels were compiled ahead of time, nothing is compiled here: the library is beside them, or is not used."""
    import tvm_ffi
    path = ahead / file_name()
    if not path.exists():
        if ahead.exists():
            return None
        path = cache.folder() / "native_launcher" / path.name
        try:
            cache.made(path, compile_to)
        except (OSError, RuntimeError) as e:
            warnings.warn(f"calls take the slower way through Python: {e}", RuntimeWarning, stacklevel=2)
            return None
    make = tvm_ffi.load_module(str(path)).native_launcher
    x = torch.empty(1)
    try:
        make((x,), ((WORKSPACE, x),), ())(x)
    except RuntimeError:  # this torch gives TVM's FFI no memory: before 2.10 that takes torch-c-dlpack-ext
        return None
    return make


def launcher(ahead: Path, arguments: Sequence[Tensor | None], slots: Sequence[tuple[Any, ...]],
          launches: Sequence[tuple[Any, ...]]) -> Callable[..., bool] | None:
    """A function of such arguments, and of numbers after them, that launches kernels on them and says whether it did: not on
    arguments of other kinds (shape, strides, dtype, device, 16-byte alignment, None or not).

    slots: (ARGUMENT, index, shape that kernels see), (WORKSPACE, tensor of its shape) or (FIXED, tensor). launches: kernel, its
    slots, its whole numbers, indices of numbers. ahead: the folder of kernels that were compiled ahead.
    """
    make = _library(ahead)
    made: Callable[..., bool] | None = make and make(arguments, slots, launches)
    return made


def kernels_ahead(m: Any) -> Path:
    """The folder of kernels of module `m` that were compiled ahead. It need not be there."""
    return Path(m.__file__).with_suffix(".kernels")


def call_launcher(plan: Plan, ahead: Path, arguments: Sequence[Tensor | None], place: Sequence[int], ends: int
                  ) -> Callable[..., tuple[Any, ...] | None] | None:
    """The call of a plan as a function of numbers and of arguments such as these: results, or None where they are of other kinds.
    None where it cannot be one: some tensor must be copied or looked at, or kernels start only from Python.

    place: where what the module was given (states, buffers and so on) is among arguments; ends: where cu_seqlens is; ahead: the
    folder of kernels that were compiled ahead.
    """
    native, host = plan.native, plan.host
    if native is None or not all(hasattr(launch, "compiled") for launch, *_ in native.launches):
        return None
    new: Callable[[Tensor], Tensor] = (lambda like: _new(like).fill_(float("nan"))) if host.poison else _new
    made_here = ("result", "workspace") if host.poison else ("result",)
    first, ends_given = arguments[0], arguments[ends] is not None
    assert first is not None
    kin = [x for kind, *_, x in native.sources if kind in made_here]
    # then None, for results that the call does not want, and the ends of equal rows if cu_seqlens is not given
    filled: list[Any] = [*arguments, *map(new, kin), None]
    if not ends_given:  # their kind alone is looked at, and filling them would be a kernel of a graph that is being captured
        filled.append(torch.empty(first.shape[0] + 1, dtype=torch.int32, device=first.device))
    ends = ends if ends_given else len(filled) - 1
    slots: list[tuple[Any, ...]] = []
    memory: list[int] = []  # of each of the module's tensors, which of ours it is
    made = itertools.count(len(arguments))
    for kind, *rest in native.sources:
        if kind == "given" or kind in made_here:
            memory.append(place[rest[0]] if kind == "given" else next(made))
            slots.append((ARGUMENT, memory[-1], rest[1] if kind == "given" else tuple(rest[0].shape)))
        else:
            memory.append(-1)
            slots.append((WORKSPACE if kind == "workspace" else FIXED, rest[0]))
    slots.append((ARGUMENT, ends, tuple(filled[ends].shape)))
    runs = [(kernel, (*tensors, len(slots) - 1), fixed, used)
            for (kernel, fixed), tensors, used in ((go.compiled, *rest) for go, *rest in native.launches)]
    launch = launcher(ahead, filled, slots, runs)
    if launch is None:
        return None
    pick = operator.itemgetter(*[len(arguments) + len(kin) if n is None else n for n in host.results(memory, plan.wanted)])
    device, rows = first.device, native.rows
    current = torch._C._cuda_getDevice if device.type == "cuda" else lambda: device.index

    def run(arguments: tuple[Any, ...], numbers: tuple[float, ...]) -> tuple[Any, ...] | None:
        if current() != device.index:
            return None
        all_of = (*arguments, *map(new, kin), None)
        try:
            done = launch(*all_of, *numbers) if ends_given else launch(*all_of, rows(), *numbers)
        except RuntimeError:  # a tensor without memory, or none left: the way through Python says so better
            return None
        results: tuple[Any, ...] | None = pick(all_of) if done else None
        return results

    return run
