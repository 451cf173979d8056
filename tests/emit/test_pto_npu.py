"""What a generated PTO module does for an NPU, where there is none: its command, its cache, its launches, its imports."""
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import ON_CORES

from gdn_codegen.runtime import cache
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import import_path

ROOT = Path(__file__).parents[2]
#: Stands in for bisheng: writes down what it was given, and makes an empty library, or fails.
BISHENG = f"""#!{sys.executable}
import json, os, subprocess, sys
words = sys.argv[1:]
with open(os.environ["BISHENG_LOG"], "a") as f:
    f.write(json.dumps([words, open(words[-3]).read()]) + "\\n")
if os.environ.get("BISHENG_FAILS"):
    open(words[-1], "w").write("half a library")
    sys.exit("kernel.cpp:1: error: no such instruction")
subprocess.run(["cc", "-shared", "-xc", "/dev/null", "-o", words[-1]], check=True, env={{"PATH": "/usr/bin:/bin"}})
"""


def text(schedule="fused", **options):
    return render(Build("pto", **{"chunk": 32, "schedule": schedule, "head_dim_k": 32, "head_dim_v": 32} | options))


@pytest.fixture
def fresh(tmp_path):
    """Imports a module's text as a new process would, with nothing loaded yet."""
    def load(given):
        fresh.n += 1
        return import_path(cache.write(tmp_path / f"module_{fresh.n}.py", given))
    fresh.n = 0
    return load


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """A toolkit, PTO-ISA and bisheng, as far as a module sees; returns what bisheng was called with so far."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "bisheng").write_text(BISHENG)
    (folder / "bisheng").chmod(0o755)
    log = tmp_path / "log"
    for name, value in (("PATH", folder), ("BISHENG_LOG", log), ("GDN_CODEGEN_CACHE", tmp_path / "cache"),
                        ("ASCEND_TOOLKIT_HOME", "/cann"), ("PTO_LIB_PATH", "/pto")):
        monkeypatch.setenv(name, str(value))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def libraries(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix not in (".lock", ".sum"))


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_command(fresh, toolchain):
    words = fresh(text()).compile_command("a.cpp", "a.so")
    assert words[0] == "bisheng" and {"-fPIC", "-shared", "-xcce", "-DMEMORY_BASE", "-O2", "--cce-aicore-arch=dav-c220",
                                      "-std=gnu++17"} <= set(words)
    assert [w for w in words if w.startswith("-I")] == [
        "-I/pto/include", "-I/cann/include", "-I/cann/pkg_inc", "-I/cann/pkg_inc/runtime", "-I/cann/pkg_inc/profiling",
        "-I/usr/local/Ascend/driver/kernel/inc"]
    tuning = [b for a, b in pairwise(words) if a == "-mllvm"]
    assert [t.split("=")[0] for t in tuning] == ["-cce-aicore-stack-size", "-cce-aicore-function-stack-size",
                                                 "-cce-aicore-record-overflow", "-cce-aicore-dcci-insert-for-scalar"]
    assert words[-3:] == ["a.cpp", "-o", "a.so"]


def test_bisheng_is_given_the_source_and_that_command(fresh, toolchain):
    module = fresh(text())
    module._launcher.library("npu")
    ((words, source),) = toolchain()
    assert source == module.SOURCE and ["bisheng", *words] == module.compile_command(words[-3], words[-1])


# --- the cache -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_library_is_made_once_for_its_content(fresh, toolchain, tmp_path, monkeypatch):
    first = text()
    for given, runs in ((first, 1), (first, 1), (text(layout="bhtd"), 2), (first, 2),
                        (first.replace('"-O2"', '"-O3"'), 3)):
        fresh(given)._launcher.library("npu")
        assert len(toolchain()) == runs
    monkeypatch.setenv("PTO_LIB_PATH", "/another")
    fresh(first)._launcher.library("npu")
    assert len(toolchain()) == 4
    names = libraries(tmp_path)
    assert len(names) == 4 and all(re.fullmatch(r"[0-9a-f]{24}_npu\.so", n) for n in names)


# --- what is missing -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("missing", ["ASCEND_TOOLKIT_HOME", "PTO_LIB_PATH"])
def test_without_toolkit_or_headers_it_says_what_to_set(fresh, toolchain, tmp_path, monkeypatch, missing):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv(missing)
    with pytest.raises(RuntimeError, match=r"NPU tensors need CANN and PTO-ISA: set ASCEND_TOOLKIT_HOME .* and PTO_LIB_PATH"):
        fresh(text())._launcher.library("npu")
    assert not toolchain() and not libraries(tmp_path)


def test_without_bisheng_it_names_it(fresh, toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="NPU tensors need bisheng, the compiler of the CANN toolkit, on PATH"):
        fresh(text())._launcher.library("npu")
    assert not libraries(tmp_path)


def test_a_failure_of_bisheng_is_shown_and_leaves_nothing(fresh, toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("BISHENG_FAILS", "1")
    module = fresh(text())
    with pytest.raises(RuntimeError, match=r"bisheng failed:\nkernel.cpp:1: error: no such instruction"):
        module._launcher.library("npu")
    assert not libraries(tmp_path)
    monkeypatch.delenv("BISHENG_FAILS")
    module._launcher.library("npu")
    assert len(toolchain()) == 2 and len(libraries(tmp_path)) == 1


# --- launches --------------------------------------------------------------------------------------------------------
def test_launch_arguments(fresh, monkeypatch):
    """Pointers, with those to masks and the table, then sizes, flags and numbers; every kernel of the schedule, in order."""
    module = fresh(text("staged"))
    seen = []

    class Npu:
        type = "npu"

    class Library:
        def __getattr__(self, name):
            return lambda *a: seen.append((name, a)) or 0

    properties = SimpleNamespace(cube_core_num=20)
    fake = SimpleNamespace(current_stream=lambda: SimpleNamespace(_as_parameter_="stream"),
                           get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    monkeypatch.setattr(module._launcher, "library", lambda kind: Library())
    npu = Npu()
    monkeypatch.setattr(module._launcher, "filled", lambda name, device: torch.zeros(1))
    monkeypatch.setattr(torch, "tensor", lambda data, device=None, of=torch.tensor, **options: of(data, **options))
    cu = torch.tensor([0, 40], dtype=torch.int32)
    for name, _, _, tensors, scalars in module.TABLES.kernels:
        launch = module._launcher(name, 100, (1, 40, 0, 1, 2, 2), [1], npu)
        launch([torch.zeros(1)] * len(tensors), cu, [0.5] * len(scalars))
    assert [n for n, _ in seen] == [f"call_{s}" for s, *_ in module.SYMBOLS.values()]
    for (name, _, _, tensors, scalars), (_, a) in zip(module.TABLES.kernels, seen, strict=True):
        _, kinds, used, masks, strides = module.SYMBOLS[name]
        assert a[0].value == 20 and a[1] == "stream" and len(tensors) == len(kinds) + bool(used) and not strides
        more = bool(masks) + bool(used)
        assert len(a) == 2 + len(tensors) + more + 1 + 6 + 1 + len(scalars)
        assert a[2 + len(tensors) + more].value == cu.data_ptr()


# --- imports ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_torch_npu_is_not_imported_for_cpu_tensors(tmp_path):
    """Nor on import: here importing torch_npu fails. An NPU tensor exists only where torch_npu was imported before."""
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('torch_npu was imported')\n")
    for schedule in ON_CORES:
        (tmp_path / f"alone_{schedule}.py").write_text(text(schedule))
    code = ("import importlib, torch\n"
            "r = lambda *s: torch.nn.functional.normalize(torch.randn(*s), dim=-1).half()\n"
            f"for name in {list(ON_CORES)}:\n"
            "    alone = importlib.import_module(f'alone_{name}')\n"
            "    o, _ = alone.chunk_gated_delta_rule(r(1, 40, 1, 32), r(1, 40, 1, 32), r(1, 40, 2, 32), -torch.rand(1, 40, 2),\n"
            "                                        torch.rand(1, 40, 2))\n"
            "    print(bool(o.isfinite().all()))\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert done.returncode == 0 and done.stdout.split() == ["True"] * len(ON_CORES), done.stderr[-2000:]
