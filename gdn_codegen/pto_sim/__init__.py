"""The bundled PTO simulator. It compiles emitted PTO C++ for this machine's CPU, and checks each instruction as it runs.

`README.md` in this folder lists what it accepts and refuses.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..runtime import cache
from ..targets import machine

INPUT, OUTPUT, WORKSPACE, BOTH, DIVIDED = 0, 1, 2, 3, 4
#: Added to the kind of a region, which no argument of the kernel points to.
REGION = 8
MESSAGE_BYTES = 4096
UNITS = ("S", "S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
DTYPES = ("float", "half", "bfloat16_t", "int32", "uint32", "int16", "uint16", "int8", "uint8", "int64", "uint64")


class PtoSimError(RuntimeError):
    """The error that stopped a run. `category` is the word in brackets in its message: `race`, `deadlock`, `capacity`..."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        _, _, rest = message.partition("pto_sim [")
        self.category = rest.partition("]")[0] if rest else ""


def include_dir() -> Path:
    """The include folder of `<pto/pto-inst.hpp>`."""
    return Path(__file__).parent / "include"


def source_dir() -> Path:
    """The folder of the simulator's C++ sources."""
    return Path(__file__).parent / "src"


def driver_text(source_name: str, names: Sequence[str]) -> str:
    """The translation unit that `compile_command` compiles, as text, for builds that need it in a file."""
    kernels = " ".join(f"PTO_SIM_KERNEL({name})" for name in names)
    return f'#define PTO_SIM_SOURCE "{source_name}"\n#define PTO_SIM_KERNELS {kernels}\n' + (
        source_dir() / "driver.cpp"
    ).read_text()


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first one on PATH. PtoSimError if there is none."""
    found = machine.cxx()
    if not found:
        raise PtoSimError("pto_sim [compiler] no C++ compiler: install g++ 12 or later, or set CXX")
    return found


def compile_command(source: Path, names: Sequence[str], output: Path, opt: str = "-O0",
                    runtime: Path | None = None, cxx: str | None = None) -> list[str]:
    """The command that compiles a shared library with a function `NAME_sim` for each kernel NAME of `source`.

    `runtime` is the object file of `runtime_object`. Without it, the command also compiles the engine, which takes seconds more.
    opt: the kernel's own code only calls the engine. Optimising it takes three times as long, and the simulator is not faster.
    """
    kernels = " ".join(f"PTO_SIM_KERNEL({name})" for name in names)
    return [
        cxx or compiler(), "-std=c++17", opt, "-shared", "-fPIC", "-fvisibility=hidden", "-pthread",
        f"-I{include_dir()}", f'-DPTO_SIM_SOURCE="{Path(source).resolve()}"', f"-DPTO_SIM_KERNELS={kernels}",
        str(source_dir() / "driver.cpp"), str(runtime or source_dir() / "pto_sim.cpp"), "-o", str(output),
    ]


def runtime_object(folder: Path | None = None, cxx: str | None = None) -> Path:
    """The object file of the engine. It is compiled once for each version of its sources and each compiler."""
    cxx = cxx or compiler()
    digest = hashlib.sha256(cxx.encode())
    for part in sorted([*source_dir().glob("*"), *include_dir().rglob("*.hpp")]):
        digest.update(part.read_bytes())
    command = [cxx, "-std=c++17", "-O3", "-c", "-fPIC", "-fvisibility=hidden", "-pthread", f"-I{include_dir()}",
               str(source_dir() / "pto_sim.cpp"), "-o"]
    return cache.made((folder or cache.folder() / "pto") / f"pto_sim-{digest.hexdigest()[:16]}.o",
                      lambda to: _compile([*command, str(to)]))


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PtoSimError(f"pto_sim [compile] {' '.join(command)}\n{done.stderr}")


def build(source: Path, names: Sequence[str], output: Path, opt: str = "-O0", cxx: str | None = None) -> Path:
    """Compile `source` into the shared library `output`."""
    _compile(compile_command(source, names, output, opt, runtime_object(cxx=cxx), cxx))
    return output


def load(library: Path) -> ctypes.CDLL:
    """Load a shared library that `compile_command` or `build` made."""
    return ctypes.CDLL(str(library))


def launch(lib: ctypes.CDLL, name: str, block_dim: int, tensors: Sequence[torch.Tensor], kinds: Sequence[int],
           ints: Sequence[int] = (), floats: Sequence[float] = (), regions: Sequence[tuple[torch.Tensor, int]] = (),
           **options: int) -> None:
    """Run the kernel `name` on CPU tensors. PtoSimError describes an action that is an error on hardware.

    kinds: INPUT (a write is an error), OUTPUT or WORKSPACE (a read of bytes that the kernel did not write is an error; a
    workspace is filled with poison first), BOTH, or DIVIDED: no access is allowed but to `regions`.
    regions: (view of a part of a DIVIDED tensor, kind). Each is memory of its own, with bounds of its own.
    Options: `concurrent=0` runs the blocks one after another, for kernels without device-wide barriers. `v_after_v` reports
    dependences between vector instructions that lack a barrier: 2 all of them, 1 all except write after read, 0 none. `order=0`
    reports no missing wait and no flag that is left, for the trace of a kernel from elsewhere. `shuffle`
    is a seed for another order of the cores. `trace=1` records instructions for `trace`. `only=B` runs only block B, for its
    trace: data of other blocks stays zero, and barriers of all blocks include only this one.
    """
    if _recordings:
        recording = _recordings[-1]
        block_dim, options = recording.block_dim, {**options, "trace": 1, "only": 0}
    if len(tensors) != len(kinds):
        raise PtoSimError(f"pto_sim [arguments] {len(tensors)} tensors, {len(kinds)} kinds")
    for i, t in enumerate(tensors):
        if t.device.type != "cpu":
            raise PtoSimError(f"pto_sim [arguments] tensor {i} is not a CPU tensor")
    for key, value in {**_defaults(), **options}.items():
        if lib.pto_sim_option(key.encode(), ctypes.c_int64(value)):
            raise PtoSimError(f"pto_sim [arguments] no option {key!r}")
    tensors, kinds = [*tensors, *(x for x, _ in regions)], [*kinds, *(REGION | kind for _, kind in regions)]
    count = len(tensors)
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    failed = getattr(lib, f"{name}_sim")(
        ctypes.c_int(block_dim),
        (ctypes.c_void_p * count)(*[t.data_ptr() for t in tensors]),
        (ctypes.c_int64 * count)(*map(_span, tensors)),
        (ctypes.c_int * count)(*kinds), ctypes.c_int(count),
        (ctypes.c_int64 * len(ints))(*ints), ctypes.c_int(len(ints)),
        (ctypes.c_double * len(floats))(*floats), ctypes.c_int(len(floats)),
        message, ctypes.c_int(MESSAGE_BYTES))
    if failed:
        raise PtoSimError(message.value.decode(errors="replace"))
    if _recordings:
        _recordings[-1].launches.append((name, trace(lib)))


def _span(t: torch.Tensor) -> int:
    """The size of a tensor in bytes. For a view that is not contiguous: from its first element to the end of the storage."""
    if t.is_contiguous():
        return t.numel() * t.element_size()
    return int(t.untyped_storage().nbytes()) - int(t.storage_offset()) * t.element_size()


@dataclass
class Recording:
    """The launches that `record` records. launches: (name of the kernel, steps of block 0). block_dim: the number of blocks."""

    block_dim: int
    launches: list[tuple[str, list[Step]]] = field(default_factory=list)


_recordings: list[Recording] = []


@contextmanager
def record(block_dim: int) -> Iterator[Recording]:
    """In this context, a launch runs only block 0 of `block_dim` blocks and records its trace. Its results must not be used."""
    _recordings.append(Recording(block_dim))
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()


def _defaults() -> dict[str, int]:
    return {"concurrent": 1, "v_after_v": int(os.environ.get("PTO_SIM_V_AFTER_V", "2")), "order": 1, "trace": 0, "only": -1,
            "shuffle": int(os.environ.get("PTO_SIM_SHUFFLE", "0")),
            "timeout_s": int(os.environ.get("PTO_SIM_TIMEOUT_S", "300"))}


class _Record(ctypes.Structure):
    _fields_ = [(f, ctypes.c_int32) for f in ("core", "unit", "rows", "cols", "dtype", "line", "a", "b", "c")] + [
        ("name", ctypes.c_char * 24)]


@dataclass(frozen=True)
class Step:
    """An instruction that a traced run issued.

    extra: three numbers that depend on the instruction. A flag: (source pipe, target pipe, id), with pipes as indices into
    UNITS. A signal between cores: (pipe, mode, id). A wait between cores: the id is the last number. A barrier: the pipe, or -1
    for all pipes. Other instructions use the first number only. A matmul: k. TEXTRACT, and TMOV to L0: 1 if the target is L0B.
    TROWEXPAND and its variants: 1 if the column operand is already broadcast, or the result is one broadcast. TCVT: bytes of a
    source element.
    """

    block: int
    core: str
    pipe: str
    name: str
    rows: int
    cols: int
    dtype: str
    line: int
    extra: tuple[int, int, int]


def trace(lib: ctypes.CDLL) -> list[Step]:
    """The instructions of the last launch with `trace=1`, in the order of issue."""
    lib.pto_sim_trace_length.restype = ctypes.c_int64
    lib.pto_sim_trace_records.restype = ctypes.POINTER(_Record)
    records: Any = lib.pto_sim_trace_records()
    cores = ("cube", "vector 0", "vector 1")
    return [Step(r.core // 3, cores[r.core % 3], UNITS[r.unit], r.name.decode(), r.rows, r.cols, DTYPES[r.dtype],
                 r.line, (r.a, r.b, r.c))
            for r in (records[i] for i in range(lib.pto_sim_trace_length()))]
