"""Targets. A `Target` holds all data of a target, and `register` adds it to the package.

The package's own targets are in triton.py, tilelang.py and pto.py of this folder. Other packages call `register`, or have an
entry point of the group "gdn_codegen.targets" that refers to a Target. docs/adding_a_target.md shows how to add one, step by
step.
"""
from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices import Device
from ..emit.base import Heads, KernelText
from ..ir.core import Program
from ..schedule.contract import PLAIN, Contract
from .candidates import Asked, Candidate, Space, Splits
from .gradient_plans import GradientPlan
from .machine import Finding

if TYPE_CHECKING:
    from ..passes.pipelines import Passes
    from ..runtime.build import Build
    from ..schedule.schedule import Schedule

#: The package's own targets, in the order of listings.
OWN = ("triton", "tilelang", "pto")
#: The schedule of builds that name none, where a lowering has no other.
DEFAULT_SCHEDULE = "fused"
#: The group of entry points by which installed packages add targets.
GROUP = "gdn_codegen.targets"
#: A line that `build --check` prints, and whether it reports success. None: the line reports what was not checked.
Line = tuple[str, "bool | None"]


@dataclass(frozen=True)
class Lowering:
    """The passes that lower a program, and the device for which they lower it.

    unused: fields of a schedule that the passes do not read. `--set` refuses them. schedule: of builds that name none. columns:
    blocks of V (`v_block`) in which a walk gives the bits that it gives without blocks; 0: none are known to.
    """

    passes: Passes
    device: Device
    unused: tuple[str, ...] = ()
    schedule: str = DEFAULT_SCHEDULE
    columns: int = 0


@dataclass(frozen=True)
class Ahead:
    """How kernels are compiled before the first call (`build --compile`).

    archs: a regular expression for the names of architectures. accepted: the text in the error for other names. heads: whether
    the caller must give head counts (`--compile-heads`). run: (path of the module, architecture, pairs of H and HV) -> a line
    of output for each kernel, once it is compiled. fill: the same, into the toolchain's own cache alone; None if `run` writes to
    nothing else. `tune --compile` takes it.
    """

    archs: str
    accepted: str
    heads: bool
    run: Callable[[Path, str, Sequence[tuple[int, int]]], Iterator[str]]
    fill: Callable[[Path, str, Sequence[tuple[int, int]]], Iterator[str]] | None = None


@dataclass(frozen=True)
class Toolchain:
    """What the modules of a target need besides torch, and how their kernels are compiled. Every field has a default.

    package: the Python package that modules import, "" for none. install: the command that installs it.
    modules: packages whose exceptions mean that a build does not compile. Then an op of the package tries another build.
    lacks: (device type of tensors) -> what is missing to compile for it, "" if nothing is.
    compiler: (device type) -> the command that compiles for it, "" for none. Results of the admission check are kept for each
    compiler.
    findings: the target's lines of `doctor`.

    check_needs: what to install before `check` works, "" if nothing is missing.
    check: (build, path of the module, architectures) -> lines of `build --check`. None if nothing is compiled before the first
    call.
    check_archs: the architectures that --arch accepts for `--check`, if one text runs on all of them.
    ahead: how `build --compile` works, None if it is not supported.
    cached: the target's files in the package's cache: (folder, regular expression for their names). Unfinished files need no
    mention.
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
    """A language in which kernels are emitted, and the way to run them.

    name: the name for `--target` and `target=`, a Python identifier.
    lowering: passes and device for text that runs on any architecture. archs: architecture -> passes and device (`--arch`).
    refused: architecture -> why there are no builds for it.
    emit: (lowered program, layout "bthd" or "bhtd", head counts to compile in or None) -> a KernelText for each kernel.
    template: the Jinja file of a module, in the package's templates/, or the path of a file elsewhere. It may include the files
    of templates/common.
    facts: (build, its kernels) -> further values for the template, by name.
    runs_on: device types of tensors ("cpu", "cuda", "npu") for which modules have kernels.
    toolchain: what modules need, and how their kernels are compiled.
    preference: `target="auto"` prefers the target with the lower number.
    model: (what is asked for) -> candidates for a call that no table has a row for, the best first. Dispatch takes the first that
    fits, and after these the schedules for any device.
    too_large: (lowered program) -> why its kernels will not fit a GPU, if passes cannot tell; "" if they fit.
    sized_for: the architectures whose sizes the devices and `too_large` have. There a call that no build fits is refused before
    kernels compile. On others its kernels may need less.
    spaces: the candidates that `tune` times on a GPU. Without any, `tune` leaves the target out.
    head_counts: whether calls get kernels with H and HV compiled in.
    per_call: whether kernels are compiled again for other head counts and kinds of calls. Then each of them is admitted
    separately.
    interprets: device types for which nothing is compiled, so that no admission check is needed.
    stride_units: whether kernels get strides in units of 16 bytes (less for short rows), which divide the strides of dense
    tensors.
    tf32: whether products of float32 are computed in tf32 on a GPU.
    splits: when dispatch splits sequences. None: where walks fill at most half of a GPU.
    gradients: device type or architecture -> plans of gradients, of which the first that fits is taken, those of the architecture
    before those of its type. Without any, the target has no gradients.
    """

    name: str
    lowering: Lowering
    emit: Callable[[Program, str, Heads], list[KernelText]]
    template: str | Path
    runs_on: tuple[str, ...]
    archs: Mapping[str, Lowering] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    facts: Callable[[Build, Sequence[KernelText]], Mapping[str, Any]] = lambda b, kernels: {}
    toolchain: Toolchain = field(default_factory=Toolchain)
    preference: int = 100
    model: Callable[[Asked], Iterable[Candidate]] = lambda asked: ()
    too_large: Callable[[Program], str] = lambda p: ""
    sized_for: tuple[str, ...] = ()
    spaces: tuple[Space, ...] = ()
    head_counts: bool = False
    per_call: bool = False
    interprets: tuple[str, ...] = ()
    stride_units: bool = False
    tf32: bool = False
    splits: Splits | None = None
    gradients: Mapping[str, tuple[GradientPlan, ...]] = field(default_factory=dict)

    def lowered_for(self, arch: str) -> Lowering:
        """The passes and the device for an architecture. "" is for text that runs on any architecture."""
        return self.archs[arch] if arch else self.lowering


_known: dict[str, Target] = {}
_searched: list[bool] = []


def register(target: Target) -> Target:
    """Add a target, for `build`, `show`, `verify`, `doctor` and calls of the package's ops. Returns the target.

    ValueError if the argument is not a Target, if its name is not an identifier, is "all" or "auto", or is taken, and for plans
    of gradients that no call could use.
    """
    if not isinstance(target, Target):
        raise ValueError(f"target: got {type(target).__name__}; accepted: a gdn_codegen.targets.Target")
    if not (target.name.isascii() and target.name.isidentifier()) or target.name in ("all", "auto"):
        raise ValueError(f"name: got {target.name!r}; accepted: an identifier other than all and auto")
    _check_gradients(target)
    if target.name in OWN and target.name not in _known:
        _own()
    if _known.setdefault(target.name, target) is not target:
        raise ValueError(f"name: got {target.name!r}, which another target has; accepted: a name that is free")
    return target


def _check_gradients(target: Target) -> None:
    for key, plans in target.gradients.items():
        if key not in (*target.runs_on, *target.archs):
            raise ValueError(f"gradients: got plans for {key!r}; accepted: {', '.join((*target.runs_on, *target.archs))}")
        if not isinstance(plans, tuple) or not plans or not all(isinstance(x, GradientPlan) and x.states for x in plans):
            raise ValueError(f"gradients: got {plans!r} for {key!r}; accepted: a tuple of a GradientPlan or more, each with "
                             "schedules for the states")


def _own() -> None:
    for name in OWN:
        if name not in _known:
            importlib.import_module(f"{__name__}.{name}")


def _search() -> None:
    """Register the targets of installed packages. A target that cannot be loaded is left out, with a warning."""
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
    """The names of all targets, the package's own first."""
    _own()
    _search()
    return (*OWN, *(n for n in _known if n not in OWN))


def find(name: str) -> Target:
    """The target of that name. ValueError if there is none."""
    if not isinstance(name, str) or name not in _known:
        _own()
        if not isinstance(name, str) or name not in _known and name not in names():
            raise ValueError(f"target: got {name!r}; accepted: {', '.join(names())}")
    return _known[name]


def architecture(gpu: str) -> str:
    """The architecture for which targets make builds of their own, for a GPU called `gpu`: "sm_90a" for "sm_90". "" if there is
    none."""
    known = {a for n in names() for a in find(n).archs}
    return next((a for a in (gpu, f"{gpu}a") if a in known), "")


def lower(p: Program, target: str, schedule: Schedule, sizes: dict[str, int], dtype: str, arch: str = "",
          contract: Contract = PLAIN, upto: str = "") -> Program:
    """The traced program `p`, lowered by the passes of the target of that name (`passes.pipelines.run_passes`).

    sizes: C, K and V as callers know them. arch: one architecture of the target, "" for text that runs on any. upto: the last
    pass to run, "" for all passes. ValueError if there is no such target. ScheduleError and ContractError if `schedule` or
    `contract` does not fit the page or the device.
    """
    from ..passes.pipelines import run_passes  # all passes: a third of a second that a mere import of the package does not take
    found = find(target).lowered_for(arch)
    return run_passes(p, found.passes, found.device, schedule, sizes, dtype, contract, upto)
