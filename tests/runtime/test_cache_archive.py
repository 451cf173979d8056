"""`gdn_codegen cache export` and `import`: the same files elsewhere, and nothing of archives that do not match."""
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from gdn_codegen.cli import main
from gdn_codegen.runtime import cache
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import cached
from gdn_codegen.tools import cache_archive
from gdn_codegen.tools.compile_ahead import compile_ahead, fresh

SMALL = dict(chunk=16, head_dim_k=16, head_dim_v=16)


def files(folder: Path):
    return {x.relative_to(folder).as_posix(): x.read_bytes() for x in folder.rglob("*") if x.is_file() and x.suffix != ".lock"}


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A cache with a module, what was compiled of it, a verdict, a launcher, a table of tune, and Triton's cache beside it."""
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "of_triton"))
    module = cached(Build("triton", **SMALL))
    cache.made(module.with_suffix(".kernels") / "G_0123456789abcdef.so", lambda to: to.write_bytes(b"\0library"))
    cache.write(module.with_suffix(".verdicts") / "0123456789abcdef.json", "{}")
    launcher = cache.folder() / "native_launcher" / "native_launcher_0123456789abcdef.so"
    cache.made(launcher, lambda to: to.write_bytes(b"so"))
    cache.write(cache.folder() / "choices" / "triton" / "h_gdn_codegen-0.2.0.json", "{}")
    cache.write(launcher.with_name(cache.WRITING + "half"), "half")  # a killed process's
    for folder, path in (("A" * 52, module), ("B" * 52, tmp_path / "another" / "modules" / "triton" / "x.py")):
        kernel = tmp_path / "of_triton" / folder
        cache.write(kernel / "__grp__G.json", json.dumps({"child_paths": {"G.cubin": str(kernel / "G.cubin")}}))
        cache.write(kernel / "G.cubin", "cubin")
        cache.write(kernel / "lock", "")
        cache.write(kernel / "G.ttir", f'#loc = loc("{path}":1:0)')
    return module


@pytest.fixture
def elsewhere(full, tmp_path, monkeypatch):
    """The archive of `full`, and another machine's empty caches."""
    path = tmp_path / "a.tar.gz"
    assert main(["cache", "export", str(path), "--device", "NVIDIA H200"]) == 0
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path / "there"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton_there"))
    return path


def test_what_is_exported_is_what_is_imported(elsewhere, tmp_path, capsys):
    assert main(["cache", "import", str(elsewhere), "--device", "NVIDIA H200"]) == 0
    was = files(tmp_path / "cache")
    there = files(tmp_path / "there")
    left_out = {n for n in was if n.startswith("choices/") or cache.WRITING in n}
    assert there == {n: x for n, x in was.items() if n not in left_out} and len(left_out) == 2
    library = next((tmp_path / "there").rglob("G_*.so"))
    assert cache.whole(library), "its sum came with it"
    kernel = "A" * 52
    of_triton = {f"{kernel}/{n}": (tmp_path / "of_triton" / kernel / n).read_bytes() for n in ("G.cubin", "G.ttir")}
    paths = json.dumps({"child_paths": {"G.cubin": str(tmp_path / "triton_there" / kernel / "G.cubin")}}).encode()
    assert files(tmp_path / "triton_there") == {**of_triton, f"{kernel}/__grp__G.json": paths}
    capsys.readouterr()
    library.write_bytes(b"damaged")
    next((tmp_path / "there").rglob("*.json")).write_text("kept")
    assert main(["cache", "import", str(elsewhere), "--device", "NVIDIA H200"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "modules: 1 files, 3 were there", "native_launcher: 0 files, 2 were there", "triton: 0 files, 3 were there"]
    assert cache.whole(library) and next((tmp_path / "there").rglob("*.json")).read_text() == "kept"


def test_kinds_are_exported_by_name(full, tmp_path, capsys):
    assert main(["cache", "export", str(tmp_path / "a.tar.gz"), "choices", "native_launcher"]) == 0
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert {n.split("/")[0] for n in tar.getnames()} == {"manifest.json", "choices", "native_launcher"}
    assert main(["cache", "export", str(tmp_path / "b.tar.gz"), "pto"]) == 2 and not (tmp_path / "b.tar.gz").exists()
    assert "kinds: got pto, of which" in capsys.readouterr().err


@pytest.mark.parametrize("there, said", [
    ({"device": "NVIDIA H100"}, "got an archive whose modules are for NVIDIA H200; accepted: one for NVIDIA H100"),
    ({"triton": "1.0"}, "triton: got an archive whose modules are for"),
    ({"python": "3.1"}, "python: got an archive whose native_launcher are for"),
    ({"torch": ""}, "accepted: one for none, which is here"),
    ({"gdn_codegen": "9"}, "gdn_codegen: got an archive")])
def test_an_archive_for_another_machine_is_refused(there, said, elsewhere, tmp_path, monkeypatch, capsys):
    here = cache_archive.facts("NVIDIA H200")
    monkeypatch.setattr(cache_archive, "facts", lambda device: {**here, **there})
    assert main(["cache", "import", str(elsewhere)]) == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "there").exists() and not (tmp_path / "triton_there").exists()


def changed(path, change):
    """The archive with its members changed. change: takes and gives names with contents."""
    with tarfile.open(path) as tar:
        data = change({m.name: tar.extractfile(m).read() for m in tar})
    with tarfile.open(path, "w:gz") as tar:
        for name, x in data.items():
            member = tarfile.TarInfo(name)
            member.size = len(x)
            tar.addfile(member, io.BytesIO(x))


def with_file(name, kind="modules"):
    """A change that adds a file under this name, also to the manifest."""
    def change(data):
        manifest = json.loads(data["manifest.json"])
        manifest["files"][name] = [kind, cache_archive.hashlib.sha256(b"x").hexdigest()]
        return {**data, "manifest.json": json.dumps(manifest).encode(), name: b"x"}
    return change


@pytest.mark.parametrize("change", [
    lambda d: {n: x[:-1] if n.endswith(".so") else x for n, x in d.items()},
    lambda d: {n: x for n, x in d.items() if not n.endswith(".py")},
    lambda d: {n: x for n, x in d.items() if n != "manifest.json"},
    lambda d: {**d, "manifest.json": b"{}"}, lambda d: {**d, "modules/triton/more.py": b"x"},
    with_file("../outside.py"), with_file("/etc/outside.py"), with_file("modules/triton/outside.py"),
    with_file("modules/../../outside_0123456789abcdef.py"), with_file("triton/outside/x", "triton"), with_file("x", "nothing"),
    with_file("modules/triton/more_0123456789abcdef.kernels/../../../../outside.so")])
def test_an_archive_that_no_export_wrote_is_refused(change, elsewhere, tmp_path, capsys):
    changed(elsewhere, change)
    assert main(["cache", "import", str(elsewhere), "--device", "NVIDIA H200"]) == 2
    assert "accepted: a file that gdn_codegen cache export wrote" in capsys.readouterr().err
    assert not (tmp_path / "there").exists() and not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize("size", [0, 10, 1000])
def test_a_part_of_an_archive_is_refused(size, elsewhere, tmp_path, capsys):
    elsewhere.write_bytes(elsewhere.read_bytes()[:size])
    assert main(["cache", "import", str(elsewhere), "--device", "NVIDIA H200"]) == 2 and "file: got" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_a_changed_byte_is_seen(elsewhere, tmp_path, capsys):
    whole = elsewhere.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 97)):
        elsewhere.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1:])
        status = main(["cache", "import", str(elsewhere), "--device", "NVIDIA H200"])
        assert status == 2 and "file: got" in capsys.readouterr().err or files(tmp_path / "there") == {
            n: x for n, x in files(tmp_path / "cache").items() if not n.startswith("choices/") and cache.WRITING not in n}


@pytest.mark.slow
def test_triton_finds_imported_kernels(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    for folder in ("here", "there"):
        monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path / folder))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"triton_{folder}"))
        if folder == "here":
            b = Build("triton", schedule="fused", **SMALL)
            path = cached(b)
            assert list(compile_ahead(b, path, "sm_90a", [(1, 2)]))
            assert main(["cache", "export", str(tmp_path / "a.tar.gz"), "--device", "NVIDIA H200"]) == 0
    shutil.rmtree(tmp_path / "here")
    shutil.rmtree(tmp_path / "triton_here")
    assert main(["cache", "import", str(tmp_path / "a.tar.gz"), "--device", "NVIDIA H200"]) == 0
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **k: hits.append(k["cache_hit"]))
    fresh(cached(b))
    assert list(compile_ahead(b, cached(b), "sm_90a", [(1, 2)])) and hits and all(hits)


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["cache", "import", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gdn_codegen: file: got ") and "cannot be read (No such file or directory); accepted: " in said
