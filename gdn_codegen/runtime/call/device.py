"""What dispatch knows of a device. It need not be here: `described` makes the facts of a GPU from words."""
from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from ... import targets

#: GPUs by the names that torch gives them: the architecture, and the number of multiprocessors.
GPUS = {"NVIDIA H200": ("sm_90", 132), "NVIDIA H100 80GB HBM3": ("sm_90", 132), "NVIDIA H100 PCIe": ("sm_90", 114),
        "NVIDIA H20": ("sm_90", 78), "NVIDIA A100-SXM4-80GB": ("sm_80", 108), "NVIDIA A100-SXM4-40GB": ("sm_80", 108)}
#: KiB of shared memory that a block may take, by architecture. Of those from sm_80 on the others have 227 or more (CUDA C++
#: Programming Guide, "Technical Specifications per Compute Capability").
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_120": 99, "sm_121": 99}


@dataclass(frozen=True)
class Facts:
    """A device as dispatch sees it.

    type: of its tensors. names: keys under which tables of measurements are looked up, most specific first: the name of the
    device, its architecture and number of multiprocessors (an H100 and an H200 may share these), its architecture. arch: of a
    GPU, if some builds are made for it alone; else "". units: the number of multiprocessors of a GPU; 0 for other devices.
    shared_kib: KiB of shared memory that a block may take, 0 for 227, as on an H100 (Schedule.shared_kib).
    """

    type: str
    names: tuple[str, ...]
    arch: str = ""
    units: int = 0
    shared_kib: int = 0


def gpu(name: str, arch: str, units: int, amd: bool = False) -> Facts:
    """The facts of a GPU. name: "" for any. arch: as sm_90. amd: AMD's gfx90a also reports the capability (9, 0)."""
    names = (*filter(None, [name]), f"{arch} x {units}", arch)
    return Facts("cuda", names, "" if amd else targets.architecture(arch), units, 0 if amd else SHARED_KIB.get(arch, 0))


@lru_cache(maxsize=64)
def facts(device: torch.device) -> Facts:
    """The facts of a device that is here."""
    if device.type != "cuda":
        return Facts(device.type, (device.type,))
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return gpu(torch.cuda.get_device_name(device), arch, units, bool(torch.version.hip))


def described(words: str) -> Facts:
    """The facts of a device from words: a name of GPUS, an architecture with the number of multiprocessors, or "cpu".

    ValueError for other words.
    """
    if words == "cpu":
        return facts(torch.device("cpu"))
    if words in GPUS:
        return gpu(words, *GPUS[words])
    found = re.fullmatch(r"(sm_[1-9]\d+) x ([1-9]\d*)", words)
    if not found:
        raise ValueError(f"device: got {words!r}; accepted: {', '.join(GPUS)}, an architecture with the number of "
                         "multiprocessors (sm_90 x 132), or cpu")
    return gpu("", found[1], int(found[2]))
