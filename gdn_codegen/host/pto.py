"""The part of a generated PTO module that compiles and launches its kernels.

Below the line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import math
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
    """The number of cube cores of the NPU; 4 in the simulator, and for tensors without memory."""
    if device.type != "npu":
        return 4
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return getattr(npu.get_device_properties(device), "cube_core_num", 24)


#: Regions of a workspace begin at multiples of this: several of a transfer's 32 bytes.
_ALIGN = 512


class PtoLauncher:
    """Launches the kernels of one source: on an Ascend NPU, and for CPU tensors in the simulator of gdn_codegen.

    symbols: for each kernel, its C name, the kinds of its tensors for the simulator (0 read, 1 written, 2 between cores, 3 read
      and written), the kinds of the regions of the workspace that it uses, the first bytes of its masks among its constants, and
      how many of its integers are strides. The kernel gets pointers to its tensors; the workspace, if it uses any; its constants,
      if it has any; a table of the first bytes of its regions, then strides, if there are any; and cu_seqlens.
    regions: (what it has a tile for, dims, dtype) by name: "slot" and "sequence", for each value head, or "group", a core group.
    constants: (fill, shape, dtype) of masks, by name, as `_mask` takes them.
    heads: True if head counts are compiled in. Kernels then do not take them.
    """

    def __init__(self, source: str, symbols: Mapping[str, tuple[str, list[int], dict[str, int], dict[str, int], int]],
                 regions: Mapping[str, tuple[str, list[int], str]], constants: Mapping[str, tuple[str, list[int], str]],
                 heads: bool) -> None:
        self.source, self.symbols, self.regions, self.constants, self.heads = source, symbols, regions, constants, heads
        self.library = functools.lru_cache(maxsize=None)(self._load)
        self.filled = functools.lru_cache(maxsize=64)(self._filled)

    def places(self, slots: int, sequences: int, value_heads: int, device: torch.device) -> dict[str, tuple[int, int]]:
        """For each region its first byte in the workspace, and its bytes. The last entry, "", is the end.

        In the simulator regions lie apart, by as much as the largest tile has, so that it finds an access past the end of one.
        """
        counts = {"slot": slots * value_heads, "sequence": sequences * value_heads, "group": _core_groups(device)}
        tiles = {n: math.prod(dims) * _FLOATS[dtype].itemsize for n, (_, dims, dtype) in self.regions.items()}
        apart = max(tiles.values(), default=0) if device.type == "cpu" else 0
        found, at = {}, 0
        for name, (each, _, _) in self.regions.items():
            found[name] = at, counts[each] * tiles[name]
            at += -(-(counts[each] * tiles[name] + apart) // _ALIGN) * _ALIGN
        return {**found, "": (at, 0)}

    def workspace_bytes(self, slots: int, sequences: int, value_heads: int, device: torch.device) -> int:
        """The bytes of the workspace of a call."""
        return self.places(slots, sequences, value_heads, device)[""][0]

    def __call__(self, name: str, instances: int, sizes: Sequence[int], ints: Sequence[int], device: torch.device
                 ) -> Callable[[Sequence[Any], Any, Sequence[float]], None]:
        """A function that launches the kernel on its tensors, cu_seqlens and numbers. The last tensor is the workspace, if it
        uses any."""
        symbol, kinds, used, masks, strides = self.symbols[name]
        numbers = (*((*sizes[:3], sizes[5]) if self.heads else sizes), *ints[:len(ints) - strides])
        groups = min(instances, _core_groups(device))
        places = self.places(sizes[5], sizes[0], sizes[4], device)
        table = [*(places[n][0] for n in used), *ints[len(ints) - strides:]]
        fixed = [self.filled(name, device)] if masks else []
        fixed += [torch.tensor(table, dtype=torch.int64, device=device)] if table else []
        of_all = [*kinds, *([4] if used else []), *([4] if masks else []), *([0] if table else []), 0]

        def simulate(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            from gdn_codegen import pto_sim
            regions = [(tensors[-1][at:at + size].view(_FLOATS[self.regions[n][2]]), kind)
                       for n, kind in used.items() for at, size in [places[n]]]
            regions += [(x, 0) for x in self._masks(name, fixed[0])] if masks else []
            pto_sim.launch(self.library("cpu"), symbol, groups, [*tensors, *fixed, cu], of_all, numbers, scalars, regions)

        def launch(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            stream = torch.npu.current_stream()._as_parameter_  # type: ignore[attr-defined]
            failed = getattr(self.library("npu"), f"call_{symbol}")(
                ctypes.c_uint32(groups), stream, *(ctypes.c_void_p(t.data_ptr()) for t in (*tensors, *fixed, cu)),
                *(ctypes.c_int64(n) for n in numbers), *(ctypes.c_float(x) for x in scalars))
            if failed:
                raise RuntimeError(f"{symbol}: the runtime returned no address for flags between cores")

        return simulate if device.type == "cpu" else launch

    def _filled(self, name: str, device: torch.device) -> torch.Tensor:
        """The constants of a kernel: its masks, in the bytes of one tensor."""
        masks = {n: _mask(*self.constants[n]) for n in self.symbols[name][3]}
        ends = [at + masks[n].nbytes for n, at in self.symbols[name][3].items()]
        whole = torch.zeros(ends[-1], dtype=torch.uint8, device="cpu")
        for to, x in zip(self._masks(name, whole), masks.values(), strict=True):
            to.copy_(x.flatten())
        return whole.to(device)

    def _masks(self, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """A view of each mask of a kernel in its constants."""
        found = []
        for n, at in self.symbols[name][3].items():
            _, shape, dtype = self.constants[n]
            found.append(whole[at:at + math.prod(shape) * _FLOATS[dtype].itemsize].view(_FLOATS[dtype]))
        return found

    def _load(self, kind: str) -> ctypes.CDLL:
        """The compiled kernels for "npu" or "cpu", from the cache if they are there. A file is named by a hash of its content.
        ValueError for a cache that cannot be written."""
        given = os.environ.get("GDN_CODEGEN_CACHE")
        folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdn_codegen"
        try:
            return self._compiled(kind, folder)
        except OSError as e:
            at = Path(str(e.filename)).absolute()
            if e.filename is None or not (at in folder.absolute().parents or at.is_relative_to(folder.absolute())):
                raise
            raise ValueError(f"GDN_CODEGEN_CACHE: got {folder}: {e.strerror}; accepted: a folder that can be written") from e

    def _compiled(self, kind: str, folder: Path) -> ctypes.CDLL:
        """`_load` with this cache."""
        if kind == "npu":
            seed = self.source + " ".join(compile_command("", ""))
        else:
            from gdn_codegen import pto_sim
            seed = self.source + str(pto_sim.runtime_object())
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
