"""Triton assembles kernels for Hopper by the newer of the two assemblers that it brings, where the other one is wrong."""
import os
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.nvidia import compiler
from triton.runtime.driver import driver

from gdn_codegen.host import triton as host
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import write
from gdn_codegen.tools import compile_ahead as ahead


@pytest.fixture
def gpu(monkeypatch):
    """A function that lets there be a GPU, and assemblers of these releases, of which no file is run."""
    def there(arch="sm_90", own="12.8", other="12.9", cuda="12.8"):
        driver.set_active(ahead._Driver(ahead._target(arch)))
        monkeypatch.setattr(knobs.NvidiaTool, "from_path", lambda path: SimpleNamespace(
            path=path, version=other if Path(path).name.startswith("ptxas-blackwell") else own))
        monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    yield there
    driver.set_active(None)


@pytest.mark.parametrize("about, needed", [
    ({}, True), ({"cuda": "13.0"}, True), ({"cuda": None}, True), ({"other": "13.1", "cuda": "13.0"}, True),
    ({"other": "13.1"}, False), ({"own": "12.9", "other": "13.3"}, False), ({"other": "12.8"}, False), ({"arch": "sm_80"}, False),
    ({"arch": "sm_100"}, False), ({"arch": "gfx942"}, False)], ids=str)
def test_hopper_alone_needs_another_than_12_8(gpu, about, needed):
    """Triton 3.6 has those of CUDA 12.8 and 12.9, 3.7 of 12.8 and 13.1 (none for torch of CUDA 12), 3.8 of 12.9 and 13.3."""
    gpu(**about)
    path = host._another_ptxas()
    assert Path(path).name == ("ptxas-blackwell" if needed else ""), "where there is one, it is Triton's own"
    with host._assembled() as options:
        assert Path(knobs.nvidia.ptxas.path).name == ("ptxas-blackwell" if needed else "ptxas")
        assert options == ({"ptx_options": "--disable-warnings"} if needed else {})


def test_what_the_user_asks_for_is_taken(gpu, monkeypatch):
    gpu()
    monkeypatch.setattr(knobs.nvidia, "ptxas_options", "-O2")
    with host._assembled() as options:
        assert options == {"ptx_options": "-O2 --disable-warnings"}
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/bin/my-ptxas")
    with host._assembled() as options:
        assert knobs.nvidia.ptxas.path == "/usr/bin/my-ptxas" and options == {}


def test_it_is_so_while_some_thread_compiles_and_no_longer(gpu):
    """Also after an error. Nothing goes to the environment, which other processes would get."""
    gpu()
    name = lambda: Path(knobs.nvidia.ptxas.path).name
    found, ends = [], threading.Event()

    def compiles():
        with host._assembled() as options:
            found.append((name(), options))
            ends.wait(60)
    with ExitStack() as first:
        first.enter_context(host._assembled())
        other = threading.Thread(target=compiles)
        other.start()
        while not found:
            pass
        assert found == [("ptxas-blackwell", {"ptx_options": "--disable-warnings"})]
        assert "TRITON_PTXAS_PATH" not in os.environ
    assert name() == "ptxas-blackwell"
    ends.set()
    other.join()
    assert name() == "ptxas" and "ptxas" not in vars(knobs.nvidia)
    with pytest.raises(KeyError), host._assembled():
        raise KeyError
    assert name() == "ptxas"


@pytest.mark.slow
def test_kernels_are_assembled_by_it_and_kept_apart(tmp_path, monkeypatch):
    """With the real assemblers, of which the newer one is taken to be needed. Triton 3.9 takes it for Hopper itself."""
    own, other = (tuple(map(int, x.version.split("."))) for x in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell))
    if own >= other or "TRITON_PTXAS_PATH" in os.environ:
        pytest.skip("needs Triton's two assemblers, of which one is newer")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: knobs.nvidia.ptxas)
    path = write(Build("triton", chunk=16, head_dim_k=16, head_dim_v=16), tmp_path)
    made, text = [], path.read_text()
    monkeypatch.setattr(ahead._Compiles, "__getitem__", lambda self, grid: lambda *args, **options: made.append(
        self.kernel.warmup(*args, grid=grid, **options)) or made[-1])
    for needs in (own, other):  # from which release on an assembler is right
        path.write_text(re.sub(r"_PTXAS, _APART = \(12, 9\)", f"_PTXAS, _APART = {needs}", text))
        list(ahead.triton(path, "sm_90", [(1, 2)]))
    of = [{(x.name, x.hash) for x in half} for half in (made[:len(made) // 2], made[len(made) // 2:])]
    assert {n for n, _ in of[0]} == {n for n, _ in of[1]} and not of[0] & of[1], "two keys of one kernel"
    version = lambda x: tuple(map(int, re.search(r"\.version (\d+)\.(\d+)", x.asm["ptx"]).groups()))
    assert max(map(version, made[:len(made) // 2])) < min(map(version, made[len(made) // 2:]))
    assert all(len(x.asm["cubin"]) > 1000 for x in made) and "ptxas" not in vars(knobs.nvidia)
