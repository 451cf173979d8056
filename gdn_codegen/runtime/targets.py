"""Finds out which targets run on this machine, on which devices, and what is missing for the other targets."""
from __future__ import annotations

import platform

from ..targets import find, machine, names
from ..targets.machine import Finding

#: Device types for which targets have kernels. Every target serves other types, such as "meta".
DEVICES = ("cpu", "cuda", "npu")


def serves(target: str, device: str) -> bool:
    """Whether `target` has kernels for tensors of `device` anywhere."""
    return device not in DEVICES or device in find(target).runs_on


def install(target: str) -> str:
    """The command that installs a target's package; "" if it is installed, or none is needed."""
    x = find(target).toolchain
    return x.install if x.package and not machine.version(x.package) else ""


def installs(package: str) -> str:
    """The command that installs a missing package which a target's modules import; "" for other packages."""
    return next((install(n) for n in names() if find(n).toolchain.package == package), "") if package else ""


def lacks_package(target: str, device: str) -> str:
    """Why nothing of `target` can run tensors of `device` here, and what to install; "" where something may."""
    if not serves(target, device):
        return f"it has no kernels for {device} tensors"
    return f"its package is missing: {install(target)}" if install(target) else ""


def lacks_tools(target: str, device: str) -> str:
    """What compiling kernels for tensors of `device` needs and is not here; "" where nothing is missing. Kernels that a cache
    has, or that were compiled ahead, run without."""
    return find(target).toolchain.lacks(device)


def lacks(target: str, device: str) -> str:
    """Why `target` runs no tensors of `device` here, and what to install; "" where it does. What a GPU's kernels are compiled
    with is not asked for."""
    return lacks_package(target, device) or (lacks_tools(target, device) if device == "cpu" else "")


def runs(target: str, device: str) -> bool:
    """Whether `target` runs tensors of `device` here."""
    return not lacks(target, device)


def findings() -> list[Finding]:
    """What `doctor` prints."""
    import torch

    from .. import __version__
    from ..tools import cache_command
    versions = f"gdn_codegen {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    return [Finding("", "versions", True, versions), Finding("", "cache", *cache_command.facts()),
            *(line for n in names() for line in find(n).toolchain.findings())]


def serving(device: str) -> list[str]:
    """The targets with kernels for tensors of `device`, the preferred one first."""
    return sorted((n for n in names() if serves(n, device)), key=lambda n: find(n).preference)


def tunable() -> list[str]:
    """The targets whose candidates `tune` times on a GPU, the preferred one first."""
    return [n for n in serving("cuda") if find(n).spaces]


def choose(device: str, target: str = "auto") -> str:
    """The target for tensors of `device`: the caller's, unless it cannot run them here, or the first that does."""
    if target != "auto":
        if target not in names():
            raise ValueError(f"target: got {target!r}; accepted: auto, {', '.join(names())}")
        if why := lacks_package(target, device):
            raise ValueError(f"target: got {target!r}, and {why}; accepted: a target that runs {device} tensors here, as "
                             "`gdn_codegen doctor` lists them")
        return target
    order = serving(device)
    for target in order:
        if runs(target, device):
            return target
    raise ValueError(f"target: got 'auto', but none of {', '.join(order) or 'the targets'} runs {device} tensors here; "
                     "`gdn_codegen doctor` says what is missing")
