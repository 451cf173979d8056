"""The target Triton, for NVIDIA and AMD GPUs. CPU tensors run in its interpreter."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices import TRITON
from ..emit import triton
from ..emit.base import KernelText, quoted
from ..emit.triton import functions
from ..passes.pipelines import INSTANCES
from ..schedule import OF_CORES
from . import Ahead, Line, Lowering, Target, Toolchain, machine, register
from .machine import Finding

if TYPE_CHECKING:
    from ..runtime.build import Build

INSTALL = "pip install 'gdn_codegen[triton]'"


def _findings() -> list[Finding]:
    version, gpu = machine.version("triton"), machine.gpu()
    return [Finding("triton", "package", bool(version), version or INSTALL),
            Finding("triton", "CPU tensors", bool(version), "Triton's interpreter" if version else "needs the package"),
            Finding("triton", "GPU tensors", bool(version and gpu), gpu or machine.NO_GPU)]


def _check(b: Build, path: Path, archs: Sequence[str]) -> Sequence[Line]:
    from ..tools import check_triton
    return check_triton.check(b, path, archs or check_triton.USUAL)


def _ahead(path: Path, arch: str, heads: Sequence[tuple[int, int]]) -> Iterator[str]:
    from ..tools import compile_ahead
    return compile_ahead.triton(path, arch, heads)


def _facts(b: Build, kernels: Sequence[KernelText]) -> dict[str, Any]:
    """The device functions of a module, and tables of its kernels."""
    def those(key: str) -> list[str]:
        return [k.name for k in kernels if k.extra[key]]
    return {"device_functions": functions.module_texts({x for k in kernels for x in k.extra["calls"]}),
            "blocks": quoted({k.name: k.extra["block"] for k in kernels if k.extra["block"]}),
            "warps": quoted({k.name: k.extra["warps"] for k in kernels}), "stages": b.plan.stages,
            "unspecialised": quoted(tuple(sorted({n for k in kernels for n in k.extra["sizes"]}))),
            "in_shares": quoted(those("in_pairs")), "descriptors": bool(those("described"))}


TARGET = register(Target(
    "triton", Lowering(INSTANCES, TRITON, unused=(*OF_CORES, "value_heads", "agents")), triton.emit,
    "triton/module.py.j2", ("cpu", "cuda"), facts=_facts, preference=1, per_call=True,
    interprets=("cpu",),
    toolchain=Toolchain(
        package="triton", install=INSTALL, modules=("triton",), findings=_findings, check=_check,
        check_archs=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950"),
        ahead=Ahead(r"sm_\d+a?|gfx\w+", "as sm_90a or gfx942", True, _ahead))))
