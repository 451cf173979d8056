"""Compiles a generated Triton module ahead of time, for GPUs that need not be here."""
from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..emit.base import CLEAR, EVERY, SUMMED, WIDTH_OF
from ..host.tables import Tables
from ..runtime.build import Build
from ..runtime.defaults import better
from ..runtime.progress import under_way


@dataclass(frozen=True)
class Unit:
    """What runs an instance: a multiprocessor or a compute unit. shared: bytes of shared memory (AMD: LDS) that one may have;
    file: 32-bit registers of the unit; most: of a lane; lanes: of a warp (AMD: a wave)."""

    shared: int
    file: int
    most: int
    lanes: int

    def registers(self, warps: int) -> int:
        """Registers that a lane may have in an instance of `warps` warps."""
        return min(self.most, self.file // (self.lanes * warps))


#: A100; L4, L40S and RTX 40; H100 and H200; B200; RTX 50 (CUDA C++ Programming Guide, technical specifications by compute
#: capability); MI200, MI300 and MI350 (CDNA 2, 3 and 4 ISA: LDS, and the vector registers of four SIMD units, accumulation
#: registers among them).
UNITS = {**{arch: Unit(shared * 1024, 64 * 1024, 255, 32)
            for arch, shared in (("sm_80", 163), ("sm_89", 99), ("sm_90", 227), ("sm_100", 227), ("sm_120", 99))},
         **{arch: Unit(shared * 1024, 128 * 1024, 512, 64) for arch, shared in (("gfx90a", 64), ("gfx942", 64), ("gfx950", 160))}}
#: The architectures to compile for where the command names none.
USUAL = ("sm_90", "gfx942", "gfx950")
SHORT = {"int32": "i32", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture. config: how it was made. registers: of 32 bits a lane; accumulators: those of them
    that AMD calls so; scalars: AMD's, of a wave; spills: bytes of memory a lane for want of registers (NVIDIA: of stack);
    None where the toolchain does not say. error: why it does not compile or does not fit. advice: what to do about spills."""

    kernel: str
    arch: str
    warps: int
    config: str = ""
    shared: int = 0
    registers: int | None = None
    accumulators: int | None = None
    scalars: int | None = None
    spills: int | None = None
    error: str = ""
    advice: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a line of the table."""
        unit = UNITS[self.arch]
        if self.error and self.registers is None and not self.shared:
            return self.kernel, self.arch, str(self.warps), *["-"] * (len(HEAD) - 3)
        text = ["-" if x is None else str(x) for x in (self.registers, self.accumulators, self.scalars, self.spills)]
        return (self.kernel, self.arch, str(self.warps), f"{self.shared} of {unit.shared}",
                f"{text[0]} of {unit.registers(self.warps)}", *text[1:])

    @property
    def remark(self) -> str:
        """An error or a warning about a kernel; "" if there is none."""
        where = f"{self.kernel} on {self.arch} ({self.config})"
        if self.error:
            return f"error: {where} {self.error}"
        return f"warning: {where} spills {self.spills} bytes per lane{self.advice}" if self.spills else ""


HEAD = ("kernel", "architecture", "warps", "shared bytes", "registers", "accumulators", "scalars", "spilled bytes")


def check(b: Build, path: Path, arches: Sequence[str] = USUAL) -> list[tuple[str, bool | None]]:
    """Lines of a table, a kernel and architecture each, then errors and warnings; a line of the latter has the verdict."""
    found = [replace(c, advice=better(b, c.arch)) if c.spills else c for c in compiled(path, arches)]
    rows = [HEAD, *(c.row for c in found)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(HEAD))]
    lines = ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    unread = [c for c in found if not c.error and None in (c.registers, c.spills)]
    return [*((x, True) for x in lines), *((c.remark, not c.error) for c in found if c.remark),
            *((f"not read: registers and spills of {c.kernel} on {c.arch}, for want of a tool (Triton's cuobjdump)", None)
              for c in unread)]


def compiled(path: Path, arches: Sequence[str] = USUAL, kernels: Sequence[str] = (), heads: int = 16,
             value_heads: int = 32) -> list[Compiled]:
    """The kernels of the module at `path` (all, or those named), each compiled for each of `arches`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = []
    for row in module.TABLES.kernels:
        for arch in arches if not kernels or row[0] in kernels else ():
            with under_way(f"compiling {row[0]} for {arch}"):
                out.append(_compile(module, row, arch, heads, value_heads))
    return out


def dtypes(t: Tables) -> dict[str, str]:
    """The dtype of each tensor that a module's kernels take."""
    typed: Any = (*t.inputs, *t.head_inputs, *t.chunk_inputs, *t.outputs, *t.workspaces, *t.end_workspaces, *t.part_workspaces)
    return {**{row[0]: row[-1] for row in typed}, **dict.fromkeys(t.indices, "int32"),
            **dict.fromkeys([n for n, _ in (*t.initial, *t.final, *t.checkpoints)], t.state_dtype)}


class Driver:
    """The parts of a GPU's driver that compiling needs."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        """As Triton's drivers have it."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """As Triton's drivers have it."""
        return 0

    def get_current_target(self) -> Any:
        """As Triton's drivers have it."""
        return self.target


@contextlib.contextmanager
def compiling_for(target: Any) -> Iterator[None]:
    """Let Triton find the driver of a GPU that need not be here."""
    from triton.runtime.driver import driver
    driver.set_active(Driver(target))
    try:
        yield
    finally:
        driver.set_active(None)  # found when it is next asked for


def _compile(module: ModuleType, row: tuple[Any, ...], arch: str, heads: int, value_heads: int) -> Compiled:
    """Compile one kernel for `arch` with these head counts. What fails is in the result's `error`.

    row: the kernel's, of Tables.kernels.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, _, _, tensors, scalars = row
    kernel = getattr(module, f"{name}_kernel")
    dtype = dtypes(module.TABLES)
    fixed = {"H": heads, "HV": value_heads, "OPERAND": tl.bfloat16, **module.SIZES, **module.BLOCKS.get(name, {}),
             **{f"has_{t}": 1 for t in tensors}}
    types = {f"{t}_ptr": f"*{SHORT[dtype[t]]}" for t in tensors} | {"cu_seqlens": "*i32"}
    positional = [*types]
    types |= {"N": "i32", "T": "i32", "batched": "i32", "span": "i32", EVERY: "i32", SUMMED: "i32"}
    strides = [n for n in kernel.arg_names if "_stride" in n]
    types |= dict.fromkeys([*strides, *(n for n in kernel.arg_names if n.startswith(CLEAR) or n.endswith(WIDTH_OF))], "i32")
    types |= dict.fromkeys(kernel.arg_names[len(positional): len(positional) + len(scalars)], "fp32")
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    constants = {n: fixed[n] for n, kind in signature.items() if kind == "constexpr"}
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in (*positional, *strides)}
    unit = UNITS[arch]
    warps = module._launcher.warps(name, unit.lanes)
    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    split = "".join(f", {n[1:].lower()}_block {size}" for n, size in module.BLOCKS.get(name, {}).items())
    config = (f"schedule {module.SCHEDULE}, {', '.join(f'{d} {n}' for d, n in module.SIZES.items())}{split}, {warps} warps, "
              f"{module.NUM_STAGES} stages")
    try:
        with compiling_for(target):
            more = module._newer_ptxas_options()
        got = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target,
                             options={"num_warps": warps, "num_stages": module.NUM_STAGES, "enable_fp_fusion": True, **more})
    except Exception as e:  # whatever its compiler throws is the report
        return Compiled(name, arch, warps, config, error=f"does not compile: {_said(e)}")
    read = _nvidia if arch.startswith("sm_") else _amd
    used = replace(Compiled(name, arch, warps, config, int(got.metadata.shared)), **read(got.asm))
    limits = ((used.shared, unit.shared, "bytes of shared memory"),
              (used.registers or 0, unit.registers(warps), "registers per lane"))
    over = [f"needs {n} {what}, {arch} has {most}" for n, most, what in limits if n > most]
    return replace(used, error="; ".join(over))


def _said(e: BaseException) -> str:
    """What is wrong, from the first cause of an exception: for a function that a kernel calls, Triton's own exception only shows
    the call. Its last line is taken, but for a mark (^) below a line of the text."""
    while e.__cause__ is not None:
        e = e.__cause__
    lines = [x.strip() for x in str(e).splitlines()]
    return f"{type(e).__name__}: {next((x for x in reversed(lines) if x.strip('^ ')), '')}"


def _nvidia(asm: dict[str, Any]) -> dict[str, Any]:
    """Registers and bytes of stack, which is where spills go, from the tool that Triton brings."""
    try:
        from triton import knobs
        tool = knobs.nvidia.cuobjdump.path
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(asm["cubin"])
            f.flush()
            text = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, timeout=60).stdout
    except (ImportError, AttributeError, OSError, RuntimeError, subprocess.TimeoutExpired):
        return {}
    return {"registers": _number(r"\bREG:(\d+)", text), "spills": _number(r"\bSTACK:(\d+)", text)}


def _amd(asm: dict[str, Any]) -> dict[str, Any]:
    """Resources from the metadata of the code object, read from its text."""
    names = {"registers": "vgpr_count", "accumulators": "agpr_count", "scalars": "sgpr_count",
             "spills": "private_segment_fixed_size"}
    return {field: _number(rf"\.{name}:\s*(\d+)", asm.get("amdgcn", "")) for field, name in names.items()}


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None
