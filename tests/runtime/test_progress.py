"""Messages: progress of long work, missing toolchains, full disks."""
import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gdn_codegen import chunk_gated_delta_rule, cli
from gdn_codegen.runtime import cache, load, progress, targets
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.call.compiling import DoesNotCompile, compiling
from gdn_codegen.runtime.progress import first_call, under_way
from gdn_codegen.targets import machine
from gdn_codegen.tools import check, plots, tune_log

SMALL = ["--chunk", "16", "--head-dim-k", "16", "--head-dim-v", "16"]


# --- progress --------------------------------------------------------------------------------------------------------
def test_what_takes_long_is_said_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    with under_way("outer"), under_way("inner"):
        time.sleep(0.2)
    with under_way("another"):
        time.sleep(0.2)
    out, err = capsys.readouterr()
    assert not out and err == "gdn_codegen: outer: 0 s so far\ngdn_codegen: another: 0 s so far\n"


def test_what_is_quick_is_not_said(capsys):
    with under_way("nothing much"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal, debug, said", [(False, "0", False), (True, "0", True), (False, "1", True)])
def test_a_library_is_silent_in_logs(terminal, debug, said, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setenv("GDN_DEBUG", debug)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with first_call("first call"):
        time.sleep(0.2)
    assert bool(capsys.readouterr().err) == said


def test_a_closed_stderr_stops_nothing():
    code = ("import sys, time; from gdn_codegen.runtime import progress; progress.PATIENCE = 0.01; sys.stderr.close()\n"
            "with progress.under_way('x'): time.sleep(0.1)\nprint('done')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "done\n"


# --- what is skipped -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict", [False, True])
def test_a_target_that_did_not_run_is_no_pass(strict, monkeypatch, capsys):
    here = {"triton": "its package is missing: pip install x", "tilelang": "a C++ compiler is missing", "pto": ""}
    monkeypatch.setattr(targets, "lacks", lambda target, device: here[target])
    monkeypatch.setattr("gdn_codegen.tools.verify.lines", lambda builds, *a: iter([(b.target, True) for b in builds]))
    assert cli.main(["verify", *["--strict"] * strict]) == strict
    *_, run, verdict = capsys.readouterr().out.splitlines()
    assert (run, verdict) == ("pto", "all comparisons that ran hold; not run: triton, tilelang")
    assert cli.main(["verify", "--target", "triton"]) == 1
    out = capsys.readouterr().out
    assert "triton: not run: its package is missing: pip install x\n" in out and out.endswith("FAILED: nothing ran\n")


def test_a_device_that_a_target_has_no_kernels_for_is_refused(capsys):
    assert cli.main(["verify", "--target", "pto", "--device", "cuda"]) == 2
    assert "device: got 'cuda'; accepted for pto: cpu" in capsys.readouterr().err


def test_strict_means_nothing_without_check(capsys):
    assert cli.main(["build", "--strict"]) == 2
    assert "strict: got True without --check; accepted: with --check" in capsys.readouterr().err


# --- toolchains ------------------------------------------------------------------------------------------------------
def call(target):
    x = torch.randn(1, 5, 1, 32).half()
    return chunk_gated_delta_rule(x, x, x, -torch.rand(1, 5, 1), torch.rand(1, 5, 1), target=target)


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_a_package_that_is_missing_is_named_with_what_brings_it(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "version", lambda name: "")
    launch.forget()
    with pytest.raises(ValueError, match=rf"target: got '{target}', .*pip install 'gdn_codegen\[{target}\]'"):
        call(target)
    assert check.missing(target) == f"pip install 'gdn_codegen[{target}]'"
    words = ["build", "--target", target, *SMALL, "--out", str(tmp_path), "--compile", "sm_90"]
    assert cli.main([*words, *["--compile-heads", "1/2"] * (target == "triton")]) == 2
    assert f"a toolchain is not installed; accepted: the same after installing it: pip install 'gdn_codegen[{target}]'" in \
        capsys.readouterr().err


def test_a_module_whose_package_is_missing_says_what_brings_it(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda name: "")
    monkeypatch.setitem(sys.modules, "triton", None)
    (tmp_path / "m.py").write_text("import triton\n")
    with pytest.raises(ValueError, match=r"target: got triton, .*pip install 'gdn_codegen\[triton\]'"):
        load.import_path(tmp_path / "m.py")


@pytest.mark.parametrize("target, device, said", [
    ("tilelang", "cuda", "nvcc is missing: install a CUDA toolkit"),
    ("tilelang", "cpu", r"a C\+\+ compiler is missing: install g"),
    ("pto", "cpu", r"a C\+\+ compiler is missing: install g"), ("pto", "npu", "bisheng is missing: install the CANN toolkit")])
def test_a_first_call_that_fails_for_want_of_a_tool_says_so(target, device, said, tmp_path, monkeypatch):
    """In place of the toolchain's own error; with the tool there, that one."""
    m = type("m", (), {"__file__": str(tmp_path / target / "x.py")})
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda n: None)
    with pytest.raises(ValueError, match=f"target: got '{target}', and {said}"):
        with compiling(m, device):
            raise AssertionError("theirs")
    monkeypatch.setattr(shutil, "which", lambda n: n)
    with pytest.raises(AssertionError, match="theirs"):
        with compiling(m, device):
            raise AssertionError("theirs")


class OutOfResources(Exception):
    """As Triton's."""

    required, name, limit = 300, "shared memory", 200


class InternalError(Exception):
    """As TVM's."""


@pytest.mark.parametrize("error, said", [
    (OutOfResources(), "takes 300 of shared memory, and the GPU has 200"),
    (InternalError("no available layout found"), "its compiler does not take .*no available layout"),
    (RuntimeError("ptxas fatal"), "its compiler does not take")])
def test_a_build_that_does_not_compile_is_refused_by_name(error, said, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda n: n)
    m = type("m", (), {"__file__": str(tmp_path / "triton" / "gdn_c64_bthd.py")})
    with pytest.raises(DoesNotCompile, match=f"schedule: got gdn_c64_bthd for triton, which.*{said}.*accepted: another schedule"):
        with compiling(m, "cuda"):
            raise error
    space = {"__name__": "tilelang.layout"}
    exec("def fails(): raise ValueError('not a layout')", space)
    with pytest.raises(DoesNotCompile, match=r"its compiler does not take .*not a layout"), compiling(m, "cuda"):
        space["fails"]()
    with pytest.raises(InternalError), compiling(m, "cuda"):
        raise InternalError("CUDA error: an illegal memory access")
    exec("def faults(): raise RuntimeError('Triton Error [CUDA]: an illegal memory access')", space)
    with pytest.raises(RuntimeError, match="illegal memory access"), compiling(m, "cuda"):
        space["faults"]()


@pytest.mark.slow
@pytest.mark.skipif(not targets.runs("tilelang", "cpu"), reason="needs TileLang and a C++ compiler")
def test_tilelang_without_a_compiler_says_what_to_install(tmp_path):
    """A call in a process of its own, whose caches are empty and whose PATH has nothing."""
    code = ("import torch; from gdn_codegen import chunk_gated_delta_rule as f\n"
            "x = torch.randn(1, 5, 1, 32).half(); g = x[..., 0]\ntry: f(x, x, x, -g.abs(), g.abs(), target='tilelang')\n"
            "except ValueError as e: print(e)")
    env = {n: v for n, v in os.environ.items() if n not in ("CXX", "CC")} | {
        "PATH": str(tmp_path), "TILELANG_CACHE_DIR": str(tmp_path / "t"), "GDN_CODEGEN_CACHE": str(tmp_path / "g")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], env=env)
    assert "target: got 'tilelang', and a C++ compiler is missing: install g++" in done.stdout, done.stderr


# --- a full disk -----------------------------------------------------------------------------------------------------
def full(*a, **k):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_path(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "x"
    for write in (lambda: cache.write(path, "text"), lambda: cache.made(path, lambda p: p.write_text("text")),
                  lambda: tune_log.Log(path, {})._write(b"x")):
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            write()
    assert cli.main(["build", "--target", "pto", *SMALL, "--out", str(tmp_path)]) == 2
    assert f"No space left on device: '{tmp_path}/pto/gdn_c16_bthd_k16v16.py'" in capsys.readouterr().err
    assert sorted(p.suffix for p in tmp_path.rglob("*") if p.is_file()) == ["", ".lock"]  # the log's, and made's


def test_a_plot_names_its_path(tmp_path):
    figure = type("figure", (), {"tight_layout": lambda self: None, "savefig": full})()
    with pytest.raises(OSError, match=r"No space left on device: .*x\.png"):
        plots._save(None, figure, tmp_path / "x.png")
