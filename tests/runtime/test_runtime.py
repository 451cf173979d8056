"""Build names, cache, command line, standalone modules, errors."""
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from reference import call, check, problem

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.cli import main
from gdn_codegen.runtime import cache, load, targets
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function, import_path, write
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.targets import OWN
from gdn_codegen.tools.compile_ahead import fresh

ROOT = Path(__file__).parents[2]
HERE = [t for t in OWN if runs(t, "cpu")]
SMALL = dict(head_dim_k=32, head_dim_v=32)


@pytest.mark.parametrize("b, name", [
    (Build("triton"), "gdn_c64_bthd"), (Build("triton", 32, "bhtd"), "gdn_c32_bhtd"),
    (Build("triton", dtype="bfloat16", schedule="staged"), "gdn_c64_bthd_bf16_staged"),
    (Build("triton", algorithm="simple_gla", head_dim_k=64), "simple_gla_c64_bthd_k64v128")])
def test_names(b, name):
    assert b.name == name


@pytest.mark.parametrize("bad", [dict(target="cuda"), dict(chunk=48), dict(layout="tbhd"), dict(dtype="int8"),
                                 dict(head_dim_k=50), dict(schedule="none"), dict(chunk=64.0), dict(head_dim_v=128.0),
                                 dict(target=3)])
def test_bad_options_name_the_field(bad):
    (field, value), = bad.items()
    with pytest.raises(ValueError, match=rf"{field}.*{value}.*accepted"):
        Build(**{"target": "triton", **bad})


@pytest.mark.parametrize("target", OWN)
def test_rendering_is_ascii_and_repeatable(target):
    b = Build(target)
    text = render(b)
    assert text == render(b) and text.isascii()
    assert str(ROOT) not in text


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_a_copied_module_stands_alone(target, tmp_path):
    """In an empty folder, with the package out of reach (only the PTO simulator comes from it)."""
    path = write(Build(target, schedule="replay", **SMALL), tmp_path)
    (tmp_path / "alone.py").write_text(path.read_text())
    hide = "" if target == "pto" else "import sys; sys.modules['gdn_codegen'] = None\n"
    code = hide + (
        "import torch, alone\n"
        "r = lambda *s: torch.nn.functional.normalize(torch.randn(*s), dim=-1).half()\n"
        "q, k, v = r(1, 70, 1, 32), r(1, 70, 1, 32), r(1, 70, 2, 32)\n"
        "o, S = alone.chunk_gated_delta_rule(q, k, v, -torch.rand(1, 70, 2), torch.rand(1, 70, 2), output_final_state=True)\n"
        "print(bool(o.isfinite().all()), tuple(S.shape))\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT) if target == "pto" else ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "True (1, 2, 32, 32)"


# --- the cache -------------------------------------------------------------------------------------------------------
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = cache.write(tmp_path / "a.py", "old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.write(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.py"]


def test_several_processes_make_one_file_once(tmp_path):
    code = ("import sys, time, os; from pathlib import Path; from gdn_codegen.runtime import cache\n"
            "def make(p):\n    open(sys.argv[1] + '/made', 'a').write('x'); time.sleep(0.3); p.write_text('whole')\n"
            "print(cache.made(Path(sys.argv[1]) / 'sub' / 'm.py', make).read_text())\n")
    many = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [p.communicate()[0].strip() for p in many] == ["whole"] * 4
    assert (tmp_path / "made").read_text() == "x"


def test_a_killed_maker_leaves_nothing_half_made(tmp_path):
    code = ("import sys, time; from pathlib import Path; from gdn_codegen.runtime import cache\n"
            "def make(p):\n    p.write_text('half'); print('started', flush=True); time.sleep(60)\n"
            "cache.made(Path(sys.argv[1]) / 'm.py', make)\n")
    p = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline().strip() == "started"
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert not (tmp_path / "m.py").exists()
    assert cache.made(tmp_path / "m.py", lambda t: t.write_text("whole")).read_text() == "whole"


def test_first_use_builds_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
    load.module.cache_clear()
    b = Build(HERE[0], **SMALL)
    function(b)
    (made,) = (tmp_path / "modules" / b.target).glob("*.py")
    assert made.stem.startswith(b.name) and made.read_text() == render(b)
    load.module.cache_clear()


# --- the command line ------------------------------------------------------------------------------------------------
def test_build_prints_path_and_import_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["build", "--target", "tilelang", "--chunk", "64", "--layout", "bthd"]) == 0
    out = capsys.readouterr().out
    assert "generated/tilelang/gdn_c64_bthd.py" in out
    assert "from generated.tilelang.gdn_c64_bthd import chunk_gated_delta_rule" in out


def test_build_all_shows_progress(tmp_path, capsys):
    assert main(["build", "--target", "all", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [f"[{i + 1}/{len(OWN)}] {t}" in out for i, t in enumerate(OWN)] == [True] * len(OWN)
    assert sorted(p.parent.name for p in tmp_path.rglob("*.py")) == sorted(OWN)


def test_build_reports_a_bad_page(capsys, tmp_path):
    assert main(["build", "--target", "triton", "--algorithm", "nothing", "--out", str(tmp_path)]) == 2
    assert re.search(r"algorithm: got 'nothing'; accepted are .*simple_gla", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["cache_masks=5", "descriptors=7", "longest_first=2", "value_heads=\u00b2"])
def test_build_reports_a_bad_field(word, capsys, tmp_path):
    assert main(["build", "--target", "triton", "--set", word, "--out", str(tmp_path)]) == 2
    assert f"set: got {word!r}; accepted: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_show(capsys):
    assert main(["show", "--target", "triton", "--schedule", "replay", "--kernels"]) == 0
    out = capsys.readouterr().out
    assert "G_Tinv: parallel over chunks" in out and "o_S: walks a sequence's chunks" in out
    assert main(["show", "--ir", "--graph", "--schedule"]) == 0
    out = capsys.readouterr().out
    assert "program('gated_delta_rule'" in out and out.count("digraph") == 1 and "schedule walk" in out


def test_list_and_doctor(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(w in out for w in ("gated_delta_rule", "simple_gla", "staged", *OWN))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(t in out for t in OWN) and re.search(r"pto +NPU tensors +no", out)


def test_verify_fails_when_a_target_is_wrong(capsys, monkeypatch):
    from gdn_codegen.tools import verify
    target = HERE[0]
    options = ["verify", "--target", target, "--quick", "--head-dim-k", "32", "--head-dim-v", "32"]
    assert main(options) == 0
    monkeypatch.setattr(verify, "function", lambda b: lambda **x: (torch.zeros_like(x["v"]), x["initial_state"] * 0))
    assert main(options) == 1
    assert "FAILED" in capsys.readouterr().out


# --- the package's op ------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_auto_runs_and_agrees():
    x = problem([33, 40], 1, 2, 32, 32)
    check(lambda *a, **k: chunk_gated_delta_rule(*a, **k, target="auto"), x)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_views_are_accepted_and_inputs_are_not_changed(target):
    x = problem([40], 1, 1, 32, 32)
    wide = (torch.randn(40, 1, 96) / 8).half()
    view = {**x, "q": wide[..., :32], "k": wide[..., 32:64], "v": wide[..., 64:]}
    before = wide.clone()
    fn = function(Build(target, **SMALL))
    o, S = call(fn, view)
    o2, S2 = call(fn, {n: t.contiguous() if isinstance(t, torch.Tensor) else t for n, t in view.items()})
    assert torch.equal(o, o2) and torch.equal(S, S2) and torch.equal(wide, before)


def args(**change):
    x = dict(q=torch.randn(1, 40, 2, 32).half(), k=torch.randn(1, 40, 2, 32).half(), v=torch.randn(1, 40, 4, 32).half(),
             g=-torch.rand(1, 40, 4), beta=torch.rand(1, 40, 4))
    return {**x, **change}


BAD = {
    "rank": (dict(q=torch.randn(40, 2, 32).half()), "q: got .*rank"),
    "dtype": (dict(k=torch.randn(1, 40, 2, 32)), "k: got torch.float32"),
    "integers": (dict(g=torch.zeros(1, 40, 4, dtype=torch.int32)), "g: got torch.int32"),
    "tokens": (dict(v=torch.randn(1, 41, 4, 32).half()), r"v: got shape .*T = 40"),
    "heads": (dict(k=torch.randn(1, 40, 1, 32).half()), r"k: got shape .*H = 2"),
    "ratio": (dict(v=torch.randn(1, 40, 3, 32).half(), g=-torch.rand(1, 40, 3), beta=torch.rand(1, 40, 3)), "HV a multiple"),
    "head dim": (dict(k=torch.randn(1, 40, 2, 64).half()), "k: got shape .*32"),
    "not a tensor": (dict(beta=[1.0]), "beta: got list"),
    "state": (dict(initial_state=torch.zeros(2, 4, 32, 32)), r"initial_state: got .*\(1, 4, 32, 32\)"),
    "scale": (dict(scale=float("nan")), "scale: got nan.*float32 holds"),
    "cu start": (dict(cu_seqlens=torch.tensor([1, 40])), "cu_seqlens: got .*start at 0"),
    "cu falls": (dict(cu_seqlens=torch.tensor([0, 30, 20])), "cu_seqlens: got .*never fall"),
    "cu past T": (dict(cu_seqlens=torch.tensor([0, 41])), "cu_seqlens: got .*T = 40"),
    "cu dtype": (dict(cu_seqlens=torch.tensor([0.0, 40.0])), "cu_seqlens: got torch.float32"),
    "cu rank": (dict(cu_seqlens=torch.tensor([[0, 40]])), "cu_seqlens: got shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_value_error_that_names_it(case):
    change, text = BAD[case]
    fn = function(Build(HERE[0], **SMALL))
    with pytest.raises(ValueError, match=text):
        fn(**args(**change))


@pytest.mark.parametrize("change, text", [
    (dict(target="cuda"), "target: got 'cuda'"), (dict(chunk_size=60), "chunk_size: got 60"),
    (dict(layout="x"), "layout: got 'x'"), (dict(schedule="x"), "schedule: got 'x'"),
    (dict(q=torch.zeros(1, 40, 2, 32, dtype=torch.int8)), "q: got torch.int8")])
def test_bad_options_of_the_packages_op(change, text):
    with pytest.raises(ValueError, match=text):
        chunk_gated_delta_rule(**args(**change))


def test_modules_of_one_name_in_two_folders_do_not_mix(tmp_path):
    for n, value in (("a", 1), ("b", 2)):
        cache.write(tmp_path / n / "m.py", f"VALUE = {value}\n")
    assert import_path(tmp_path / "a" / "m.py").VALUE == 1 and import_path(tmp_path / "b" / "m.py").VALUE == 2


def test_threads_that_call_first_all_get_the_module(tmp_path):
    """A module that is being imported is known already, and not yet whole."""
    path = cache.write(tmp_path / "slow.py", "import time\ntime.sleep(0.5)\nVALUE = 1\n")
    with ThreadPoolExecutor(4) as pool:
        assert [m.VALUE for m in pool.map(import_path, [path] * 4)] == [1] * 4


def test_a_module_that_failed_can_be_imported_once_it_is_mended(tmp_path):
    path = cache.write(tmp_path / "m.py", "1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_path(path)
    assert import_path(cache.write(path, "x = 12345")).x == 12345


def test_a_damaged_module_in_the_cache_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
    path = load.cached(Build("triton"))
    text = path.read_text()
    path.write_text(text[:1000])
    assert load.cached(Build("triton")) == path and path.read_text() == text
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(path))
    with pytest.raises(ValueError, match=r"GDN_CODEGEN_CACHE: got .*; accepted: a folder that can be written"):
        load.cached(Build("triton"))


@pytest.mark.parametrize("under", ["", "a/b"])
def test_a_module_of_pto_names_a_cache_that_cannot_be_written(tmp_path, monkeypatch, under):
    path = load.write(Build("pto", 16, head_dim_k=16, head_dim_v=16, dtype="float32"), tmp_path)
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(cache.write(tmp_path / "file", "no folder") / under))
    with pytest.raises(ValueError, match=r"GDN_CODEGEN_CACHE: got .*file.*: Not a directory; accepted: a folder that can be "):
        import_path(path)._launcher.library("cpu")


@pytest.mark.parametrize("chunks", ["x", "-3", ""])
@pytest.mark.parametrize("read", [import_path, fresh])
def test_chunks_of_a_part_are_a_number(read, chunks, tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_CODEGEN_PART_CHUNKS", chunks)
    path = write(Build("triton", schedule=varied("walk", partition="decay")), tmp_path)
    with pytest.raises(ValueError, match=f"GDN_CODEGEN_PART_CHUNKS: got '{chunks}'; accepted: the chunks of a part"):
        read(path)
    monkeypatch.setenv("GDN_CODEGEN_PART_CHUNKS", "3")
    assert read(path).HOST.part_chunks == 3


def test_doctor_looks_for_headers(tmp_path, monkeypatch):
    def said():
        (found,) = (f for f in targets.findings() if f.what == "PTO-ISA headers")
        return found.ok, found.detail
    monkeypatch.delenv("PTO_ISA_ROOT", raising=False)
    assert said() == (False, "set PTO_ISA_ROOT to a PTO-ISA installation")
    monkeypatch.setenv("PTO_ISA_ROOT", str(tmp_path))
    assert said() == (False, f"PTO_ISA_ROOT: {tmp_path} has no include/pto/pto-inst.hpp")
    cache.write(tmp_path / "include" / "pto" / "pto-inst.hpp", "")
    assert said() == (True, str(tmp_path / "include"))


@pytest.mark.slow
def test_check_says_what_is_missing_and_fails_on_a_bad_kernel(tmp_path, capsys, monkeypatch):
    from gdn_codegen.tools import check as checks
    options = ["build", "--target", "pto", "--check", "--head-dim-k", "32", "--head-dim-v", "32", "--out", str(tmp_path)]
    monkeypatch.setattr("shutil.which", lambda n: None)
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "not compiled, for want of a toolchain: g++" in out and out.endswith("not checked, or in part: pto\n")
    assert main([*options, "--strict"]) == 1 and "not checked, or in part: pto" in capsys.readouterr().out
    monkeypatch.undo()
    assert main([*options, "--strict"]) == 0
    out = capsys.readouterr().out
    assert "compiles them" in out and "not checked" not in out
    b = Build("pto", **SMALL)
    path = tmp_path / "bad.py"
    path.write_text(render(b).replace("TMATMUL(", "TMATMULL(", 1))
    assert [ok for _, ok in checks.check(b, path)] == [False]
