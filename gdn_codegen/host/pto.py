"""The part of a generated PTO module that compiles and launches its kernels.

Below the line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .artefact import _artefact
from .tables import Tables
from .tensors import _FLOATS, _steps


# --- copied from here on ---
def compile_command(source: str | Path, library: str | Path) -> list[str]:
    """The command that builds the kernels for an Ascend A2 or A3. Raises RuntimeError if CANN or PTO-ISA is not set up."""
    toolkit = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    headers = os.environ.get("PTO_LIB_PATH")
    if not toolkit or not headers:
        raise RuntimeError("NPU tensors need CANN and PTO-ISA: set ASCEND_TOOLKIT_HOME (CANN's set_env.sh does) and "
                           "PTO_LIB_PATH to a checkout of PTO-ISA")
    driver = os.environ.get("ASCEND_DRIVER_PATH", "/usr/local/Ascend/driver")
    folders = [f"{headers}/include", f"{toolkit}/include", f"{toolkit}/pkg_inc", f"{toolkit}/pkg_inc/runtime",
               f"{toolkit}/pkg_inc/profiling", f"{driver}/kernel/inc"]
    tuning = ["-cce-aicore-stack-size=0x8000", "-cce-aicore-function-stack-size=0x8000",
              "-cce-aicore-record-overflow=true", "-cce-aicore-dcci-insert-for-scalar=false"]
    return ["bisheng", "-fPIC", "-shared", "-xcce", "-DMEMORY_BASE", "-O2", "-std=gnu++17", "--cce-aicore-arch=dav-c220",
            *(word for t in tuning for word in ("-mllvm", t)), *(f"-I{f}" for f in folders), str(source), "-o", str(library)]


def _compile_for_npu(source: Path, library: Path) -> None:
    try:
        done = subprocess.run(compile_command(source, library), capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("NPU tensors need bisheng, the compiler of the CANN toolkit, on PATH") from None
    if done.returncode:
        raise RuntimeError(f"bisheng failed:\n{done.stderr}")


def _mask(fill: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A constant tile on the CPU. fill: kind[:size], value kept, value elsewhere. Or to_middle:size of n/m,
    or from_middle:size, where m is 1 for running sums alone and n is 0 for them, 1 for sums before each token."""
    kind, kept, other = fill.split()
    kind, _, digits = kind.partition(":")
    size = int(digits or 1)
    rows, columns = (torch.arange(n, device="cpu") for n in shape)
    i, j = rows[:, None], columns[None, :]
    if kept == "of":
        own, middle = (i == j).float(), (j == i // (2 * size) * (2 * size) + size - 1).float()
        second, first = {"0/1": (own - middle, middle - own), "0/2": (-middle, middle - own), "1/2": (own, 0 * own)}[other]
        return torch.where((i // size % 2 == 1) | (kind == "from_middle"), second, first).to(_FLOATS[dtype])
    i = i % len(columns) if len(rows) > len(columns) else i  # squares one below the other
    keep = {"lower": i >= j, "strictly_lower": i > j, "eye": i == j, "diagonal_blocks": i // size == j // size,
            "pairs": (i // (2 * size) == j // (2 * size)) & (i // size > j // size)}[kind]
    return torch.where(keep, float(kept), float(other)).to(_FLOATS[dtype])


def _core_groups(device: torch.device) -> int:
    """The number of cube cores of the NPU; 4 in the simulator."""
    if device.type == "cpu":
        return 4
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return getattr(npu.get_device_properties(device), "cube_core_num", 24)


class PtoLauncher:
    """Launches the kernels of one source: on an Ascend NPU, and for CPU tensors in the simulator of gdn_codegen.

    symbols: for each kernel, its C name, the channels and constants that it gets, and for the simulator the kinds of all its
      tensors (0 read, 1 written, 2 between cores, 3 read and written).
    channels: (dims, dtype) by name, of memory through which the cores of a group pass tiles to each other. Each core group has
      its own.
    constants: (fill, shape, dtype) of masks, by name, as `_mask` takes them.
    heads: True if head counts are compiled in. Kernels then do not take them.
    """

    def __init__(self, source: str, symbols: Mapping[str, tuple[str, list[str], list[int]]],
                 channels: Mapping[str, tuple[list[int], str]], constants: Mapping[str, tuple[str, list[int], str]], heads: bool
                 ) -> None:
        self.source, self.symbols, self.channels, self.constants, self.heads = source, symbols, channels, constants, heads
        self.library = functools.lru_cache(maxsize=None)(self._load)
        self.mask = functools.lru_cache(maxsize=64)(lambda name, device: _mask(*constants[name]).to(device))

    def __call__(self, name: str, instances: int, sizes: Sequence[int], ints: Sequence[int], device: torch.device
                 ) -> Callable[[Sequence[Any], Any, Sequence[float]], None]:
        """A function that launches the kernel on its tensors, cu_seqlens and numbers."""
        symbol, own, kinds = self.symbols[name]
        numbers = (*((*sizes[:3], sizes[5]) if self.heads else sizes), *ints)
        groups = min(instances, _core_groups(device))

        def simulate(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            from gdn_codegen import pto_sim
            arguments = [*tensors, *(self.made(n, groups, device) for n in own), cu]
            pto_sim.launch(self.library("cpu"), symbol, groups, arguments, kinds, numbers, scalars)

        def launch(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            arguments = [*tensors, *(self.made(n, groups, device) for n in own), cu]
            stream = torch.npu.current_stream()._as_parameter_  # type: ignore[attr-defined]
            failed = getattr(self.library("npu"), f"call_{symbol}")(
                ctypes.c_uint32(groups), stream, *(ctypes.c_void_p(t.data_ptr()) for t in arguments),
                *(ctypes.c_int64(n) for n in numbers), *(ctypes.c_float(x) for x in scalars))
            if failed:
                raise RuntimeError(f"{symbol}: the runtime returned no address for flags between cores")

        return simulate if device.type == "cpu" else launch

    def made(self, name: str, groups: int, device: torch.device) -> torch.Tensor:
        """A mask, or new memory for a channel."""
        if name in self.constants:
            return self.mask(name, device)
        dims, dtype = self.channels[name]
        return torch.empty(groups, *dims, dtype=_FLOATS[dtype], device=device)

    def _load(self, kind: str) -> ctypes.CDLL:
        """The compiled kernels for "npu" or "cpu", from the cache if they are there. A file is named by a hash of its content."""
        if kind == "npu":
            seed = self.source + " ".join(compile_command("", ""))
        else:
            from gdn_codegen import pto_sim
            seed = self.source + str(pto_sim.runtime_object())
        given = os.environ.get("GDN_CODEGEN_CACHE")
        folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdn_codegen"
        name = f"{hashlib.sha256(seed.encode()).hexdigest()[:24]}_{kind}.so"

        def make(built: Path) -> None:
            source = built.with_name("kernel.cpp")
            source.write_text(self.source)
            if kind == "npu":
                _compile_for_npu(source, built)
            else:
                pto_sim.build(source, [symbol for symbol, *_ in self.symbols.values()], built)

        return ctypes.CDLL(str(_artefact(folder / "pto" / name, make)))


def _fits_transfers(t: Tables, name: str, x: torch.Tensor) -> bool:
    """True if transfers can read the tensor without a copy: its rows are dense, and less than 2^16 elements apart."""
    return x.stride(-1) == 1 and 0 < _steps(x.stride(), t.layout)[1] < 1 << 16
