"""The emitted PTO source, unchanged, against PTO-ISA's own headers, run in its CPU_SIM. Needs PTO_ISA_ROOT and clang 15.

Run with: PTO_ISA_ROOT=... pytest tests/device/test_pto_isa.py. CPU_SIM ignores flags inside a core; it judges signatures,
template arguments, layouts, addresses and numbers. A run is a process of its own, since CPU_SIM aborts on what it refuses.
"""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import call, expected, problem, rms_error

from gdn_codegen.runtime import pto_sim
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import SCHEDULES

HERE = Path(__file__).parent
#: RMSE over RMS against float64, and against the bundled simulator.
TOLERANCE = {"float16": (5e-3, 1e-4), "bfloat16": (5e-3, 1e-2), "float32": (1e-5, 1e-6)}

#: The instructions whose headers the cost model does not include by itself, and the ids of events that 9.1.0's lacks.
A2A3 = """
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <pto/pto-inst.hpp>
#ifndef EVENT_ID4
constexpr int EVENT_ID4 = 4, EVENT_ID5 = 5, EVENT_ID6 = 6, EVENT_ID7 = 7;
#endif
#include <pto/npu/a2a3/TFillPad.hpp>
#include <pto/npu/a2a3/TExpandS.hpp>
#include <pto/npu/a2a3/TColExpand.hpp>
#include <pto/npu/a2a3/TReshape.hpp>
#include <acl/acl.h>
#include <runtime/rt_ffts.h>
#define PTO_ENTRY inline
#define __CCE_AICORE__ 220
namespace cube_role {
#define __DAV_C220_CUBE__ 1
#include "kernel.cpp"
#undef __DAV_C220_CUBE__
}
namespace vector_role {
#define __DAV_C220_VEC__ 1
#include "kernel.cpp"
}
"""


def headers():
    """The folder of <pto/pto-inst.hpp> below PTO_ISA_ROOT, and why there is none."""
    root = os.environ.get("PTO_ISA_ROOT")
    if not root:
        return None, "PTO_ISA_ROOT is not set: set it to a checkout of PTO-ISA"
    for folder in (Path(root) / "include", Path(root)):
        if (folder / "pto" / "pto-inst.hpp").exists():
            return folder, ""
    return None, f"PTO_ISA_ROOT: {root} has no include/pto/pto-inst.hpp"


def clang():
    """A clang++ of version 15 or newer, and why there is none."""
    names = [os.environ.get("CLANGXX", ""), "clang++", *(f"clang++-{n}" for n in range(25, 14, -1))]
    for path in filter(None, map(shutil.which, filter(None, names))):
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"clang version (\d+)", text)
        if found and int(found[1]) >= 15:
            return path, ""
    return None, "no clang++ 15 or newer on PATH (CLANGXX may name one), which PTO-ISA's CPU_SIM needs"


INCLUDE, NO_HEADERS = headers()
COMPILER, NO_CLANG = clang() if INCLUDE else (None, "")
pytestmark = pytest.mark.skipif(not (INCLUDE and COMPILER), reason=NO_HEADERS or NO_CLANG)


def compile_command(source, names, library):
    """PTO-ISA's headers come first; the bundled simulator's folder adds what CPU_SIM lacks of CANN, and the driver."""
    kernels = " ".join(f"PTO_SIM_KERNEL({n})" for n in names)
    return [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-w", "-D__CPU_SIM",
            "-DMEMORY_BASE", "-DPTO_CPU_MAX_THREADS=1u",  # its own threads would have on-chip memory of their own
            f"-I{INCLUDE}", f"-I{pto_sim.include_dir()}", f"-I{pto_sim.source_dir()}", f'-DPTO_SIM_SOURCE="{source}"',
            f"-DPTO_SIM_KERNELS={kernels}", str(HERE / "cpu_sim.cpp"), "-o", str(library)]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder, b, x, **options):
    """Outputs of the built op on a problem, in CPU_SIM and in the bundled simulator."""
    path, library = folder / f"{b.target}_{b.name}.py", folder / f"{b.name}.so"
    path.write_text(render(b))
    module = load(path)
    if not library.exists():
        source = folder / f"{b.name}.cpp"
        source.write_text(module.SOURCE)
        done = subprocess.run(compile_command(source, [s for s, *_ in module.SYMBOLS.values()], library),
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:6000]
    torch.save((b.function, x, options), folder / "in.pt")
    done = subprocess.run([sys.executable, __file__, path, library, folder / "in.pt", folder / "out.pt"],
                          capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])})
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return torch.load(folder / "out.pt"), call(getattr(module, b.function), x, **options)


def agree(folder, b, x, **options):
    theirs, ours = run(folder, b, x, **options)
    far, near = TOLERANCE[b.dtype]
    for got, want, other in zip(theirs, expected(x, options.get("delta", True)), ours, strict=True):
        assert rms_error(got, want) <= far
        assert rms_error(got, other) <= near


def source(folder, b):
    path = folder / "module.py"
    path.write_text(render(b))
    return load(path).SOURCE


@pytest.fixture(scope="module")
def cost_model(tmp_path_factory):
    """A folder of the tables that PTO-ISA's cost model generates; its checkout stays as it is."""
    out = tmp_path_factory.mktemp("cost_model")
    for name in ("a2a3", "a5"):
        there = Path("pto/costmodel") / name / "formula_costmodel"
        if not (INCLUDE / there / "gen_formula_params_header.py").exists():
            pytest.skip("this PTO-ISA has no cost model, whose stubs let clang read the A2/A3 headers")
        (out / there).mkdir(parents=True)
        for n in ("gen_formula_params_header.py", "formula_params.csv"):
            shutil.copy(INCLUDE / there / n, out / there)
        subprocess.run([sys.executable, out / there / "gen_formula_params_header.py"], check=True, capture_output=True)
    return out


def checked(folder, cost_model, text):
    """clang's verdict on a source for both roles, with the intrinsics stubbed by PTO-ISA's cost model."""
    (folder / "kernel.cpp").write_text(text)
    unit = folder / "unit.cpp"
    unit.write_text(A2A3)
    return subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", "-w", "-D__COSTMODEL", "-D__NPU_ARCH__=2201",
                           "-DMEMORY_BASE", "-DPTO_COMM_NOT_SUPPORTED", f"-I{INCLUDE}", f"-I{cost_model}",
                           f"-I{pto_sim.include_dir()}", str(unit)], capture_output=True, text=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype, layout", [("float16", "bthd"), ("bfloat16", "bhtd"), ("float32", "bthd")])
def test_schedules(tmp_path, schedule, dtype, layout):
    b = Build("pto", 32, layout, schedule=schedule, dtype=dtype, head_dim_k=32, head_dim_v=32)
    agree(tmp_path, b, problem([33, 0, 65], 1, 2, 32, 32, getattr(torch, dtype), gate=-0.2), layout=layout)


@pytest.mark.parametrize("chunk, k, v", [(64, 128, 128), (128, 128, 128), (64, 128, 64), (128, 64, 128)])
@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_sizes(tmp_path, schedule, chunk, k, v):
    b = Build("pto", chunk, schedule=schedule, head_dim_k=k, head_dim_v=v)
    agree(tmp_path, b, problem([1, chunk - 1, 0, chunk, chunk + 1], 1, 2, k, v, gate="mixed"))
    agree(tmp_path, b, problem([chunk + 6] * 2, 2, 4, k, v, initial=False), batched=True)


@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_another_algorithm(tmp_path, schedule):
    b = Build("pto", algorithm="simple_gla", schedule=schedule)
    agree(tmp_path, b, problem([40, 0, 65], 1, 2, 128, 128), delta=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype, layout, chunk", [("float16", "bthd", 128), ("bfloat16", "bhtd", 64), ("float32", "bthd", 32)])
def test_headers_of_a2_and_a3(tmp_path, cost_model, schedule, dtype, layout, chunk):
    """The static assertions of the instructions' A2/A3 headers, which CPU_SIM leaves out, hold."""
    size = 32 if dtype == "float32" else 128
    done = checked(tmp_path, cost_model, source(tmp_path, Build("pto", chunk, layout, "gated_delta_rule", schedule, dtype,
                                                                size, size)))
    assert done.returncode == 0, done.stderr[:6000]


def test_headers_of_a2_and_a3_refuse(tmp_path, cost_model):
    """So that a pass above says something."""
    text = source(tmp_path, Build("pto")).replace("SLayout::RowMajor, 512, PadValue::Zero>", "SLayout::RowMajor, 512, "
                                                  "PadValue::Max>")
    done = checked(tmp_path, cost_model, text)
    assert done.returncode and "static assertion failed" in done.stderr


def main(module, library, given, out):
    """What a run's own process does. CPU_SIM's bfloat16_t is float16's type under another name, so it gets float16."""
    torch.set_num_threads(1)
    name, x, options = torch.load(given)
    module, lib, plain = load(Path(module)), pto_sim.load(Path(library)), pto_sim.launch

    def launch(_, symbol, groups, tensors, kinds, *rest):
        halves = [t.half() if t.dtype == torch.bfloat16 else t for t in tensors]
        plain(lib, symbol, groups, halves, kinds, *rest)
        for t, h, kind in zip(tensors, halves, kinds, strict=True):
            if t is not h and kind != pto_sim.INPUT:
                t.copy_(h)

    module._library, pto_sim.launch = lambda kind: lib, launch
    torch.save(call(getattr(module, name), x, **options), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
