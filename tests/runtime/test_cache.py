"""Artefacts on disk: made once among processes, mended when damaged, rid of what killed processes left; `gdn_codegen cache`."""
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from gdn_codegen import pto_sim
from gdn_codegen.cli import main
from gdn_codegen.runtime import cache, targets
from gdn_codegen.runtime.build import LONGEST_NAME, Build
from gdn_codegen.runtime.load import cached, import_path
from gdn_codegen.schedule import named
from gdn_codegen.tools import cache_command

#: Stands in for a compiler: writes down that it ran, takes a while, and makes what it is asked for.
COMPILER = f"""#!{sys.executable}
import os, sys, time
with open(os.environ["COMPILER_LOG"], "a") as f:
    f.write("x")
time.sleep(0.2)
open(sys.argv[sys.argv.index("-o") + 1], "w").write("whole")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(path))
    return path


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    log = tmp_path / "log"
    monkeypatch.setenv("COMPILER_LOG", str(log))
    monkeypatch.setenv("CXX", str(path))
    return lambda: len(log.read_text()) if log.exists() else 0


# --- made ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(b""), lambda p: p.write_bytes(p.read_bytes()[:-1] + b"!"),
                                    lambda p: p.unlink(), lambda p: cache.sum_of(p).unlink(),
                                    lambda p: cache.sum_of(p).write_bytes(b"\xff")])
def test_what_is_damaged_is_made_anew(tmp_path, damage):
    path = cache.made(tmp_path / "a.so", lambda to: to.write_text("whole"))
    damage(path)
    assert cache.made(path, lambda to: to.write_text("again")).read_text() == "again" and cache.whole(path)
    assert cache.made(path, lambda to: 1 / 0).read_text() == "again"


def test_a_file_system_takes_the_name_of_any_module(folder):
    """It takes 255 characters. A gradient on Hopper had more, and could not be called."""
    groups = ("@gate_sum", "@inverse", "@summand", "@factor", "@early", "@keyless", "@operand"), ("@output", "@state")
    plan = replace(named("operand_walk"), kernels=groups, stages=3, warps=4, residuals="@right_side,@solution")
    builds = [Build("triton", 32, algorithm="kimi_delta_attention", schedule=replace(plan, partition=x), dtype="bfloat16",
                    head_dim_k=64, head_dim_v=64) for x in (None, "decay")]
    names = {b.name for b in builds}
    assert len(names) == 2 and all(len(n) <= LONGEST_NAME for n in names)
    assert any(len(n) == LONGEST_NAME for n in names)
    for b in builds:
        import_path(cached(b))


def test_threads_make_one_file_once(tmp_path):
    times = []

    def make(to):
        times.append(1)
        time.sleep(0.1)
        to.write_text("whole")
    many = [threading.Thread(target=cache.made, args=(tmp_path / "a.so", make)) for _ in range(8)]
    [t.start() for t in many]
    [t.join() for t in many]
    assert len(times) == 1


def test_what_killed_processes_left_goes_with_the_next_make_and_what_others_make_stays(tmp_path):
    code = ("import sys, time; from pathlib import Path; from gdn_codegen.runtime import cache\n"
            "def make(p):\n    p.write_text('half'); print('started', flush=True); time.sleep(60)\n"
            "cache.made(Path(sys.argv[1]), make)\n")

    def start(name):
        p = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)], stdout=subprocess.PIPE, text=True)
        assert p.stdout.readline().strip() == "started"
        return p
    killed, at_work = start("killed.so"), start("at_work.so")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    stale, new = tmp_path / f"{cache.WRITING}a.x", tmp_path / f"{cache.WRITING}b.x"
    for x in (stale, new):
        x.write_text("half")
    os.utime(stale, (0, 0))
    try:
        assert (tmp_path / f"{cache.MAKING}killed.so").exists()
        cache.made(tmp_path / "other.so", lambda to: to.write_text("whole"))
        left = {x.name for x in tmp_path.iterdir() if x.name.startswith((cache.MAKING, cache.WRITING))}
        assert left == {f"{cache.MAKING}at_work.so", new.name}
    finally:
        at_work.kill()
        at_work.wait()


def test_a_lock_that_was_removed_holds_nobody_apart_from_its_next_holder(tmp_path):
    """Who waited for a file that `cache clear` removed takes the new one."""
    path, order = tmp_path / "a.so", []

    def second():
        with cache.lock(path):
            order.append("second")
    with cache.lock(path):
        t = threading.Thread(target=second)
        t.start()
        time.sleep(0.1)
        cache.lock_of(path).unlink()
        with cache.lock(path) as held:  # of the new file
            assert held
        order.append("first")
    t.join()
    assert order == ["first", "second"] and cache.lock_of(path).exists()


# --- PTO -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_simulators_engine_is_compiled_once_and_mended(folder, compiler):
    code = "from gdn_codegen import pto_sim; print(pto_sim.runtime_object())"
    many = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (engine,) = {p.communicate()[0].strip() for p in many}
    assert compiler() == 1 and engine == str(pto_sim.runtime_object())
    open(engine, "w").close()
    assert pto_sim.runtime_object().read_text() == "whole" and compiler() == 2


@pytest.fixture
def library(folder, compiler, monkeypatch):
    """What a PTO module's launcher would load, in as many modules of one text as are asked for."""
    b = Build("pto", 16, head_dim_k=16, head_dim_v=16)

    def start():
        m = import_path(cached(b))
        monkeypatch.setattr(m.ctypes, "CDLL", cache.Path)
        m._launcher.library.cache_clear()
        return m
    return start


def test_a_pto_library_is_mended_and_compiled_once_by_threads(library, compiler, folder):
    m = library()
    found = []
    many = [threading.Thread(target=lambda: found.append(m._launcher.library("cpu"))) for _ in range(4)]
    [t.start() for t in many]
    [t.join() for t in many]
    (path,) = set(found)
    assert compiler() == 2 and cache.whole(path)  # the engine, too
    stale = path.with_name(cache.MAKING + path.name)
    stale.mkdir()
    path.write_text("damaged")
    assert library()._launcher.library("cpu").read_text() == "whole" and compiler() == 3 and not stale.exists()
    library()._launcher.library("cpu")
    assert compiler() == 3 and [x.name for x in path.parent.iterdir() if x.name.startswith(".")] == []


# --- TileLang --------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not targets.runs("tilelang", "cpu"), reason="needs tilelang and gcc")
def test_tilelangs_compiles_wait_for_each_other(folder, tmp_path, monkeypatch):
    m = import_path(cached(Build("tilelang", 16, head_dim_k=16, head_dim_v=16)))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "tl"))
    at_once, most = [], []

    def compile():
        with m._launcher.locked("o_S", "cpu"):
            at_once.append(1)
            most.append(len(at_once))
            time.sleep(0.05)
            at_once.pop()

    def run():
        most.clear()
        many = [threading.Thread(target=compile) for _ in range(3)]
        [t.start() for t in many]
        [t.join() for t in many]
        return max(most)
    assert run() == 1 and len(list((tmp_path / "tl").glob(".o_S_cpu_*.lock"))) == 1
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")  # there is nothing to wait for
    assert run() > 1
    monkeypatch.delenv("TILELANG_DISABLE_CACHE")
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/proc/none")
    assert run() > 1


@pytest.mark.slow
@pytest.mark.skipif(not targets.runs("tilelang", "cpu"), reason="needs tilelang")
def test_a_damaged_library_that_was_compiled_ahead_is_compiled_anew(folder, monkeypatch):
    path = cached(Build("tilelang", 16, head_dim_k=16, head_dim_v=16))
    m = import_path(path)
    ahead = cache.Path(m._launcher.library("o_S", "sm_90a"))
    cache.write(ahead, "damaged")

    class Made:
        main = "compiled"

    class Kernel:
        class adapter:
            get_exportable_executable = Made
    monkeypatch.setattr(m._launcher, "compiled", lambda name, arch: Kernel)
    m._launcher.loaded.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"o_S_sm_90a_.*\.so cannot be loaded, so the kernel is compiled again"):
        assert m._launcher.loaded("o_S", "sm_90a").main == "compiled"
    m._launcher.loaded.cache_clear()
    shutil.rmtree(ahead.parent)


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def full(folder, compiler):
    """A cache with something of each kind, and what is not the package's."""
    b = cached(Build("triton", 16, head_dim_k=16, head_dim_v=16))
    engine = pto_sim.runtime_object()
    chain = cache.made(folder / "native_launcher" / f"native_launcher_{'0' * 16}.so", lambda to: to.write_text("x" * 2048))
    table = cache.write(folder / "choices" / "x" / "triton_gdn_codegen-0_torch-0.json", "{}")
    ours = [b, engine, chain, table, folder / "pto" / f"{cache.MAKING}{'1' * 24}_cpu.so"]
    ours[-1].mkdir()
    theirs = [cache.write(folder / "notes.txt", "mine"), cache.write(folder / "modules" / "triton" / "mine.py", "mine"),
              cache.write(folder / "pto" / "holiday.jpg", "mine"), cache.write(folder / "other" / "a.so", "mine")]
    link = folder / "pto" / f"{'2' * 24}_cpu.so"
    link.symlink_to(theirs[0])
    return ours, [*theirs, link]


def test_list_says_what_lies_there_and_how_large_it_is(full, folder, capsys):
    ours, theirs = full
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}\n") and all(str(x.relative_to(folder)) in out for x in ours)
    assert not any(str(x.relative_to(folder)) in out for x in theirs)
    assert "   2.0 KiB  native_launcher/native_launcher_0000000000000000.so\n" in out and out.endswith(" in all\n")


def test_clear_removes_what_is_the_packages_and_says_so(full, folder, capsys):
    ours, theirs = full
    assert main(["cache", "clear"]) == 0
    out = capsys.readouterr().out
    table = ours.pop(3)
    assert not any(x.exists() for x in ours) and table.exists() and all(x.read_text() == "mine" for x in theirs)
    assert all(f"  {x.relative_to(folder)}\n" in out for x in ours) and f"KiB removed from {folder}\n" in out
    assert "left, since it is not gdn_codegen's: pto/holiday.jpg" in out and "notes.txt" not in out
    assert not list(folder.rglob("*.lock")) and not list(folder.rglob("*.sum"))
    assert main(["cache", "clear", "choices"]) == 0 and not table.exists()


def test_clear_leaves_what_a_process_makes(full, capsys):
    ours, _ = full
    with cache.lock(ours[2]):
        assert main(["cache", "clear", "native_launcher"]) == 0
    assert ours[2].exists() and ours[1].exists()
    assert "left, since a process makes it: native_launcher/native_launcher_" in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    (["clear", "everything"], "kinds: got 'everything'; accepted: modules, native_launcher, choices, pto"),
    (["clear", "triton"], "kinds: got 'triton'; accepted: modules,"),
    (["export", "a.tar.gz", "everything"], "kinds: got 'everything'; accepted: modules, native_launcher, choices, pto, triton")])
def test_kinds_that_there_are_not(words, said, folder, capsys):
    assert main(["cache", *words]) == 2 and said in capsys.readouterr().err


def test_without_a_cache_there_is_nothing_to_list_or_clear(folder, capsys):
    assert main(["cache", "list"]) == 0 and main(["cache", "clear"]) == 0
    assert "0 B  in all" in capsys.readouterr().out and not folder.exists()


@pytest.mark.slow
def test_doctor_says_where_the_cache_is_how_large_and_whether_it_can_be_written(full, folder, monkeypatch):
    def said():
        (found,) = (f for f in targets.findings() if f.what == "cache")
        return found
    assert said().ok and said().detail.startswith(f"{folder}, ")
    assert said().detail.endswith(cache_command.told(sum(e.size for e in cache_command.entries())))
    monkeypatch.setenv("GDN_CODEGEN_CACHE", "/proc/none")
    assert not said().ok and "GDN_CODEGEN_CACHE: got /proc/none" in said().detail


def test_sizes_as_people_read_them():
    assert [cache_command.told(n) for n in (0, 1023, 1024, 3 * 2**20 // 2, 5 * 2**30)] == \
        ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB"]


def test_a_file_that_another_process_takes_away_has_no_size(tmp_path):
    (tmp_path / "is_there").write_text("four")
    assert [cache_command.Entry("modules", tmp_path / n).size for n in ("is_there", "was_there")] == [4, 0]
