"""Kernels compiled ahead: the first call loads them, compiles nothing, and takes nothing that was made from another text."""
import contextlib
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from devices import H200
from reference import call, problem

from gdn_codegen import cli
from gdn_codegen.models import MODELS, Model
from gdn_codegen.runtime import load
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import cached, function, write
from gdn_codegen.schedule import varied
from gdn_codegen.tools import compile_ahead as ahead
from gdn_codegen.tools.check_triton import Driver
from gdn_codegen.tools.compile_ahead import compile_ahead, fresh
from gdn_codegen.tools.served import Most, builds

SMALL = dict(chunk=16, head_dim_k=16, head_dim_v=16)


class Gpu:
    type, index = "cuda", 0


# --- tilelang --------------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch):
    """No GPU, but what a launcher asks of one; and no compiler."""
    def none(*a, **k):
        raise RuntimeError("compiled")
    tilelang = pytest.importorskip("tilelang")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return lambda: (monkeypatch.setattr(tilelang, "compile", none), monkeypatch.setenv("PATH", ""))


def first_call(path):
    """The launch of kernel G on CPU tensors: it gets as far as the compiled function, which wants a GPU's."""
    m = fresh(path)
    x = torch.zeros(1, 40, 2), torch.zeros(4, 2, 16), torch.zeros(2, dtype=torch.int32)
    m._launcher("G", 6, (1, 40, 0, 1, 2, 3), [], Gpu())(x[:2], x[2], [])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_first_call_loads_what_was_compiled_ahead(gpu, tmp_path, monkeypatch):
    b = Build("tilelang", schedule="staged", **SMALL)
    path = write(b, tmp_path)
    m = fresh(path)
    m._launcher.kernels = {"G": m._launcher.kernels["G"]}  # one is enough, and takes nvcc seconds
    monkeypatch.setattr(ahead, "import_path", lambda path: m)
    lines = list(compile_ahead(b, path, "sm_90a", []))
    libraries = sorted(tmp_path.rglob("*.so"), reverse=True)
    assert [x.name.split("_")[0] for x in libraries] == ["native", "G"] and len(lines) == 2
    assert all(str(x) in " ".join(lines) and x.parent == path.with_suffix(".kernels") for x in libraries)
    gpu()
    assert "is there" in next(compile_ahead(b, path, "sm_90a", []))
    with pytest.raises(Exception, match="device"):
        first_call(path)

    elsewhere = tmp_path / "elsewhere"  # both are copied together
    shutil.copytree(path.parent, elsewhere)
    with pytest.raises(Exception, match="device"):
        first_call(elsewhere / path.name)

    path.write_text(path.read_text() + "# another text\n")
    with pytest.raises(RuntimeError, match="compiled"):
        first_call(path)
    monkeypatch.setattr(m.tilelang, "__version__", "another")
    with pytest.raises(RuntimeError, match="compiled"):
        first_call(elsewhere / path.name)


def test_kernels_are_compiled_side_by_side(tmp_path, monkeypatch):
    """Each waits for another one to begin. If one fails, its error comes."""
    b, begun, both = Build("tilelang", schedule="staged", **SMALL), [], threading.Barrier(2)
    m = fresh(path := write(b, tmp_path))
    monkeypatch.setattr(ahead, "import_path", lambda path: m)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda process: {0, 1})

    def export(launcher, name, arch, to):
        begun.append(name)
        both.wait(30)
        to.write_text(f"{name} {arch}")
    monkeypatch.setattr(ahead, "_export", export)
    names = list(m._launcher.kernels)[:4]
    m._launcher.kernels = {n: m._launcher.kernels[n] for n in names}
    lines = list(compile_ahead(b, path, "sm_90a", []))
    files = [Path(x.partition(": ")[0]) for x in lines]
    assert [x.name.partition("_sm_90a")[0] for x in files[:-1]] == names == sorted(begun, key=names.index)
    assert all(x.is_file() for x in files)

    def failing(launcher, name, arch, to):
        raise RuntimeError(f"nvcc: {name}")
    monkeypatch.setattr(ahead, "_export", failing)
    shutil.rmtree(path.with_suffix(".kernels"))
    with pytest.raises(RuntimeError, match=f"nvcc: {names[0]}"):
        list(compile_ahead(b, path, "sm_90a", []))
    assert not list(path.with_suffix(".kernels").rglob("G_*.so"))


def test_a_library_is_looked_for_once(gpu, tmp_path, monkeypatch):
    m = fresh(write(Build("tilelang", schedule="staged", **SMALL), tmp_path))
    gpu()
    looked = []
    monkeypatch.setattr(m._launcher, "library", lambda name, arch: looked.append((name, arch)) or str(tmp_path))
    monkeypatch.setattr(m.tilelang.tvm.runtime, "load_module", lambda path: type("Library", (), {"main": print}))
    for _ in range(3):
        m._launcher("G", 6, (1, 40, 0, 1, 2, 3), [], Gpu())
    assert looked == [("G", "sm_90a")]


# --- triton ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def as_if_on_a_gpu(m):
    """The module takes tensors without values for a GPU's: what a launch compiles is compiled, nothing runs."""
    from triton.runtime.driver import driver
    driver.set_active(Driver(ahead._target("sm_90a")))
    launcher = m.HOST.launcher
    m.HOST.launcher = lambda name, instances, sizes, flags, device: launcher(name, instances, sizes, flags, Gpu())
    m._is_suspect = lambda device: False
    m._launcher.kernels = {n: ahead._Compiles(k) for n, k in m._launcher.kernels.items()}
    m._launcher.compiled = type("Nothing", (dict,), {"__setitem__": lambda self, *a: None})()  # what compiled cannot be launched
    try:
        yield
    finally:
        driver.set_active(None)


def make(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call_in_all_ways(m):
    """Calls the module's op."""
    m.HOST.part_chunks = 2
    for tokens in (96, 101):
        for rows, ends in ((1, None), (2, None), (1, make(4, dtype=torch.int64))):
            for state in (False, True):
                n = rows if ends is None else 3
                x = [make(rows, h, tokens, 16) for h in (1, 1, 2)] + 2 * [make(rows, 2, tokens, dtype=torch.float32)]
                S = make(n, 2, 16, 16, dtype=torch.float32) if state else None
                m.chunk_gated_delta_rule(*x, initial_state=S, output_final_state=tokens > 96, cu_seqlens=ends)


def step(m, rows, tokens, ends, views):
    """A step of a server with two value heads of 16 x 16. ends: sequences of a pack, None for equal rows."""
    bf16 = torch.bfloat16
    wide = make(rows, tokens, 64 + 16 * views, dtype=bf16)
    q, k, v = (x.unflatten(-1, (-1, 16)) for x in (wide[..., :16], wide[..., 16:32], wide[..., 32:64]))
    q, k, v = (q, k, v) if views else (make(*x.shape, dtype=bf16) for x in (q, k, v))
    a, b, dt_bias, A_log = *2 * [make(rows, tokens, 2, dtype=bf16)], make(2, dtype=bf16), make(2, dtype=torch.float32)
    m.chunk_gated_delta_rule(
        q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, initial_state=make(5, 2, 16, 16, dtype=bf16), output_final_state=True,
        state_indices=make(ends or rows, dtype=torch.int32),
        cu_seqlens=None if ends is None else make(ends + 1, dtype=torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fused", varied("replay", partition="decay")])
def test_tritons_cache_has_what_calls_look_up(schedule, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    b = Build("triton", schedule=schedule, layout="bhtd", **SMALL)  # whose kernels take T
    path = write(b, tmp_path)
    if schedule != "fused":  # one kernel over parts is enough
        text = path.read_text()
        for name in function(b).__globals__["TABLES"].ints:
            if name != "o_S":
                text, n = re.subn(rf'        \("{name}", "(chunks|parts|sequences)", .*\n', "", text)
                assert n == 1
        path.write_text(text)
    lines = list(compile_ahead(b, path, "sm_90a", [(1, 2)]))
    assert len(lines) == len(fresh(path).TABLES.kernels)
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **k: hits.append(k["cache_hit"]))
    m = fresh(path)
    with as_if_on_a_gpu(m):
        call_in_all_ways(m)
    assert hits and all(hits)


@pytest.mark.slow
@pytest.mark.parametrize("views", [False, True])
def test_tritons_cache_has_what_steps_of_five_tokens_and_more_look_up(views, tmp_path, monkeypatch):
    """On Hopper only such steps are Triton's. Strides of g depend on the tokens of a call, and one of them is 1."""
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    model = Model((1, 2), (16, 16), engines={"vllm": MODELS["qwen3-next"].engines["vllm"]})
    (b,) = (b for b, calls in builds(model, model.heads, H200, most=Most(16, 2)).items()
            if "decode 2 x 8" in calls and b.contract.strided == views)
    assert b.target == "triton"
    path = write(b, tmp_path)
    assert list(compile_ahead(b, path, "sm_90a", [model.heads]))
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **k: hits.append(k["cache_hit"]))
    for tokens in (5, 8):
        for rows, ends in ((2, None), (1, 2)):
            m = fresh(path)
            with as_if_on_a_gpu(m):
                step(m, rows, tokens, ends, views)
    assert len(hits) == 4 and all(hits)


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, text", [
    (["--target", "pto", "--compile"], "compile: got pto"),
    (["--target", "triton", "--compile"], "compile: got triton without the head counts"),
    (["--target", "triton", "--compile", "avx", "--compile-heads", "1/2"], "compile: got 'avx'"),
    (["--target", "tilelang", "--compile", "gfx942"], "compile: got 'gfx942'"),
    (["--target", "tilelang", "--arch", "sm_90a", "--compile", "sm_80"], "compile: got 'sm_80'; accepted: sm_90a"),
    (["--target", "tilelang", "--compile", "foo"], "compile: got 'foo'"),
    (["--target", "triton", "--compile", "--compile-heads", "2"], "compile_heads: got '2'"),
    (["--target", "triton", "--compile", "--compile-heads", "3/4"], "compile_heads: got '3/4'; accepted: H/HV"),
    (["--target", "all", "--compile"], "compile: got triton without the head counts"),
    (["--target", "all", "--accept", "g=unit"], "accept: got g=unit"),
])
def test_what_cannot_be_compiled_is_said(words, text, capsys, tmp_path):
    assert cli.main(["build", *words, "--out", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_cached_modules_are_those_of_the_packages_op(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
    words = ["--target", "triton", "--chunk", "16", "--head-dim-k", "16", "--head-dim-v", "16", "--cached"]
    assert cli.main(["build", *words, "--schedule", "fused"]) == 0
    b = Build("triton", **SMALL)
    assert str(cached(b)) in capsys.readouterr().out and cached(b).is_relative_to(tmp_path)
    load.module.cache_clear()
    assert function(b).__globals__["__file__"] == str(cached(b))
    call(function(b), problem([20], 1, 2, 16, 16))
    load.module.cache_clear()
