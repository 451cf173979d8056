"""Targets: all that the package knows of one is in a `Target`, and `register` makes it known.

Our own are in this folder's triton.py, tilelang.py and pto.py. Others register by a call of `register`, or by an entry point of
the group "gdn_codegen.targets" that names a Target. docs/adding_a_target.md adds one, step by step.
"""
from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..devices import Device
from ..emit.base import Heads, KernelText
from ..ir.core import Program
from .machine import Finding

if TYPE_CHECKING:
    from ..passes.pipelines import Passes
    from ..runtime.build import Build

#: Our own, in the order in which they are listed.
OWN = ("triton", "tilelang", "pto")
#: The entry points by which installed packages bring theirs.
GROUP = "gdn_codegen.targets"
#: A line that `build --check` prints, and whether it is no error; None where it says what was not checked.
Line = tuple[str, "bool | None"]


@dataclass(frozen=True)
class Lowering:
    """Passes that lower a program, and the device that they lower it for."""

    passes: Passes
    device: Device


@dataclass(frozen=True)
class Ahead:
    """How kernels are compiled ahead of the first call (`build --compile`).

    archs: a pattern of architectures' names. accepted: what is said of other names. heads: whether head counts have to be given
    (`--compile-heads`). run: (module's path, architecture, pairs of H and HV) -> a line a kernel, as each is done.
    """

    archs: str
    accepted: str
    heads: bool
    run: Callable[[Path, str, Sequence[tuple[int, int]]], Iterator[str]]


@dataclass(frozen=True)
class Toolchain:
    """What a target's modules need beside torch, and what compiles their kernels. All of it may be left out.

    package: the Python package that modules import, "" for none. install: the command that brings it. modules: packages whose
    exceptions mean that a build does not compile, so that the op tries another build. lacks: (tensors' device type) -> what
    compiling for it needs and is not here, "" where nothing is missing. compiler: (device type) -> the command that compiles for
    it, "" for none; verdicts of the admission check depend on it. findings: the target's lines of `doctor`.

    check_needs: what to install before `check` works, "" where all is here. check: (build, module's path, architectures) -> lines
    of `build --check`; None where nothing is compiled before the first call. check_archs: what --arch may name for it, where text
    runs on any of these. ahead: how `build --compile` works; None where it does not. cached: files of the target's own in the
    package's cache: the folder there, and a pattern of names.
    """

    package: str = ""
    install: str = ""
    modules: tuple[str, ...] = ()
    lacks: Callable[[str], str] = lambda device: ""
    compiler: Callable[[str], str] = lambda device: ""
    findings: Callable[[], Sequence[Finding]] = lambda: ()
    check_needs: Callable[[], str] = lambda: ""
    check: Callable[[Build, Path, Sequence[str]], Sequence[Line]] | None = None
    check_archs: tuple[str, ...] = ()
    ahead: Ahead | None = None
    cached: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """A language in which kernels are emitted, and how they run.

    name: what `--target` and `target=` call it, a Python identifier.
    lowering: passes and device of text that runs anywhere. archs: those of builds for one architecture (`--arch`).
    emit: (lowered program, layout "bthd" or "bhtd", head counts compiled in or None) -> a KernelText for each kernel.
    template: the Jinja file of a module, under the package's templates/, or the path of a file elsewhere; it may include those of
    templates/common.
    runs_on: device types of tensors ("cpu", "cuda", "npu") for which modules have kernels.
    toolchain: what they need, and what compiles them.
    preference: the lower, the earlier `target="auto"` takes it. head_counts: whether calls get kernels with H and HV compiled in.
    per_call: whether kernels are compiled anew for other head counts and kinds of calls, so that each is admitted by itself.
    interprets: device types for which nothing is compiled, so that nothing needs to be admitted.
    lanes_of_key_head: whether a kernel's lanes are value heads of one key head.
    stride_units: whether kernels get strides in units of what divides them wherever a tensor lies dense.
    tf32: whether products of float32 pass as tf32 on a GPU.
    """

    name: str
    lowering: Lowering
    emit: Callable[[Program, str, Heads], list[KernelText]]
    template: str | Path
    runs_on: tuple[str, ...]
    archs: Mapping[str, Lowering] = field(default_factory=dict)
    toolchain: Toolchain = field(default_factory=Toolchain)
    preference: int = 100
    head_counts: bool = False
    per_call: bool = False
    interprets: tuple[str, ...] = ()
    lanes_of_key_head: bool = False
    stride_units: bool = False
    tf32: bool = False

    def lowered_for(self, arch: str) -> Lowering:
        """Passes and device of builds for an architecture, "" for any."""
        return self.archs[arch] if arch else self.lowering



_known: dict[str, Target] = {}
_searched: list[bool] = []


def register(target: Target) -> Target:
    """Make a target known to `build`, `show`, `verify`, `doctor` and calls of the op; gives it back.

    ValueError for what is no Target, a name that is no identifier, or one that another target has.
    """
    if not isinstance(target, Target):
        raise ValueError(f"target: got {type(target).__name__}; accepted: a gdn_codegen.targets.Target")
    if not (target.name.isascii() and target.name.isidentifier()) or target.name in ("all", "auto"):
        raise ValueError(f"name: got {target.name!r}; accepted: an identifier other than all and auto")
    if target.name in OWN and target.name not in _known:
        _own()
    if _known.setdefault(target.name, target) is not target:
        raise ValueError(f"name: got {target.name!r}, which another target has; accepted: a name that is free")
    return target


def _own() -> None:
    for name in OWN:
        if name not in _known:
            importlib.import_module(f"{__name__}.{name}")


def _search() -> None:
    """Register what installed packages bring. One that cannot be loaded is left out, with a warning."""
    if _searched:
        return
    _searched.append(True)
    from importlib.metadata import entry_points
    for point in entry_points(group=GROUP):
        try:
            register(point.load())
        except Exception as e:
            warnings.warn(f"gdn_codegen: the target {point.name} ({point.value}) is left out: {type(e).__name__}: {e}",
                          stacklevel=2)


def names() -> tuple[str, ...]:
    """All targets, our own first."""
    _own()
    _search()
    return (*OWN, *(n for n in _known if n not in OWN))


def find(name: str) -> Target:
    """The target of that name. ValueError where there is none."""
    if not isinstance(name, str) or name not in _known:
        _own()
        if not isinstance(name, str) or name not in _known and name not in names():
            raise ValueError(f"target: got {name!r}; accepted: {', '.join(names())}")
    return _known[name]
