"""Compiles a generated Triton module ahead of time, for GPUs that need not be here."""
from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

#: What an instance may use of shared memory (bytes): H100 and H200 (CUDA C++ Programming Guide, compute capability 9.0),
#: MI300X (CDNA 3 ISA: LDS).
SHARED = {"sm_90": 227 * 1024, "gfx942": 64 * 1024}
ARCHES = tuple(SHARED)
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture. registers: 32-bit registers a thread; spills: bytes on NVIDIA, registers on AMD;
    None where the toolchain does not say. error: why it does not compile or does not fit."""

    kernel: str
    arch: str
    warps: int
    shared: int = 0
    registers: int | None = None
    spills: int | None = None
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.kernel} {self.arch}: {self.error}"
        parts = [f"{self.kernel} {self.arch}: {self.warps} warps, {self.shared} bytes shared"]
        if self.registers is not None:
            parts.append(f"{self.registers} registers")
        if self.spills:
            parts.append(f"warning: spills {self.spills} {'bytes' if self.arch.startswith('sm_') else 'registers'}")
        return ", ".join(parts)


def check(path: Path) -> list[tuple[str, bool]]:
    """A line and a verdict for each kernel and architecture."""
    return [(str(c), not c.error) for c in compiled(path)]


def compiled(path: Path, arches: Sequence[str] = ARCHES, heads: int = 16, value_heads: int = 32) -> list[Compiled]:
    """Every kernel of the module at `path`, compiled for each of `arches`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [_compile(module, row, arch, heads, value_heads) for row in module.KERNELS for arch in arches]


def dtypes(module: ModuleType) -> dict[str, str]:
    """Of each tensor that a module's kernels take."""
    more = [row for n in ("HEAD_INPUTS", "PART_WORKSPACES") for row in getattr(module, n, ())]
    dtype = {n: d for n, *_, d in (*module.INPUTS, *module.OUTPUTS, *module.WORKSPACES, *more)}
    return dtype | {n: "float32" for n, _ in (*module.INITIAL, *module.FINAL)}


def _compile(module: ModuleType, row: tuple[Any, ...], arch: str, heads: int, value_heads: int) -> Compiled:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, _, _, tensors, scalars = row
    kernel, warps = getattr(module, f"{name}_kernel"), module.NUM_WARPS[name]
    dtype = dtypes(module)
    fixed = {"H": heads, "HV": value_heads, "OPERAND": tl.bfloat16, **module.SIZES, **module.BLOCKS.get(name, {}),
             **{f"has_{t}": 1 for t in tensors}}
    types = {f"{t}_ptr": f"*{SHORT[dtype[t]]}" for t in tensors} | {"cu_seqlens": "*i32"}
    positional = [*types]
    types |= {"N": "i32", "T": "i32", "batched": "i32", "span": "i32"}
    types |= dict.fromkeys(kernel.arg_names[len(positional): len(positional) + len(scalars)], "fp32")
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    constants = {n: fixed[n] for n, kind in signature.items() if kind == "constexpr"}
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in positional}
    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    options = {"num_warps": warps, "num_stages": module.NUM_STAGES}
    try:
        got = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    except Exception as e:  # whatever its compiler throws is the report
        return Compiled(name, arch, warps, error=f"does not compile: {type(e).__name__}: {str(e).strip().splitlines()[-1:]}")
    shared = int(got.metadata.shared)
    registers, spills = _nvidia(got.asm) if arch.startswith("sm_") else _amd(got.asm)
    over = f"needs {shared} bytes of shared memory, {arch} has {SHARED[arch]}" if shared > SHARED.get(arch, shared) else ""
    return Compiled(name, arch, warps, shared, registers, spills, over)


def _nvidia(asm: dict[str, Any]) -> tuple[int | None, int | None]:
    """Registers and bytes of stack, which is where spills go, from the tool that Triton brings."""
    try:
        from triton import knobs
        tool = knobs.nvidia.cuobjdump.path
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(asm["cubin"])
            f.flush()
            text = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, timeout=60).stdout
    except (ImportError, AttributeError, OSError, RuntimeError, subprocess.TimeoutExpired):
        return None, None
    return _number(r"\bREG:(\d+)", text), _number(r"\bSTACK:(\d+)", text)


def _amd(asm: dict[str, Any]) -> tuple[int | None, int | None]:
    text = asm.get("amdgcn", "")
    return _number(r"\.vgpr_count:\s*(\d+)", text), _number(r"\.vgpr_spill_count:\s*(\d+)", text)


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None
