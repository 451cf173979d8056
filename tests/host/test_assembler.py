"""Triton assembles kernels for Hopper by the newer of the two assemblers that it brings, where the other one is wrong."""
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.nvidia import compiler

from gdn_codegen.host import triton as host
from gdn_codegen.runtime.admit import assembler
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import write
from gdn_codegen.tools import compile_ahead as ahead
from gdn_codegen.tools.check_triton import compiling_for

FLAGS = {"ptx_options": "-w --disable-warnings"}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """What Triton assembles by is that of Triton again after a test."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    kept = compiler.get_ptxas, compiler.CUDABackend.make_cubin
    yield
    compiler.get_ptxas, compiler.CUDABackend.make_cubin = kept
    if hasattr(compiler, "_gdn_codegen_newer_ptxas"):
        del compiler._gdn_codegen_newer_ptxas


@pytest.fixture
def gpu(monkeypatch):
    """A function that gives a context in which there is a GPU, and assemblers of these releases, of which no file is run. None:
    the file is not there."""
    def there(arch="sm_90", own="12.8", other="12.9", cuda="12.8"):
        def from_path(path):
            release = other if Path(path).name.startswith("ptxas-blackwell") else own
            return release and SimpleNamespace(path=path, version=release)
        monkeypatch.setattr(knobs.NvidiaTool, "from_path", from_path)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        tools = knobs.nvidia
        monkeypatch.setattr(compiler, "get_ptxas", lambda arch: tools.ptxas_blackwell if arch >= 100 else tools.ptxas)
        return compiling_for(ahead._target(arch))
    return there


@pytest.mark.parametrize("about, needed", [
    ({}, True), ({"cuda": "13.0"}, True), ({"cuda": None}, True), ({"other": "13.1", "cuda": "13.0"}, True),
    ({"other": "13.1"}, False), ({"own": "12.9", "other": "13.3"}, False), ({"other": "12.8"}, False), ({"other": None}, False),
    ({"arch": "sm_80"}, False), ({"arch": "sm_100"}, False), ({"arch": "gfx942"}, False)], ids=str)
def test_hopper_alone_needs_another_than_12_8(gpu, about, needed):
    """Triton 3.6 has those of CUDA 12.8 and 12.9, 3.7 of 12.8 and 13.1 (none for torch of CUDA 12), 3.8 of 12.9 and 13.3."""
    with gpu(**about):
        assert host._newer_ptxas_options() == (FLAGS if needed else {})
        release = {"sm_100": "12.9", "gfx942": ""}.get(about.get("arch"), about.get("own", "12.8"))
        assert host._ptxas() == (about.get("other", "12.9") if needed else release)
        assert assembler(host, torch.device("cuda")) == {"ptxas": host._ptxas()} and assembler(host, torch.device("cpu")) == {}


def test_what_the_user_asks_for_is_taken(gpu, monkeypatch):
    with gpu():
        monkeypatch.setattr(knobs.nvidia, "ptxas_options", "-O2")
        assert host._newer_ptxas_options() == {"ptx_options": f"-O2 {FLAGS['ptx_options']}"}
        monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/bin/my-ptxas")
        assert host._newer_ptxas_options() == {}
        monkeypatch.delenv("TRITON_PTXAS_PATH")
        with knobs.nvidia.scope():
            vars(knobs.nvidia)["ptxas"] = "/usr/bin/my-ptxas"  # as with knobs.propagate_env = False
            assert host._newer_ptxas_options() == {}


def test_the_flags_choose_whatever_else_is_set_or_compiles(gpu, monkeypatch):
    """Also in other threads, within a scope of knobs, and after an error. Kernels without the flags are assembled as before."""
    found = []

    def make_cubin(self, src, metadata, opt, capability):
        found.append(Path(compiler.get_ptxas(90).path).name)
        if src == "bad":
            raise KeyError
    monkeypatch.setattr(compiler.CUDABackend, "make_cubin", make_cubin)
    make = lambda src, flags: compiler.CUDABackend.make_cubin(None, src, {}, SimpleNamespace(ptx_options=flags), 90)
    with gpu():
        own = compiler.get_ptxas
        for _ in range(2):  # once for all generated modules
            assert host._newer_ptxas_options() == FLAGS
        with knobs.nvidia.scope():
            make("", FLAGS["ptx_options"])
        with pytest.raises(KeyError):
            make("bad", FLAGS["ptx_options"])
        make("", None)
        make("", "--disable-warnings")
        with ThreadPoolExecutor(1) as other:
            other.submit(make, "", f"-O2 {FLAGS['ptx_options']}").result()
        assert found == ["ptxas-blackwell"] * 2 + ["ptxas"] * 2 + ["ptxas-blackwell"]
        assert Path(compiler.get_ptxas(90).path).name == "ptxas" and compiler.get_ptxas is not own
    assert "ptxas" not in vars(knobs.nvidia) and "TRITON_PTXAS_PATH" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ours", "another"])
def test_kernels_are_assembled_by_it_and_kept_apart(first, tmp_path, monkeypatch):
    """With the real assemblers, of which the newer one is taken to be needed. Keys do not depend on what was compiled before."""
    release = lambda tool: tuple(map(int, tool.version.split(".")))
    own, other = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    if release(own) >= release(other):
        pytest.skip("needs Triton's two assemblers, of which one is newer")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: own)  # Triton 3.9 takes the newer one for Hopper itself
    compiler.get_ptxas_version.cache_clear()
    used, run = [], subprocess.run

    def seen(command, *args, **options):
        if "--version" not in command:
            used.append(command[0])
        return run(command, *args, **options)
    monkeypatch.setattr(compiler.subprocess, "run", seen)
    path = write(Build("triton", chunk=16, head_dim_k=16, head_dim_v=16), tmp_path)
    text, made = path.read_text(), []
    monkeypatch.setattr(ahead._Compiles, "__getitem__", lambda self, grid: lambda *args, **options: made.append(
        self.kernel.warmup(*args, grid=grid, **options)) or made[-1])
    found = {}
    for needs in (other, own) if first == "ours" else (own, other):  # from which release on an assembler is right
        used.clear()
        made.clear()
        path.write_text(re.sub(r"_LEAST_PTXAS, _NEWER_FLAGS = \(12, 9\)", f"_LEAST_PTXAS, _NEWER_FLAGS = {release(needs)}", text))
        list(ahead.triton(path, "sm_90", [(1, 2)]))
        assert used and set(used) == {needs.path} and all(len(x.asm["cubin"]) > 1000 for x in made)
        found[needs.path] = {(x.name, x.hash) for x in made}
    a, b = found.values()
    assert {n for n, _ in a} == {n for n, _ in b} and not a & b, "two keys of one kernel"
    assert compiler.get_ptxas_version(90) == run([own.path, "--version"], capture_output=True, text=True).stdout
    compiler.get_ptxas_version.cache_clear()
