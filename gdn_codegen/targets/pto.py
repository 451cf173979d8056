"""The target PTO C++, for Ascend NPUs. CPU tensors run in the bundled simulator."""
from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.ascend_a2 import ASCEND_A2
from ..devices.ascend_a5 import UNKNOWN
from ..emit import pto
from ..emit.base import KernelText
from ..passes.pipelines import CORES
from . import Line, Lowering, Target, Toolchain, machine, register
from .gradient_plans import BY_CHUNKS, BY_PIECES, ONE
from .machine import Finding

if TYPE_CHECKING:
    from ..runtime.build import Build


def headers() -> tuple[Path | None, str]:
    """The include folder of <pto/pto-inst.hpp> under PTO_ISA_ROOT, or None and the reason."""
    root = os.environ.get("PTO_ISA_ROOT")
    if not root:
        return None, "set PTO_ISA_ROOT to a PTO-ISA installation"
    for folder in (Path(root) / "include", Path(root)):
        if (folder / "pto" / "pto-inst.hpp").exists():
            return folder, ""
    return None, f"PTO_ISA_ROOT: {root} has no include/pto/pto-inst.hpp"


def _lacks(device: str) -> str:
    if device == "npu" and shutil.which("bisheng") is None:
        return "bisheng is missing: install the CANN toolkit"
    return machine.lacks_compiler() if device == "cpu" else ""


def _findings() -> list[Finding]:
    gxx, bisheng = machine.first_line(machine.cxx() or "g++", "--version"), shutil.which("bisheng") or ""
    npu, (found, why) = machine.version("torch_npu"), headers()
    return [Finding("pto", "CPU tensors", bool(gxx),
                    f"the bundled simulator, {gxx}" if gxx else f"needs {machine.TOOLS['c++']}"),
            Finding("pto", "PTO-ISA headers", found is not None, str(found or why)),
            Finding("pto", "bisheng", bool(bisheng), bisheng or "needs the CANN toolkit: bisheng on PATH"),
            Finding("pto", "NPU tensors", bool(npu and bisheng), npu or "needs torch_npu and an Ascend NPU")]


def _check(b: Build, path: Path, archs: Sequence[str]) -> Sequence[Line]:
    from ..tools import check_pto
    return check_pto.check(b, path)


#: By layout: the element of token t of a head in a caller's tensor, and elements from token to token.
_TOKENS = {"bthd": ("((b * tokens + t) * heads + head) * dim", "heads * dim"),
           "bhtd": ("((b * heads + head) * tokens + t) * dim", "dim")}


def _facts(b: Build, kernels: Sequence[KernelText]) -> dict[str, Any]:
    """Where tokens lie in callers' tensors; the regions of the workspace, and masks, of all kernels."""
    rows = {x: list(dict.fromkeys(row for k in kernels for row in k.extra[x])) for x in ("regions", "constants")}
    return {**dict(zip(("token_at", "token_stride"), _TOKENS[b.layout], strict=True)), **rows}


TARGET = register(Target(
    "pto", Lowering(CORES, ASCEND_A2, unused=("state_layout", "stages", "warm_up", "longest_first", "warps", "agents",
                                              "descriptors", "persistent", "by_length", "token_groups", "k_piece",
                                              "piece_warps", "shared_kib")), pto.emit,
    "pto/module.py.j2", ("cpu", "npu"), facts=_facts, refused={"a5": "; ".join(UNKNOWN)}, preference=2, head_counts=True,
    gradients={"cpu": (ONE, BY_CHUNKS, *BY_PIECES), "npu": (BY_CHUNKS, ONE, *BY_PIECES)},
    toolchain=Toolchain(
        lacks=_lacks, compiler=lambda device: (machine.cxx() or "") if device == "cpu" else "bisheng", findings=_findings,
        check_needs=lambda: "" if machine.compiler() else machine.TOOLS["c++"], check=_check,
        cached=("pto", r"[0-9a-f]{24}_(?:cpu|npu)\.so.*|pto_sim-[0-9a-f]{16}\.o.*|tmp[a-z0-9_]{8}"))))
